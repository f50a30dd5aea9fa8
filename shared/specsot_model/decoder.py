"""Runs a contiguous range of a base model's layers over rows of any mix of sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
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
from specsot_model.fused import check_invariant, fuse_blocks, fused_logits
from specsot_model.kv import KVPages
from specsot_model.layers import Block, Edges, Norm, add_tap, held, rows_of_linear
from specsot_model.linear import Linear, look_up, packs, resolve_dtype
from specsot_model.loaded_parts import LoadedParts
from specsot_model.packed import ROWS_IN, can_pack, logits_of, pack_layers
from specsot_model.published import as_published, open_weights
from specsot_model.rotary import Rotary
from specsot_model.weights import Fetch, Weights

Tap = Tensor | Linear  # [Hd, H], what a layer's input is multiplied with
Loaded = Callable[[int], None]  # hears how many layers are there


class Decoder:
    """Layers first .. last - 1; with the first one the embedding, with the last one norm and lm_head."""

    def __init__(
        self,
        config: ModelConfig,
        files: Weights,
        layers: Range,
        dtype: torch.dtype,
        device: torch.device,
        loaded: Loaded | None = None,
        quantization: Quantization | None = None,
        kv_dtype: KvDtype = "auto",
        batch_invariant: bool = False,
        parts: LoadedParts | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """devices: over which layers are split, `device` first; empty: they are not."""
        parts = LoadedParts() if parts is None else parts
        fetch = Fetch(files, dtype, device, quantization)
        self.batch_invariant = batch_invariant
        self.config = config
        self.layers = layers
        self.dtype = dtype
        self.device = device
        sizes = config.heads, config.kv_heads, config.head_dim, device, config.query_scalar
        self._rotary = Rotary(config.rope, *sizes)
        self._near_rotary = Rotary(config.near_rope, *sizes) if config.near_rope else self._rotary
        self._blocks: list[Block] = []
        for index in range(layers.first, layers.last):
            self._blocks.append(parts.fetch(fetch, config, index, split.block_maker(devices)))
            if loaded:
                loaded(len(self._blocks))
        self._kv_dtype: KvDtype = kv_dtype
        self._split = split.SplitLayers(self._blocks, config, dtype, devices) if devices else None
        whole = self._kernels_read and not devices
        self._fused = fuse_blocks(self._blocks, batch_invariant) if whole else None
        self._packed = pack_layers(self._blocks, self._rotary, dtype) if whole else None
        self._embedding = parts.embedding if layers.first == 0 else None
        last = layers.last == config.layers
        self._norm, self._head = (parts.norm, parts.head) if last else (None, None)
        self.alone: Callable[[], AbstractContextManager[object]] = nullcontext  # for one part of a lap
        self.embeds = self._embedding is not None
        self._parts = list[Decoder]()
        self._split_head: split.SplitHead | None = None
        if self._split and split.split_captured(config, devices) and self._kernels_read:
            self._capture_parts(self._split.fuse(self._split.make_exchange()))

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        directory: Path,
        layers: Range | None,
        dtype: torch.dtype,
        device: torch.device | str,
        allow_pickle_bin: bool = False,
        *,
        loaded: Loaded | None = None,
        quantization: Quantization | None = None,
        kv_dtype: KvDtype = "auto",
        batch_invariant: bool = False,
        parts: LoadedParts | None = None,
        files: Weights | None = None,
        tensor_parallel: int = 1,
    ) -> Decoder:
        """Read this range's weights (None: all), and no others, from a Hugging Face directory.

        allow_pickle_bin: see WeightFiles. quantization: what matrices are held in; norms and routers
        stay in `dtype`, and the embedding unless a CPU's weights are packed. kv_dtype: of its pages.
        batch_invariant: what a row gets is the same in any company, bit for bit.
        parts: what is loaded already, in the same form; what is loaded now is there too, afterwards.
        files: where tensors come from instead.
        tensor_parallel: over how many devices layers are split, `device` and those that follow it.
        Errors: ModelError for the directory, InvalidRequest for a range that does not fit it, or where no
        kernels can do that.
        """
        config = read_config(directory)
        layers = Range(0, config.layers) if layers is None else layers  # an empty range is refused
        if not 0 <= layers.first < layers.last <= config.layers:
            raise InvalidRequest(f"layers {layers} do not fit a model of {config.layers} layers", "layers")
        packed = packs(quantization, device) and (dtype, kv_dtype) == (torch.float32, "auto")
        if batch_invariant and not (packed and can_pack(config)):
            check_invariant(config, torch.device(device), quantization, kv_dtype)
        split.check_split(config, tensor_parallel, quantization, batch_invariant)
        where = torch.device(device)
        devices = split.devices_of(device, tensor_parallel)
        files = files or open_weights(directory, allow_pickle_bin, quantization)
        form = dtype, where, loaded, quantization, kv_dtype, batch_invariant
        return cls(config, files, layers, *form, parts, devices)

    @classmethod
    def of(
        cls,
        options: ModelOptions,
        layers: Range | None = None,
        *,
        loaded: Loaded | None = None,
        parts: LoadedParts | None = None,
        files: Weights | None = None,
    ) -> Decoder:
        """As options say; see `load`."""
        options = as_published(options, options.base)
        return cls.load(
            options.base,
            layers,
            resolve_dtype(options.dtype, options.device, options.quantization),
            options.device,
            options.model_format == "bin",
            loaded=loaded,
            quantization=options.quantization,
            kv_dtype=options.kv_cache_dtype,
            batch_invariant=options.batch_invariant,
            parts=parts,
            files=files,
            tensor_parallel=options.tensor_parallel,
        )

    @property
    def edges(self) -> Edges:
        """What this range holds before the first layer and behind the last, for a head to share."""
        return Edges(
            self.config,
            lambda: held(self._embedding, "embedding"),
            lambda: held(self._norm, "final norm"),
            lambda: held(self._head, "lm_head"),
            lambda ids: rows_of_linear(held(self._head, "lm_head"), ids, self.dtype, self.device),
        )

    @property
    def capturable(self) -> bool:
        """Whether `forward` (of `parts`) waits for nothing on the host, and skips rows without slots."""
        return bool(self._fused or self._parts)

    def parts(self, kv: KVPages) -> list[tuple[Decoder, KVPages]]:
        """What is captured on each device, with its pages. Rows enter the first one."""
        return list(zip(self._parts, kv.parts)) if isinstance(kv, split.SplitPages) else [(self, kv)]

    def _capture_parts(self, parts: Sequence[split.FusedPart]) -> None:
        """Each is this range on one device, with that device's part of every layer."""
        for number, part in enumerate(parts):
            one = copy(self)
            one.config, one.device, one.alone, one._fused = part.config, part.device, part.alone, part.blocks  # noqa: SLF001
            one._split, one._parts, one.embeds = None, [], self.embeds and number == 0  # noqa: SLF001
            self._parts.append(one)
        if isinstance(self._norm, Norm) and self._head and self._head.weight is not None:
            self._split_head = split.SplitHead(self._norm, self._head.weight, [part.device for part in parts])

    @property
    def _kernels_read(self) -> bool:
        """Whether attention kernels of a GPU can read its pages."""
        return self._kv_dtype == "auto" or self.device.type == "cuda"

    def plan(self, spans: Sequence[RowSpan], page_rows: int, layout: Layout) -> AttentionPlan:
        """See `plan_attention`: of a frame of `spans`, over pages as any range keeps them."""
        window = self.config.window
        windowed = self.config.windowed
        if window is None:
            return self._plan(spans, page_rows, layout)
        back = [part for span in spans for part in look_back(span, window, drafts=False)]
        if back == list(spans):
            return self._plan(spans, page_rows, layout)
        near = self._plan(back if self._packed else spans, page_rows, layout, window)
        if len(windowed) == self.config.layers:
            return near
        return replace(self._plan(spans, page_rows, layout), near=near)

    def _plan(
        self, spans: Sequence[RowSpan], page_rows: int, layout: Layout, window: int | None = None
    ) -> AttentionPlan:
        if self._packed:
            return self._packed.plan(spans, page_rows)
        if self._split:
            return self._split.plan(spans, page_rows, layout, self._kernels_read)
        group = self.config.heads // self.config.kv_heads
        rates = self._rotary.frequencies
        where = (layout, self.dtype, self.device)
        given = *where, rates, self._kernels_read, self.batch_invariant
        plan = plan_attention(spans, page_rows, group, *given, window)
        return replace(plan, spans=tuple(spans)) if self.config.delta else plan

    def make_kv(self, pages: int, page_rows: int) -> KVPages:
        if self._split:
            return self._split.make_kv(pages, page_rows, self._kv_dtype)
        config = self.config
        kept = (ROWS_IN if self._packed else self.dtype, self.device, self._kv_dtype)
        if config.delta:
            make = WalkedPages if self._fused else DeltaPages
            return make(config, self.layers, pages, page_rows, *kept)
        return KVPages(len(self.layers), pages, page_rows, config.kv_heads, config.head_dim, *kept)

    def hold_tap(self, weight: Tensor) -> Tap:
        """A tap's weight [Hd, H] as `forward` takes it: in 8 bits beside layers in few, since features decide
        nothing and floats would be a twelfth of a lap.
        """
        here = weight.to(self.device, self.dtype)
        return here if self._packed is None else Linear(here, None, "int8")

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [rows] -> hidden [rows, H]. Only for a range that starts at layer 0."""
        if self._embedding is None:
            raise ModelError(f"layers {self.layers} hold no embedding")
        found = look_up(self._embedding, tokens)
        scale = self.config.embedding_scale
        return found if scale == 1 else found * torch.tensor(scale, dtype=found.dtype)

    @torch.inference_mode()
    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan | Sequence[AttentionPlan],
        kv: KVPages,
        taps: Mapping[int, Tap] | None = None,
        fused: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the range; `hidden` [rows, H] is the residual stream and is changed in place.

        positions, slots: LongTensor [rows]; slot = page * page_rows + offset of the row's KV.
        plan:  of all layers, or of each.
        taps:  by layer i the weight [Hd, H] that multiplies layer i's *input*; i == config.layers
               means the last layer's output. Taps of other ranges are left alone.
        fused: [rows, Hd] sum over the taps so far (changed in place); None starts one if this range taps.
        """
        taps = taps or {}
        plans = [plan] * len(self.layers) if isinstance(plan, AttentionPlan) else list(plan)
        for layer in self.config.windowed.intersection(range(self.layers.first, self.layers.last)):
            own = plans[layer - self.layers.first]
            plans[layer - self.layers.first] = own.near or own
        if isinstance(kv, DeltaPages):
            kv.arrange(plans[0].spans)
        first = self.layers.first
        last = self.layers.last
        ends = self.config.layers
        own = {tap - first: taps[tap] for tap in sorted(taps) if first <= tap < last or tap == last == ends}
        if self._packed and own:
            return hidden, self._packed.run_tapped(hidden, own, fused, positions, slots, plans, kv)
        run = self._runner(positions, slots, plans, kv)
        done = 0
        for layer, tap in own.items():
            run(hidden, range(done, layer))
            fused = add_tap(hidden, tap, fused)
            done = layer
        run(hidden, range(done, len(self.layers)))
        return hidden, fused

    def _runner(
        self, positions: Tensor, slots: Tensor, plans: Sequence[AttentionPlan], kv: KVPages
    ) -> Callable[[Tensor, range], None]:
        """What runs hidden rows through some layers; what all layers share is made once."""
        if (layers := self._packed or self._split) is not None:
            return layers.runner(positions, slots, plans, kv)
        fused = self._fused
        blocks = self._blocks
        ready = None
        table, places = (None, None) if fused else (self._rotary.table(positions), kv.locate(slots))
        tables = [table] * len(self.layers)
        if self._near_rotary is not self._rotary:
            near = self._near_rotary.table(positions)
            layers = range(self.layers.first, self.layers.last)
            tables = [near if layer in self.config.windowed else table for layer in layers]

        def run(hidden: Tensor, layers: range) -> None:
            nonlocal ready
            for layer in layers:
                if fused is not None:
                    ready = fused[layer].forward(hidden, positions, slots, plans[layer], kv, layer, ready)
                elif (table := tables[layer]) is not None and places is not None:
                    blocks[layer].forward(hidden, table, places, plans[layer], kv, layer)

        return run

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [rows, H] after the last layer -> logits [rows, V]."""
        if self._norm is None or self._head is None:
            raise ModelError(f"layers {self.layers} hold no lm_head")
        cap = self.config.logit_softcap
        found = self._split_head(hidden) if self._split_head else None
        if self._fused:
            found = fused_logits(self._head, self._norm, hidden, self.batch_invariant)
        logits = logits_of(self._head, self._norm, hidden) if found is None else found
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
