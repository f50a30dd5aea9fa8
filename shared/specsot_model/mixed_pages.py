"""KV pages of a layer range whose sliding-window layers have other heads than its other layers (Gemma 4).

Layers that read the keys and values of another layer have no pages of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.members import KvDtype, Range
from specsot_model.kv import KVPages, Moves, Places


class MixedPages(KVPages):
    """A paged KV cache whose layers have KV heads of two numbers and sizes.

    Both kinds have the same pages, page size and slots. `layers` lists the pages of both kinds in the order
    of the model's layers; a layer without keys and values of its own has those of the layer that it reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Range,
        pages: int,
        page_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        form: KvDtype = "auto",
    ) -> None:
        """Reserve the cache, filled with zeros.

        ModelError is raised if the memory cannot be reserved.

        config: The model's config.
        layers: The range of layers.
        pages: Number of pages of every layer.
        page_rows: Number of rows (tokens) of a page.
        dtype: Type of the rows, unless `form` says int8.
        device: Device of the cache.
        form: "int8" stores rows in int8 with a scale; "auto" stores `dtype`.
        """
        sources = [config.kv_source(layer) - layers.first for layer in range(layers.first, layers.last)]
        own = [layer for layer, source in enumerate(sources) if layer == source]
        is_wide = [layers.first + layer not in config.windowed for layer in own]
        kv_heads, head_dim = config.wide or (config.kv_heads, config.head_dim)
        sizes = config.kv_heads, config.head_dim, dtype, device, form
        super().__init__(is_wide.count(False), pages, page_rows, *sizes)
        self._wide = KVPages(is_wide.count(True), pages, page_rows, kv_heads, head_dim, dtype, device, form)
        places = {
            layer: (kind, is_wide[:number].count(kind))
            for number, (layer, kind) in enumerate(zip(own, is_wide))
        }
        # By layer of the range: whether its heads are wide, and the index of its keys and values among those
        # of its kind.
        self._places = [places[source] for source in sources]
        both = self.layers, self._wide.layers
        self.layers = tuple(both[kind][index] for kind, index in self._places)

    @property
    def bytes(self) -> int:
        """Return the memory of all layers, in bytes."""
        return super().bytes + self._wide.bytes

    def put(self, layer: int, places: Places, kv: Tensor) -> None:
        """Write keys and values of one layer at located places.

        layer: Index of the layer within the range.
        places: Page and offset of each row, as `locate` returns them.
        kv: [rows, 2, kv_heads, head_dim], keys first, in floats, with the heads of this layer.
        """
        is_wide, index = self._places[layer]
        if is_wide:
            self._wide.put(index, places, kv)
        else:
            super().put(index, places, kv)

    def move(self, moves: Moves) -> None:
        """Copy rows from source to target slots in every layer.

        moves: Pairs (source slot, target slot); empty: nothing is done.
        """
        super().move(moves)
        self._wide.move(moves)

    def copy_page(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of a page to another page, in every layer.

        source: Number of the page that is read.
        target: Number of the page that is written.
        rows: Number of rows to copy, from the page's first row on.
        """
        super().copy_page(source, target, rows)
        self._wide.copy_page(source, target, rows)

    def clear_rows(self, slots: Sequence[int]) -> None:
        """Zero rows in every layer.

        slots: Slots of the rows, page * page_rows + offset; empty: nothing is done.
        """
        super().clear_rows(slots)
        self._wide.clear_rows(slots)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero pages in every layer.

        pages: Numbers of the pages. Empty: nothing happens.
        """
        super().clear_pages(pages)
        self._wide.clear_pages(pages)
