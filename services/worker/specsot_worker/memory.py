"""Counts the memory that layers take on a worker (weights, KV, CUDA graphs) without loading any of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from specsot.checkpoint.config import ModelConfig
from specsot.core.draft_pause import FEATURE_RING_ROWS
from specsot.members import Configuration, Range, WeightBytes
from specsot.service.options import ModelOptions
from specsot_model.core.replays import KEPT_ROWS
from specsot_model.fused import can_capture, can_fuse, resolve_draft_invariant
from specsot_model.linear import describe_rounding, resolve_dtype
from specsot_model.memory_fit import (
    WeightForm,
    bytes_read_per_token,
    kv_page_bytes,
    step_bytes,
    token_bytes,
    weight_bytes_of,
    weights_of,
)
from specsot_model.packed import can_pack, row_itemsize
from specsot_model.weights import Weights


@dataclass(frozen=True)
class LayerMemory:
    """Memory that a model's layers take on a worker with these options. All sizes are in bytes.

    options: The worker's options: device, dtype, quantization and KV cache.
    config: The model's configuration.
    files: The weight files, of which only the shapes are read.
    """

    options: ModelOptions
    config: ModelConfig
    files: Weights

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        return resolve_dtype(self.options.dtype, self.options.device, self.options.stored_form)

    @property
    def rounding(self) -> str:
        """Description of every option that changes the rounding of results, and so may change tokens, for
        `Registration.quantization`. Empty if no option does.

        For packed weights the layers are named that are outside of the guarantee that a token is the same in
        any batch: those that no single kernel runs (`packed.can_pack`), or all with int8 KV.
        """
        options = self.options
        kept = self.options.kv_cache_dtype
        if kept == "auto":
            kept = "fp16" if self._row_itemsize < self.dtype.itemsize else ""
        invariance = ("batch-invariant",) * options.batch_invariant
        invariance += ("draft-invariant",) * bool(options.draft_invariant)
        held = describe_rounding(options.stored_form, options.device)
        return ", ".join(filter(None, (held, kept and f"{kept} KV", *invariance, self._batch_dependent)))

    @property
    def _batch_dependent(self) -> str:
        """Layers with packed weights whose rows depend on their batch in the last bits, in words; empty if
        there are none, or if weights are not packed.
        """
        one_kernel = can_pack(self.config) and self.options.kv_cache_dtype == "auto"
        if not self.held.packed or (one_kernel and self.dtype == torch.float32):
            return ""
        return f"layers {Range(0, self.config.layers)} depend on the batch"

    @property
    def held(self) -> WeightForm:
        """The form in which weights are held in memory."""
        form = WeightForm.on_device(self.options.device, self.dtype.itemsize, self.options.stored_form)
        return replace(form, parts=self.devices)

    @property
    def devices(self) -> int:
        """Number of devices that share each layer, each with memory of its own. All sizes are those of the
        first device's part.
        """
        return self.options.tensor_parallel if self.options.device.startswith("cuda") else 1

    @cached_property
    def parts(self) -> WeightBytes:
        """Bytes of the model's parts."""
        return weight_bytes_of(self.files, self.config, self.held)

    def row_in(self, layers: Range | None = None) -> int:
        """Return the bytes of one KV position in one layer, including a share of the recurrent states, which
        are paid from the same memory.

        layers: The layer range over which the mean is taken. None: the range is not known yet, so the largest
            layer counts.

        The share is larger the more of `--kv-memory` the states take, because the positions have only the
        rest.
        """
        every = [Range(layer, layer + 1) for layer in range(self.config.layers)]
        each = max(self._row(one) for one in ([layers] if layers else every))
        granted = self.options.page_bytes
        fixed = self._pages(layers or Range(0, self.config.layers), 0)
        return -(-each * granted // max(granted - fixed, 1))

    def _row(self, layers: Range) -> int:
        """Return the bytes of one more KV position in one layer, as the mean of a layer range.

        layers: The layer range.
        """
        more, fewer = (self._pages(layers, rows) for rows in (2 * KEPT_ROWS, KEPT_ROWS))
        return -(-(more - fewer) // (KEPT_ROWS * len(layers)))

    def _pages(self, layers: Range, rows: int) -> int:
        """Return the bytes of KV pages, all layers of a range together.

        layers: The layer range.
        rows: Number of positions for which there are slots.
        """
        kept = self.options.kv_cache_dtype
        return kv_page_bytes(self.config, layers, rows, self._row_itemsize, kept) // self.devices

    @property
    def _row_itemsize(self) -> int:
        """Bytes of one number of the KV cache."""
        return row_itemsize(self.config, self.dtype.itemsize, self.held.packed)

    def weights(self, layers: Range) -> int:
        """Return the bytes of the weights of a layer range, with the embedding and lm_head if the range has
        the model's ends.

        layers: The layer range.
        """
        return weights_of(self.files, self.config, layers, self.held)

    def read(self, layers: Range) -> float:
        """Return the bytes of weights that one token reads in a layer range: of experts those that it
        chooses, of the embedding none.

        layers: The layer range.
        """
        return bytes_read_per_token(self.files, self.config, layers, self.held)

    def pages(self, configuration: Configuration, layers: Range) -> int:
        """Return the bytes of the KV pages, of the log of hidden states (on all stages but the last), and of
        what is kept for the drafter: slices of its head, and the ring of features on the last stage.

        configuration: The epoch as the master has configured it.
        layers: The layer range of this worker.

        Features of the ring count only for the last stage, and slices only for layers of this range that are
        tapped.
        """
        rows = configuration.pages * configuration.page_rows
        taps = sum(len(configuration.taps_of(one)) for one in configuration.stages if one.layers == layers)
        slices = taps * self.config.hidden * (configuration.head.width if configuration.head else 0)
        # On a CPU, layers with weights of few bits read a second copy of a slice, in 8 bits.
        each = self.dtype.itemsize + self.held.packed
        features = FEATURE_RING_ROWS * configuration.width_at(layers) * self.dtype.itemsize
        is_last = layers.last == self.config.layers
        log = 0 if is_last else rows * self.config.hidden * self.dtype.itemsize
        return self._pages(layers, rows) + log + features + slices * each

    def graphs(
        self, kernels: bool, width: int = 0, layers: Range | None = None, room: int | None = None
    ) -> int:
        """Return the bytes of the CUDA graphs of a layer range, and of those that choose tokens if the range
        may hold the last layer. 0 if nothing is captured.

        kernels: True if the device has kernels that can be captured.
        width: Number of elements of a feature that the layers sum up. 0: none.
        layers: The layer range. None: not known yet. Then all layers count, if their weights fit into `room`.
        room: Bytes that are available. None: unknown.

        Nothing is captured if the device has no such kernels, if the model's layers or quantization cannot
        be captured, or with tensor parallelism for layers that cannot be fused.
        """
        kind = self.options.stored_form
        invariant = self.options.batch_invariant
        # An option that cannot be met is refused when the layers are loaded, not here.
        wanted = None if self.options.draft_invariant else self.options.draft_invariant
        small_steps = not invariant and resolve_draft_invariant(
            wanted,
            self.config,
            torch.device(self.options.device),
            self.dtype,
            kind,
            self.options.kv_cache_dtype,
            self.options.tensor_parallel,
        )
        eight = kind in ("fp8", "int8")
        captured = can_capture(self.config, kernels, bool(kind), eight, self.dtype)
        captured = captured and (self.options.tensor_parallel == 1 or can_fuse(self.config))
        wide = not invariant and self._wide(layers, room)
        if not captured:
            return 0
        steps = step_bytes(self.config, self.dtype.itemsize, width, wide, invariant, small_steps)
        # The last stage also captures graphs that choose tokens (`CapturedTokens`), but not with tensor
        # parallelism, because no graph captures logits there (`Decoder.captures_logits`).
        is_last = layers is None or layers.last == self.config.layers
        chooses = is_last and self.options.tensor_parallel == 1
        return steps + (token_bytes(self.config.vocab) if chooses else 0)

    def _wide(self, layers: Range | None, room: int | None) -> bool:
        """Return whether frames of prompts only may have more tokens than others (see
        `cuda_graphs.prompt_rows`), which takes more memory. Return True only without tensor parallelism, if
        the range is the whole model, or if it is not known yet and the whole model fits into `room`.

        layers: The layer range. None: not known yet.
        room: Bytes that are available. None: unknown.
        """
        all_layers = Range(0, self.config.layers)
        fits = layers is not None or room is None or self.weights(all_layers) <= room
        return fits and layers in (None, all_layers) and self.options.tensor_parallel == 1
