"""KV pages of a layer range whose layers store heads of different sizes or numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsot.members import KvDtype
from specsot_model.kv import KVPages, Moves, Places

# Number of KV heads, and numbers of a head.
HeadSize = tuple[int, int]


class GroupedPages(KVPages):
    """Pages of layers in groups: layers with equal heads share the tensors of one `KVPages`.

    A page number and a slot mean the same in every group, so that all groups follow one page table.

    layers: By layer of the range, the view of its keys and values in the pages of its group.
    pages: Number of pages of every layer.
    page_rows: Number of rows (tokens) of a page.
    """

    def __init__(
        self,
        sizes: Sequence[HeadSize],
        pages: int,
        page_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        form: KvDtype = "auto",
    ) -> None:
        """Reserve the pages of every group, filled with zeros.

        sizes: By layer of the range, the number of KV heads and the numbers of a head.
        pages: Number of pages of every layer.
        page_rows: Number of rows (tokens) of a page.
        dtype: Type of the rows, unless `form` says int8.
        device: Device of the pages.
        form: "int8" stores rows in int8 with a scale; "auto" stores `dtype`.

        Raises ModelError if the memory cannot be reserved.
        """
        self.pages = pages
        self.page_rows = page_rows
        self.shared = lambda page: False
        self._groups = {
            size: KVPages(sizes.count(size), pages, page_rows, *size, dtype, device, form)
            for size in dict.fromkeys(sizes)
        }
        # By layer: the pages of its group, and its index in the group.
        self._places = [(self._groups[size], sizes[:layer].count(size)) for layer, size in enumerate(sizes)]
        self.layers = tuple(group.layers[index] for group, index in self._places)

    @property
    def bytes(self) -> int:
        """Return the memory of all layers, in bytes."""
        return sum(group.bytes for group in self._groups.values())

    def put(self, layer: int, places: Places, kv: Tensor) -> None:
        """Write keys and values of one layer at located places; see `KVPages.put`.

        layer: Index of the layer within the range.
        places: Page and offset of each row, as `locate` returns them.
        kv: [rows, 2, kv_heads, head_dim] in the layer's own sizes, keys first.
        """
        group, index = self._places[layer]
        group.put(index, places, kv)

    def move(self, moves: Moves) -> None:
        """Copy rows from source to target slots in every layer; see `KVPages.move`.

        moves: Pairs (source slot, target slot); empty: nothing is done.
        """
        for group in self._groups.values():
            group.move(moves)

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
        group, index = self._places[layer]
        group.keep_smallest_keys(index, sources, targets, holds_row, counts)

    def rows_at(self, layer: int, slots: Sequence[int]) -> Tensor:
        """Return a host copy of rows of one layer in their stored form; see `KVPages.rows_at`.

        layer: Index of the layer within the range.
        slots: Slots to read.
        """
        group, index = self._places[layer]
        return group.rows_at(index, slots)

    def put_rows_at(self, layer: int, slots: Sequence[int], rows: Tensor) -> None:
        """Store rows of one layer that `rows_at` returned; see `KVPages.put_rows_at`.

        layer: Index of the layer within the range.
        slots: Slots to write, one per row.
        rows: [rows, numbers of a row], as `rows_at` returns them.

        Raises WireError if the layer stores rows in another form.
        """
        group, index = self._places[layer]
        group.put_rows_at(index, slots, rows)

    def copy_page(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of a page to another page, in every layer.

        source: Number of the page that is read.
        target: Number of the page that is written.
        rows: Number of rows to copy, from the page's first row on.
        """
        for group in self._groups.values():
            group.copy_page(source, target, rows)

    def clear_rows(self, slots: Sequence[int]) -> None:
        """Zero rows in every layer.

        slots: Slots of the rows; empty: nothing is done.
        """
        for group in self._groups.values():
            group.clear_rows(slots)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero pages in every layer.

        pages: Numbers of the pages. Empty: nothing happens.
        """
        for group in self._groups.values():
            group.clear_pages(pages)
