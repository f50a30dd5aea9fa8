"""Runs a contiguous range of a base model's layers over a batch of tokens of any mix of sequences.

Shapes: `rows` is the number of tokens in the batch, H the hidden size, V the vocabulary size, Hd the hidden
size of the draft head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig, read_config
from specsot.errors import InvalidRequest, ModelError
from specsot.members import KvDtype, Layout, Quantization, Range
from specsot.service.options import ModelOptions
from specsot_kernels.segments import look_back
from specsot_model import tensor_parallel as split
from specsot_model.attention import AttentionPlan, RowSpan, plan_attention
from specsot_model.delta_pages import DeltaPages, WalkedPages
from specsot_model.fused import (
    FusedBlock,
    check_invariant,
    fuse_blocks,
    fused_logits,
    has_small_steps,
    resolve_draft_invariant,
)
from specsot_model.inference import inference_mode
from specsot_model.joined_pages import pages_by_size
from specsot_model.kv import KVPages
from specsot_model.latent import fits_tiles
from specsot_model.layer_inputs import LayerInputs
from specsot_model.layers import Block, Edges, Norm, add_tap, present, rows_of_linear
from specsot_model.linear import Linear, PartSums, look_up, resolve_dtype, row_product
from specsot_model.loaded_parts import LoadedParts
from specsot_model.packed import ROWS_IN, best_tokens, can_pack, logits_of, pack_layers
from specsot_model.published import open_weights
from specsot_model.rotary import Rotary, frequencies
from specsot_model.stored_form import as_published, uses_packed_kernels
from specsot_model.transformers_layers.layers import TransformersLayers
from specsot_model.weights import Fetch, Weights

# A tap's weight [Hd, H]. A tap multiplies the input of one layer with its weight and adds the product to the
# features that the draft head reads (EAGLE-3).
Tap = Tensor | Linear
# Called with the number of layers that are loaded so far.
Loaded = Callable[[int], None]


class Decoder:
    """Layers first .. last - 1 of a base model.

    A range that contains layer 0 has the embedding as well; a range that contains the last layer has the
    final norm and the lm_head.
    """

    def __init__(
        self,
        config: ModelConfig,
        files: Weights,
        layers: Range,
        dtype: torch.dtype,
        device: torch.device,
        on_layer_loaded: Loaded | None = None,
        quantization: Quantization | None = None,
        kv_dtype: KvDtype = "auto",
        batch_invariant: bool = False,
        loaded_parts: LoadedParts | None = None,
        devices: Sequence[torch.device] = (),
        draft_invariant: bool = False,
        short_lm_head: bool = False,
    ) -> None:
        """Load the layers of a range, and prepare the kernels that run them.

        A range that is split over devices runs as CUDA graphs only if the GPUs reach each other's memory.
        ModelError is raised if a tensor is missing, has another shape or cannot be stored in the form.

        config: The base model's config.
        files: Where the weight tensors are read from.
        layers: Range of layers to load; `Decoder.load` has checked it.
        dtype: Type of activations, norms and unquantized matrices.
        device: Device of the layers; with tensor parallelism, the first of `devices`.
        on_layer_loaded: Called after every layer with the number of layers loaded so far; None: no call.
        quantization: Form of the matrices; None keeps `dtype`.
        kv_dtype: Type of the KV cache; "auto" means `dtype`.
        batch_invariant: The output of a token does not depend on the rest of its batch, bit for bit.
        loaded_parts: Layers that another range loaded already and shares with this one; it also receives what
            is loaded now. None: nothing is shared.
        devices: Devices that every layer is split over (tensor parallelism), `device` first. Empty: no split.
        draft_invariant: The output of a token does not depend on the rest of a small step; see
            `runs_small_steps`.
        short_lm_head: The lm_head is int4 on a CPU if the matrices are; else it is int8 there.
        """
        loaded_parts = LoadedParts() if loaded_parts is None else loaded_parts
        fetch = Fetch(files, dtype, device, quantization, short_lm_head)
        self.batch_invariant = batch_invariant
        self._draft_invariant = draft_invariant
        self.config = config
        self.layers = layers
        self.dtype = dtype
        self.device = device
        self._blocks: list[Block] = []
        for index in range(layers.first, layers.last):
            self._blocks.append(loaded_parts.fetch(fetch, config, index, split.block_maker(devices)))
            if on_layer_loaded:
                on_layer_loaded(len(self._blocks))
        self._layer_inputs = (
            loaded_parts.fetch_layer_inputs(fetch, config, layers) if config.layer_input_size else None
        )
        self._kv_dtype: KvDtype = kv_dtype
        self._split = split.SplitLayers(self._blocks, config, dtype, devices) if devices else None
        self._rotaries = rotaries_of(config, layers, device)
        self._frequencies = frequencies(config.rope, config.head_dim).to(device)
        runs_own_kernels = self._kernels_read and not devices and config.transformers is None
        self._fused_blocks = (
            fuse_blocks(self._blocks, batch_invariant, self.runs_small_steps) if runs_own_kernels else None
        )
        self._packed = pack_layers(self._blocks, self._rotaries, dtype) if runs_own_kernels else None
        self._embedding = loaded_parts.embedding if layers.first == 0 else None
        last = layers.last == config.layers
        self._norm, self._lm_head = (loaded_parts.norm, loaded_parts.head) if last else (None, None)
        self._transformers: TransformersLayers | None = None
        if config.transformers is not None:
            ends = self._embedding, self._lm_head
            self._transformers = TransformersLayers(self._blocks, fetch, config, layers, *ends, kv_dtype)
        # The context in which a CUDA graph of this range is captured. One device's part of a tensor-parallel
        # range replaces it, because it is captured without the other parts.
        self.alone: Callable[[], AbstractContextManager[object]] = nullcontext
        self.embeds = self._embedding is not None
        self._device_decoders = list[Decoder]()
        self._split_head: split.SplitHead | None = None
        if self._split and split.can_capture_split(config, devices) and self._kernels_read:
            self._capture_parts(self._split.fuse(self._split.make_exchange()))

    @classmethod
    @inference_mode
    def load(
        cls,
        directory: Path,
        layers: Range | None,
        dtype: torch.dtype,
        device: torch.device | str,
        allow_pickle_bin: bool = False,
        *,
        on_layer_loaded: Loaded | None = None,
        quantization: Quantization | None = None,
        kv_dtype: KvDtype = "auto",
        batch_invariant: bool = False,
        draft_invariant: bool | None = None,
        parts: LoadedParts | None = None,
        files: Weights | None = None,
        tensor_parallel: int = 1,
        short_lm_head: bool = False,
    ) -> Decoder:
        """Return a decoder with a range of layers loaded from a Hugging Face directory; read no other
        weights.

        directory: Folder with `config.json` and the weight files.
        layers: Range to load; None loads all layers. InvalidRequest is raised for an empty range and for one
            that does not lie within the model.
        dtype: Type of activations, norms and unquantized matrices.
        device: Device to load to; with tensor parallelism, the first one.
        allow_pickle_bin: Whether pickled weight files (`*.bin`) may be read; see `WeightFiles`.
        on_layer_loaded: Called after every layer with the number of layers loaded so far; None: no call.
        quantization: Form of the matrices; None keeps `dtype`. Norms and routers stay in `dtype`; so does the
            embedding, unless the CPU kernels pack weights.
        kv_dtype: Type of the KV cache; "auto" means `dtype`.
        batch_invariant: The output of a token does not depend on the rest of its batch, bit for bit.
        draft_invariant: On a GPU in 16 bits, the output of a token does not depend on the rest of a small
            step, bit for bit; see `runs_small_steps`. None: where `resolve_draft_invariant` says so.
        parts: Layers that are loaded already, in the same form. The layers loaded now are added to it. None:
            nothing is shared.
        files: Source of the tensors; None opens the weight files of `directory`.
        tensor_parallel: Number of devices that every layer is split over, `device` and those that follow it;
            1: no split.
        short_lm_head: The lm_head is int4 on a CPU if the matrices are; else it is int8 there, which keeps
            more of the text.

        Raises ModelError if the directory cannot be read as a model, and InvalidRequest if the range does not
        fit the model, if it lacks a layer whose keys and values one of its layers reads, or if no kernels
        support the combination of options. A range that begins or ends among the layers that one stage must
        hold is loaded if its layers find their keys and values in it, although `ModelConfig.why_not_split`
        says that it cannot be a stage.
        """
        config = read_config(directory)
        layers = Range(0, config.layers) if layers is None else layers
        if not 0 <= layers.first < layers.last <= config.layers:
            raise InvalidRequest(f"layers {layers} do not fit a model of {config.layers} layers", "layers")
        if any(config.kv_source(layer) < layers.first for layer in range(layers.first, layers.last)):
            raise InvalidRequest(config.why_not_split(layers.first, layers.last), "layers")
        packed = uses_packed_kernels(quantization, device) and (dtype, kv_dtype) == (torch.float32, "auto")
        if batch_invariant and not (packed and can_pack(config)):
            check_invariant(config, torch.device(device), quantization, kv_dtype)
        split.check_split(config, tensor_parallel, quantization, batch_invariant)
        target_device = torch.device(device)
        draft_invariant = not batch_invariant and resolve_draft_invariant(
            draft_invariant, config, target_device, dtype, quantization, kv_dtype, tensor_parallel
        )
        devices = split.devices_of(device, tensor_parallel)
        files = files or open_weights(directory, allow_pickle_bin, quantization)
        load_options = dtype, target_device, on_layer_loaded, quantization, kv_dtype, batch_invariant
        return cls(config, files, layers, *load_options, parts, devices, draft_invariant, short_lm_head)

    @classmethod
    def of(
        cls,
        options: ModelOptions,
        layers: Range | None = None,
        *,
        on_layer_loaded: Loaded | None = None,
        parts: LoadedParts | None = None,
        files: Weights | None = None,
    ) -> Decoder:
        """Return a decoder with the device, dtype, quantization and so on that `options` name, and its layers
        loaded.

        options: The model options of the command line. "auto" values are resolved here.
        layers: Range to load; None loads all layers.
        on_layer_loaded: Called after every layer with the number of layers loaded so far; None: no call.
        parts: Layers that are loaded already and shared; the layers loaded now are added to it. None: nothing
            is shared.
        files: Source of the tensors; None opens the weight files of the options' base model.

        Raises the errors of `load`.
        """
        options = as_published(options, options.base)
        return cls.load(
            options.base,
            layers,
            resolve_dtype(options.dtype, options.device, options.stored_form),
            options.device,
            options.model_format == "bin",
            on_layer_loaded=on_layer_loaded,
            quantization=options.stored_form,
            kv_dtype=options.kv_cache_dtype,
            batch_invariant=options.batch_invariant,
            draft_invariant=options.draft_invariant,
            parts=parts,
            files=files,
            tensor_parallel=options.tensor_parallel,
        )

    @property
    def edges(self) -> Edges:
        """Return the embedding, final norm and lm_head of this range, which a draft head shares.

        A part that this range does not have raises ModelError only when the part is asked for.
        """
        return Edges(
            self.config,
            lambda: present(self._embedding, "embedding"),
            lambda: present(self._norm, "final norm"),
            lambda: present(self._lm_head, "lm_head"),
            lambda ids: rows_of_linear(present(self._lm_head, "lm_head"), ids, self.dtype, self.device),
        )

    @property
    def capturable(self) -> bool:
        """Tell whether a CUDA graph can capture `forward` (of each of `parts`).

        Then `forward` never waits for the host, and it skips rows whose slot is negative.
        """
        return bool(self._fused_blocks or self._device_decoders)

    @property
    def runs_small_steps(self) -> bool:
        """Tell whether rows of small steps are computed in one order, whatever the other rows are.

        Then drafts do not change the tokens of a single sequence; see `specsot_kernels.gpu.small_attention`.
        This needs `draft_invariant`, activations and KV of 16 bits, and layers that `has_small_steps`
        accepts. Batch-invariant ranges do more than that, and return False.
        """
        in_16_bits = self.dtype.itemsize == 2 and self._kv_dtype == "auto"
        chosen = self._draft_invariant and not self.batch_invariant
        return chosen and in_16_bits and has_small_steps(self.config)

    def parts(self, kv: KVPages) -> list[tuple[Decoder, KVPages]]:
        """Return the decoder and KV pages to capture on each device; the batch enters the first of them.

        Without tensor parallelism the list has one entry: this decoder and `kv` itself.

        kv: The KV cache that `make_kv` of this decoder returned.
        """
        return (
            list(zip(self._device_decoders, kv.parts)) if isinstance(kv, split.SplitPages) else [(self, kv)]
        )

    def _capture_parts(self, parts: Sequence[split.FusedPart]) -> None:
        """Make one decoder per device, each with that device's part of every layer (tensor parallelism).

        The decoders are appended to `_device_decoders`. If every device can also take its part of the
        lm_head, `_split_head` is set. Only the first device has the embedding. Without a final RMSNorm and an
        lm_head in floats in this range, `_split_head` stays None.

        parts: Config, device and blocks of each device, in device order.
        """
        for number, part in enumerate(parts):
            decoder = copy(self)
            decoder.config = part.config
            decoder.device = part.device
            decoder.alone = part.alone
            decoder._fused_blocks = part.blocks  # noqa: SLF001
            decoder._split = None  # noqa: SLF001
            decoder._device_decoders = []  # noqa: SLF001
            decoder.embeds = self.embeds and number == 0
            self._device_decoders.append(decoder)
        if isinstance(self._norm, Norm) and self._lm_head and self._lm_head.weight is not None:
            self._split_head = split.SplitHead(
                self._norm, self._lm_head.weight, [part.device for part in parts]
            )

    @property
    def _kernels_read(self) -> bool:
        """Tell whether the attention kernels can read the KV pages.

        On a CPU they read no int8 pages, and on a GPU neither pages of layers with different heads, nor those
        of latent attention of sizes that do not fit tiles.
        """
        config = self.config
        unread = config.wide is not None or (config.latent and not fits_tiles(config.latent))
        if unread and self.device.type == "cuda":
            return False
        return self._kv_dtype == "auto" or self.device.type == "cuda"

    def plan(self, spans: Sequence[RowSpan], page_rows: int, layout: Layout) -> AttentionPlan:
        """Return the plan of one frame's attention, for `forward`.

        The plan does not depend on which layers this range has. If some layers attend to a sliding window
        only, the plan of those layers is the `sliding` of the result, or the result itself if all layers do.
        As long as the window hides nothing from any row of the frame, the plan has no `sliding`, unless these
        layers have other heads than the others.

        spans: One span per segment of the frame, in row order.
        page_rows: Rows of a KV page.
        layout: Whether segments are read one by one ("packed") or padded into one product ("batched").
        """
        window = self.config.window
        windowed = self.config.windowed
        if self._transformers:
            return self._transformers.plan(spans, page_rows, layout)
        if window is None:
            return self._plan(spans, page_rows, layout)
        windowed_spans = [part for span in spans for part in look_back(span, window, drafts=False)]
        if windowed_spans == list(spans):
            if self.config.wide is None:
                return self._plan(spans, page_rows, layout)
            window = None
        group = self.config.heads // self.config.kv_heads
        sliding = self._plan(windowed_spans if self._packed else spans, page_rows, layout, window, group)
        if len(windowed) == self.config.layers:
            return sliding
        return replace(self._plan(spans, page_rows, layout), sliding=sliding)

    def _plan(
        self,
        spans: Sequence[RowSpan],
        page_rows: int,
        layout: Layout,
        window: int | None = None,
        group: int | None = None,
    ) -> AttentionPlan:
        """Return the plan of one frame's attention for the kind of layers that run here: packed, split over
        devices, or neither.

        The plan of a model with gated delta layers also holds the spans.

        spans: One span per segment of the frame, in row order.
        page_rows: Rows of a KV page.
        layout: Whether segments are read one by one ("packed") or padded into one product ("batched").
        window: How many positions, its own included, a row of sliding-window layers sees; None: all
            positions.
        group: Number of query heads per KV head; None: that of the layers outside of windows.
        """
        if self._packed:
            return self._packed.plan(spans, page_rows)
        if self._split:
            return self._split.plan(spans, page_rows, layout, self._kernels_read)
        if group is None:
            kv_heads, _ = self.config.wide or (self.config.kv_heads, 0)
            group = self.config.heads // kv_heads
        rates = self._frequencies
        placement = (layout, self.dtype, self.device)
        options = *placement, rates, self._kernels_read, self.batch_invariant
        plan = plan_attention(spans, page_rows, group, *options, window, self.runs_small_steps)
        return replace(plan, spans=tuple(spans)) if self.config.delta else plan

    def make_kv(self, pages: int, page_rows: int) -> KVPages:
        """Allocate the KV cache of this range, and return it.

        Packed CPU layers store KV in fp16. The pages hold zeros. ModelError is raised if the memory cannot be
        reserved.

        pages: Number of pages in every layer.
        page_rows: Rows (tokens) of a page.
        """
        if self._split:
            return self._split.make_kv(pages, page_rows, self._kv_dtype)
        if self._transformers:
            return self._transformers.make_kv(pages, page_rows)
        config = self.config
        form = (ROWS_IN if self._packed else self.dtype, self.device, self._kv_dtype)
        if config.delta:
            make = WalkedPages if self._fused_blocks else DeltaPages
            return make(config, self.layers, pages, page_rows, *form)
        if config.wide is not None:
            layers = range(self.layers.first, self.layers.last)
            sizes = [(own.kv_heads, own.head_dim) for own in map(config.of_layer, layers)]
            sources = [config.kv_source(layer) - layers.start for layer in layers]
            return pages_by_size(sizes, sources, pages, page_rows, *form)
        sizes = pages, page_rows, config.kv_heads, config.head_dim
        return KVPages(len(self.layers), *sizes, *form, config.stored_tensors)

    def hold_tap(self, weight: Tensor) -> Tap:
        """Return a tap's weight in the form that `forward` takes.

        With packed CPU layers the weight becomes int8: in floats, taps would take a twelfth of a step, and
        the rounding is harmless because features only influence drafts, never accepted tokens. The weight is
        multiplied by `ModelConfig.residual_scale`, so that features are those of the published model.

        weight: [Hd, H], in any dtype and on any device.
        """
        scale = self.config.residual_scale
        moved = (weight if scale == 1 else weight * scale).to(self.device, self.dtype).contiguous()
        return moved if self._packed is None else Linear(moved, None, "int8")

    @inference_mode
    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [rows, H] of token ids.

        The embeddings are multiplied by the model's embedding scale, if it has one.

        tokens: Token ids, integers [rows], on this range's device.

        Raises ModelError if this range does not start at layer 0.
        """
        if self._embedding is None:
            raise ModelError(f"layers {self.layers} hold no embedding")
        if self._transformers:
            return self._transformers.embed(tokens)
        embeddings = look_up(self._embedding, tokens)
        scale = self.config.embedding_scale
        return embeddings if scale == 1 else embeddings * torch.tensor(scale, dtype=embeddings.dtype)

    @property
    def reads_tokens(self) -> bool:
        """Tell whether `forward` needs token ids besides the hidden states, because layers have per-layer
        inputs.
        """
        return self._layer_inputs is not None

    @inference_mode
    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan | Sequence[AttentionPlan],
        kv: KVPages,
        taps: Mapping[int, Tap] | None = None,
        fused: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers of this range over a batch, write the batch's KV, and return hidden states and
        features.

        `hidden` itself is returned. A sliding-window layer uses the plan's `sliding` if there is one.

        hidden: [rows, H], the residual stream; changed in place.
        positions: LongTensor [rows], the position of each token in its sequence.
        slots: LongTensor [rows], the KV slot of each token: page * page_rows + offset.
        plan: One attention plan for all layers, or one per layer.
        kv: The KV cache of this range, as `make_kv` allocated it.
        taps: By layer i the weight [Hd, H] that multiplies the *input* of layer i; i == config.layers means
            the output of the last layer. Taps of layers outside this range are ignored. None: no taps.
        fused: [rows, Hd], the sum of the taps of earlier ranges; changed in place. None starts a new sum.
        tokens: LongTensor [rows], token ids, if the range `reads_tokens`; else they are ignored.

        Return (hidden, fused). `fused` is None if it was None and this range has no tap. Raises ModelError
        without `tokens` if the range `reads_tokens`.
        """
        taps = taps or {}
        plans = self._layer_plans(plan)
        if isinstance(kv, DeltaPages):
            kv.arrange(plans[0].spans)
        first = self.layers.first
        last = self.layers.last
        ends = self.config.layers
        own_taps = {
            tap - first: taps[tap] for tap in sorted(taps) if first <= tap < last or tap == last == ends
        }
        if self._packed and own_taps:
            return hidden, self._packed.run_tapped(hidden, own_taps, fused, positions, slots, plans, kv)
        run = self._runner(positions, slots, plans, kv, tokens)
        done = 0
        features: Tensor | PartSums | None = fused
        for layer, tap in own_taps.items():
            run(hidden, range(done, layer))
            features = self._add_tap(hidden, tap, features)
            done = layer
        run(hidden, range(done, len(self.layers)))
        return hidden, features.total() if isinstance(features, PartSums) else features

    def _add_tap(self, hidden: Tensor, tap: Tap, features: Tensor | PartSums | None) -> Tensor | PartSums:
        """Return the features plus the product of the hidden states and a tap's weight.

        hidden: [rows, H], the input of the tapped layer, or the output of the last layer.
        tap: The tap's weight [Hd, H], as `hold_tap` returned it.
        features: What this method returned for the previous tap, or the features of earlier ranges
            [rows, Hd]. They are changed in place. None: the sum begins with this tap.

        For layers that CUDA graphs can capture, the product and the addition take fewer kernels than with
        PyTorch. In a small step, the result may be `PartSums`, whose `total` is the features.
        """
        if self._fused_blocks and isinstance(tap, Tensor):
            product = row_product(tap, None, self.batch_invariant, self.runs_small_steps)
            return product.plus(features, hidden)
        assert not isinstance(features, PartSums), "all taps have the same form"
        return add_tap(hidden, tap, features)

    def run_layers(
        self,
        layers: Range,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan | Sequence[AttentionPlan],
        kv: KVPages,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Run some of the layers of this range over a batch, and write the batch's KV of these layers. Return
        the hidden states after them, which is `hidden` itself. The range must have no recurrent states.

        layers: The layers to run, within this range.
        hidden: [rows, H], the residual stream that enters the first of them; changed in place.
        positions: LongTensor [rows], the position of each token in its sequence.
        slots: LongTensor [rows], the KV slot of each token.
        plan: One attention plan for all layers, or one per layer of this range.
        kv: The KV cache of this range.
        tokens: LongTensor [rows], token ids, if the range `reads_tokens`; else they are ignored.

        Raises ModelError without `tokens` if the range `reads_tokens`.
        """
        run = self._runner(positions, slots, self._layer_plans(plan), kv, tokens)
        run(hidden, range(layers.first - self.layers.first, layers.last - self.layers.first))
        return hidden

    def _layer_plans(self, plan: AttentionPlan | Sequence[AttentionPlan]) -> list[AttentionPlan]:
        """Return the attention plan of each layer of this range. A sliding-window layer uses the plan's
        `sliding` if there is one.

        plan: One attention plan for all layers, or one per layer.
        """
        plans = [plan] * len(self.layers) if isinstance(plan, AttentionPlan) else list(plan)
        for layer in self.config.windowed.intersection(range(self.layers.first, self.layers.last)):
            index = layer - self.layers.first
            plans[index] = plans[index].sliding or plans[index]
        return plans

    def _runner(
        self,
        positions: Tensor,
        slots: Tensor,
        plans: Sequence[AttentionPlan],
        kv: KVPages,
        tokens: Tensor | None,
    ) -> Callable[[Tensor, range], None]:
        """Return a function that runs hidden states [rows, H], in place, through a range of layers.

        The range counts layers from the first layer of this decoder. What the layers share (rotary tables,
        located slots) is computed once, here. The function must be called with ranges in ascending order,
        because fused layers hand normed rows on to the next layer.

        positions: LongTensor [rows], the position of each token in its sequence.
        slots: LongTensor [rows], the KV slot of each token.
        plans: The attention plan of each layer of this range.
        kv: The KV cache of this range.
        tokens: LongTensor [rows], token ids; None: unknown. ModelError is raised if the layers need them.
        """
        if (layers := self._packed or self._split or self._transformers) is not None:
            return layers.runner(positions, slots, plans, kv)
        fused_blocks = self._fused_blocks
        blocks = self._blocks
        ready = None
        inputs = None if self._layer_inputs is None else self._inputs_of_layers(self._layer_inputs, tokens)
        places = None if fused_blocks else kv.locate(slots)
        tables = {} if fused_blocks else {rotary: rotary.table(positions) for rotary in set(self._rotaries)}

        def run(hidden: Tensor, layers: range) -> None:
            """Run hidden states through some layers, in place.

            hidden: [rows, H], the residual stream.
            layers: Indices of the layers, counted from this decoder's first layer.
            """
            nonlocal ready
            for layer in layers:
                if fused_blocks is not None:
                    ready = fused_blocks[layer].forward(
                        hidden, positions, slots, plans[layer], kv, layer, ready
                    )
                elif places is not None:
                    table = tables[self._rotaries[layer]]
                    layer_input = None if inputs is None else inputs[:, layer]
                    blocks[layer].forward(hidden, table, places, plans[layer], kv, layer, layer_input)

        return run

    @inference_mode
    def run_mlp_between_layers(self, hidden: Tensor) -> None:
        """Run the MLP of this range's first layer as if another layer followed; see
        `FusedBlock.run_mlp_between_layers`. Nothing happens if the layer is not a `FusedBlock`.

        hidden: [rows, H], the residual stream, to which the MLP's update is added.
        """
        block = self._fused_blocks[0] if self._fused_blocks else None
        if isinstance(block, FusedBlock):
            block.run_mlp_between_layers(hidden)

    def _inputs_of_layers(self, layer_inputs: LayerInputs, tokens: Tensor | None) -> Tensor:
        """Return the per-layer inputs of all layers of this range, [rows, layers, size].

        layer_inputs: Computes the per-layer inputs of this range.
        tokens: LongTensor [rows], token ids. None: unknown.

        Raises ModelError without token ids.
        """
        if tokens is None:
            raise ModelError(f"layers {self.layers} of {self.config.model_type} read token ids")
        return layer_inputs.of_tokens(tokens).to(self.dtype)

    @inference_mode
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, V] of hidden states after the last layer.

        They are capped as softcap * tanh(logit / softcap) if the model caps logits. Their type is fp32, or
        that of `hidden` where the library cannot return fp32 without extra cost.

        hidden: [rows, H], the residual stream before the final norm.

        Raises ModelError if this range does not hold the lm_head.
        """
        if self._transformers:
            return self._transformers.logits(hidden)
        if self._norm is None or self._lm_head is None:
            raise ModelError(f"layers {self.layers} hold no lm_head")
        cap = self.config.logit_softcap
        compute = self._fused_logits if self._fused_blocks else self._split_head
        logits = compute(hidden) if compute else logits_of(self._lm_head, self._norm, hidden)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @property
    def captures_logits(self) -> bool:
        """Tell whether a CUDA graph can capture `logits`: the layers are fused, the range holds the lm_head,
        and there are kernels for the lm_head (`fused_logits`). False with tensor parallelism.
        """
        return bool(self._fused_blocks) and self._lm_head is not None and self._fused_logits is not None

    @cached_property
    def _fused_logits(self) -> Callable[[Tensor], Tensor] | None:
        """The function with which kernels compute logits, see `fused_logits`. None if there are no such
        kernels. It is made at its first use and kept, because making it in every step would take longer than
        a kernel launch. The norm, the lm_head and the options that it is made of do not change after loading.
        """
        options = self.batch_invariant, self.runs_small_steps
        norm = present(self._norm, "final norm")
        return fused_logits(present(self._lm_head, "lm_head"), norm, *options)

    @inference_mode
    def best_tokens(self, hidden: Tensor, count: int, num_ids: int) -> tuple[Tensor, Tensor] | None:
        """Return log-probabilities and ids of the likeliest next tokens of each row, [rows, count] each, best
        first. Return None if no kernel computes logits and selection together, or if the model caps logits.

        hidden: [rows, H], the residual stream before the final norm.
        count: Number of tokens per row.
        num_ids: Only ids below are considered: a multiple of 16, or the size of the vocabulary. Their
            probabilities add up to 1.

        Raises ModelError if this range does not hold the lm_head.
        """
        head = present(self._lm_head, "lm_head")
        if not isinstance(self._norm, Norm) or self.config.logit_softcap is not None:
            return None
        return best_tokens(head, self._norm, hidden, count, None, num_ids)


def rotaries_of(config: ModelConfig, layers: Range, device: torch.device) -> list[Rotary]:
    """Return the rotary embedding of each layer. Layers with the same settings share one object, whose tables
    are then computed once.

    config: The base model's config.
    layers: The range of layers.
    device: Device of the tables.
    """
    kinds = [
        (
            config.rope_of(layer),
            config.heads,
            config.of_layer(layer).kv_heads,
            config.of_layer(layer).head_dim,
        )
        for layer in range(layers.first, layers.last)
    ]
    made = {kind: Rotary(*kind, device, config.query_scalar) for kind in set(kinds)}
    return [made[kind] for kind in kinds]
