"""Counts what layers take of a worker's memory: weights, KV rows, captured graphs; without loading any."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from specsot.checkpoint.config import ModelConfig
from specsot.members import Configuration, Range, WeightBytes
from specsot.service.options import ModelOptions
from specsot_model.core.replays import KEPT_ROWS
from specsot_model.fused import can_capture, can_fuse
from specsot_model.linear import in_words, resolve_dtype
from specsot_model.memory_fit import WeightForm, bytes_of, laps_of, pages_of, read_of, weights_of
from specsot_model.packed import row_itemsize
from specsot_model.weights import Weights


@dataclass(frozen=True)
class LayerMemory:
    """Of a model's layers, as a worker with these options holds them. files: their shapes are asked for.

    All sizes are bytes.
    """

    options: ModelOptions
    config: ModelConfig
    files: Weights

    @cached_property
    def dtype(self) -> torch.dtype:
        return resolve_dtype(self.options.dtype, self.options.device, self.options.quantization)

    @property
    def rounding(self) -> str:
        """`Registration.quantization`; sums that are grouped otherwise are rounded otherwise, too."""
        options = self.options
        kept = self.options.kv_cache_dtype
        if kept == "auto":
            kept = "fp16" if self._row_itemsize < self.dtype.itemsize else ""
        grouped = "batch-invariant" if options.batch_invariant else ""
        held = in_words(options.quantization, options.device)
        return ", ".join(filter(None, (held, kept and f"{kept} KV", grouped)))

    @property
    def held(self) -> WeightForm:
        form = WeightForm.on(self.options.device, self.dtype.itemsize, self.options.quantization)
        return replace(form, parts=self.devices)

    @property
    def devices(self) -> int:
        """How many share each layer, each with memory of its own; what is counted is the first one's part."""
        return self.options.tensor_parallel if self.options.device.startswith("cuda") else 1

    @cached_property
    def parts(self) -> WeightBytes:
        return bytes_of(self.files, self.config, self.held)

    def row_in(self, layers: Range | None = None) -> int:
        """What pages take of one position in one of these layers, states included: all that is granted by the
        rows that it holds. None: nobody knows yet which layers; then in the largest.
        """
        every = [Range(layer, layer + 1) for layer in range(self.config.layers)]
        each = max(self._row(one) for one in ([layers] if layers else every))
        granted = self.options.page_bytes
        least = self._pages(layers or Range(0, self.config.layers), 0)
        return -(-each * granted // max(granted - least, 1))

    def _row(self, layers: Range) -> int:
        """Of one position more, the mean of these layers."""
        more, fewer = (self._pages(layers, rows) for rows in (2 * KEPT_ROWS, KEPT_ROWS))
        return -(-(more - fewer) // (KEPT_ROWS * len(layers)))

    def _pages(self, layers: Range, rows: int) -> int:
        kept = self.options.kv_cache_dtype
        return pages_of(self.config, layers, rows, self._row_itemsize, kept) // self.devices

    @property
    def _row_itemsize(self) -> int:
        return row_itemsize(self.config, self.dtype.itemsize, self.held.packed)

    def weights(self, layers: Range) -> int:
        return weights_of(self.files, self.config, layers, self.held)

    def read(self, layers: Range) -> float:
        """What one row reads of the weights: of experts those that it chooses, of the embedding nothing."""
        return read_of(self.files, self.config, layers, self.held)

    def pages(self, configuration: Configuration, layers: Range) -> int:
        """KV pages and what is kept for the drafter: slices of its head, features with the last layers."""
        rows = configuration.pages * configuration.page_rows
        taps = sum(len(configuration.taps_of(one)) for one in configuration.stages if one.layers == layers)
        slices = taps * self.config.hidden * (configuration.head.width if configuration.head else 0)
        each = self.dtype.itemsize + self.held.packed  # in few bits on a CPU, layers read a copy in 8 bits
        features = rows * configuration.width_at(layers) * self.dtype.itemsize
        return self._pages(layers, rows) + features + slices * each

    def graphs(
        self, kernels: bool, width: int = 0, layers: Range | None = None, room: int | None = None
    ) -> int:
        """Captured graphs of these layers. kernels: there are some where it runs. width: of the features they
        sum up. None: nobody knows yet which layers; all of them, if their weights fit into `room`.
        """
        kind = self.options.quantization
        grouped = self.options.batch_invariant
        eight = kind in ("fp8", "int8")
        captured = can_capture(self.config, kernels, bool(kind), eight, self.dtype)
        captured = captured and (self.options.tensor_parallel == 1 or can_fuse(self.config))
        wide = not grouped and self._wide(layers, room)
        return laps_of(self.config, self.dtype.itemsize, width, wide, grouped) if captured else 0

    def _wide(self, layers: Range | None, room: int | None) -> bool:
        """Whether frames of prompts alone have more rows than others: see `cuda_graphs.prompt_rows`."""
        whole = Range(0, self.config.layers)
        fits = layers is not None or room is None or self.weights(whole) <= room
        return fits and layers in (None, whole) and self.options.tensor_parallel == 1
