"""Joins several `KVPages` into one cache, for layers whose rows differ in size or lie on several devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsot.members import KvDtype
from specsot_model.kv import KVPages, Moves, Places

# Number of KV heads, and numbers of a head.
HeadSize = tuple[int, int]


class JoinedPages(KVPages):
    """Several `KVPages` as one cache. A page number and a slot mean the same in every part, so that all parts
    follow one page table, and what is done to rows or pages of all layers is done in every part.

    parts: The pages that are joined.
    layers: By layer of the range, the view of its keys and values in the pages of its part.
    pages: Number of pages of every layer.
    page_rows: Number of rows (tokens) of a page.
    """

    def __init__(self, parts: Sequence[KVPages], places: Sequence[tuple[int, int]]) -> None:
        """Join the pages; nothing is copied.

        parts: The pages, with the same number of pages and rows of a page each; at least one.
        places: By layer of the range, the index of its part, and the layer's index within the part.
        """
        self.parts = tuple(parts)
        self.pages = parts[0].pages
        self.page_rows = parts[0].page_rows
        self.shared = parts[0].shared
        # By layer of the range: its part, and the layer's index within the part.
        self._places = [(parts[part], index) for part, index in places]
        self.layers = tuple(part.layers[index] for part, index in self._places)

    @property
    def bytes(self) -> int:
        """Return the memory of all parts, in bytes."""
        return sum(part.bytes for part in self.parts)

    def put(self, layer: int, places: Places, kv: Tensor) -> None:
        """Write keys and values of one layer at located places; see `KVPages.put`.

        layer: Index of the layer within the range.
        places: Page and offset of each row, as `locate` returns them.
        kv: [rows, tensors, kv_heads, head_dim] in the layer's own sizes.
        """
        part, index = self._places[layer]
        part.put(index, places, kv)

    def move(self, moves: Moves) -> None:
        """Copy rows from source to target slots in every layer; see `KVPages.move`.

        moves: Pairs (source slot, target slot); empty: nothing is done.
        """
        for part in self.parts:
            part.move(moves)

    def move_on_device(self, moves: Tensor) -> None:
        """Copy rows from source to target slots in every layer; see `KVPages.move_on_device`.

        moves: int32 [2, num_moves], source slots, then target slots; a negative slot moves nothing.
        """
        for part in self.parts:
            part.move_on_device(moves)

    def keep_smallest_keys(
        self,
        layer: int,
        sources: Tensor,
        targets: Tensor,
        holds_row: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        """Prune one layer by key norm; see `KVPages.keep_smallest_keys`.

        layer: Index of the layer within the range.
        sources: LongTensor [rows], slots to choose from.
        targets: LongTensor [kept], slots that receive the chosen rows.
        holds_row: bool [rows, kv_heads], which sources hold a row of each head; None: every source does.
        counts: [kv_heads], how many rows each head keeps; None: as many as there are targets.
        """
        part, index = self._places[layer]
        part.keep_smallest_keys(index, sources, targets, holds_row, counts)

    def rows_at(self, layer: int, slots: Sequence[int]) -> Tensor:
        """Return a host copy of rows of one layer in their stored form; see `KVPages.rows_at`.

        layer: Index of the layer within the range.
        slots: Slots to read.
        """
        part, index = self._places[layer]
        return part.rows_at(index, slots)

    def put_rows_at(self, layer: int, slots: Sequence[int], rows: Tensor) -> None:
        """Store rows of one layer that `rows_at` returned; see `KVPages.put_rows_at`.

        layer: Index of the layer within the range.
        slots: Slots to write, one per row.
        rows: [rows, numbers of a row], as `rows_at` returns them.

        Raises WireError if the layer stores rows in another form.
        """
        part, index = self._places[layer]
        part.put_rows_at(index, slots, rows)

    def copy_page(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of a page to another page, in every layer.

        source: Number of the page that is read.
        target: Number of the page that is written.
        rows: Number of rows to copy, from the page's first row on.
        """
        for part in self.parts:
            part.copy_page(source, target, rows)

    def clear_rows(self, slots: Sequence[int]) -> None:
        """Zero rows in every layer.

        slots: Slots of the rows; empty: nothing is done.
        """
        for part in self.parts:
            part.clear_rows(slots)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero pages in every layer.

        pages: Numbers of the pages. Empty: nothing happens.
        """
        for part in self.parts:
            part.clear_pages(pages)


def pages_by_size(
    sizes: Sequence[HeadSize],
    sources: Sequence[int],
    pages: int,
    page_rows: int,
    dtype: torch.dtype,
    device: torch.device | str,
    form: KvDtype,
) -> JoinedPages:
    """Return the pages of layers that store heads of different sizes or numbers, filled with zeros. Layers
    with equal heads share the tensors of one `KVPages`.

    sizes: By layer of the range, the number of KV heads and the numbers of a head.
    sources: By layer of the range, the layer of the range whose keys and values it reads: itself, or an
        earlier one, and then it has no pages of its own.
    pages: Number of pages of every layer.
    page_rows: Number of rows (tokens) of a page.
    dtype: Type of the rows, unless `form` says int8.
    device: Device of the pages.
    form: "int8" stores rows in int8 with a scale; "auto" stores `dtype`.

    Raises ModelError if the memory cannot be reserved.

        # sizes a b a b, sources 0 1 2 1 -> layers 0 and 2 in one part, 1 and 3 share the other part
    """
    owners = dict[HeadSize, list[int]]()
    for layer, source in enumerate(sources):
        if layer == source:
            owners.setdefault(sizes[layer], []).append(layer)
    parts = [
        KVPages(len(layers), pages, page_rows, *size, dtype, device, form) for size, layers in owners.items()
    ]
    numbers = {size: number for number, size in enumerate(owners)}
    places = [(numbers[sizes[source]], owners[sizes[source]].index(source)) for source in sources]
    return JoinedPages(parts, places)
