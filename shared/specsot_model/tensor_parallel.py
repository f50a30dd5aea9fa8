"""Splits a range's layers over devices of one host: each has some of the heads and of the MLP's width.

Every device multiplies its part of a layer, over KV pages of its own heads. The first one also has what
comes before the first layer and after the last. Where GPUs reach each other's memory, each has the residual
stream and runs a captured graph; elsewhere only the first one has it, and parts of each update go there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.families import Names
from specsot.errors import InvalidRequest
from specsot.members import KvDtype, Layout, Quantization
from specsot_kernels.segments import HeadColumns
from specsot_model.attention import AttentionPlan, RowSpan, plan_attention
from specsot_model.fp8 import NormWeight, ShortRows
from specsot_model.fused import FusedBlock, can_fuse, runs_kernels, turning_of
from specsot_model.kv import KVPages, Moves
from specsot_model.layers import Block, Norm
from specsot_model.linear import Linear, RowProduct, check_device
from specsot_model.rotary import Rotary
from specsot_model.weights import Fetch, Weights

if TYPE_CHECKING:
    from specsot_kernels.gpu.exchange import PeerSums

FIELD = "tensor_parallel"
MOST_ROWS = 512  # that a graph has at most: `cuda_graphs.BUCKETS`
ENTRY, ATTENTION, MLP = range(3)  # places of `PeerSums`: no sum follows one of the same place

MakeBlock = Callable[[Fetch, int, ModelConfig], Block]


def devices_of(device: torch.device | str, parts: int) -> tuple[torch.device, ...]:
    """The named device and those that follow it; a CPU is taken several times. Empty: nothing is split.

    Raises InvalidRequest: a GPU without a number, or fewer GPUs than parts.
    """
    first = torch.device(device)
    if parts == 1:
        return ()
    if first.type != "cuda":
        return (first,) * parts
    if ":" not in str(first):
        raise InvalidRequest(
            "--tensor-parallel needs the number of its first GPU, such as --device cuda:0", FIELD
        )
    check_device(f"cuda:{first.index + parts - 1}")
    return tuple(torch.device("cuda", first.index + part) for part in range(parts))


def check_split(
    config: ModelConfig, parts: int, quantization: Quantization | None, batch_invariant: bool
) -> None:
    """Raises InvalidRequest for a model, or a form of it, that is not split into so many parts."""
    if parts < 1:
        raise InvalidRequest(f"tensor_parallel must be 1 or more, got {parts}", FIELD)
    if parts == 1:
        return
    sizes = {"heads": config.heads, "key-value heads": config.kv_heads, "MLP columns": config.intermediate}
    for name, size in sizes.items():
        if size % parts:
            raise InvalidRequest(f"tensor_parallel {parts} does not divide {size} {name}", FIELD)
    names = config.names
    refused = {
        "layers with experts": config.routing is not None,
        "gated delta layers and gated heads": config.delta is not None or config.gated_heads,
        "sliding windows": config.window is not None,
        "attention sinks": bool(names.sinks),
        "norms over all heads at once": config.qk_norm and config.whole_qk_norm,
        "projections or gates in one tensor": bool(names.gate_up or (names.qkv and not names.qkv_by_head)),
        "norms over what layers add": bool(names.after_attention or names.after_mlp),
        "scaled queries or capped scores": bool(config.query_scalar or config.attention_softcap),
        "quantized weights": quantization is not None,
        "batch_invariant": batch_invariant,
    }
    for what, there in refused.items():
        if there:
            raise InvalidRequest(f"tensor_parallel does not work with {what}", FIELD)


class WeightPart(Weights):
    """One of `parts` equal parts of every tensor that is split; of the others all."""

    def __init__(self, files: Weights, names: Names, part: int, parts: int) -> None:
        self._files = files
        self._part = part
        self._parts = parts
        heads = (names.qkv,) if names.qkv else ("q_proj", "k_proj", "v_proj")
        self._rows = _endings((*heads, names.gate, names.up))
        self._columns = _endings((names.out, names.down))

    def names(self) -> tuple[str, ...]:
        return self._files.names()

    def where(self, name: str) -> str:
        return self._files.where(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._files.shape(name)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """The part. A bias that is added to a sum of parts is the first one's; zeros for the others."""
        axis = self._axis(name)
        if axis is not None:
            whole = self._files.tensor(name, dtype, "cpu")
            return whole.chunk(self._parts, axis)[self._part].contiguous().to(device)
        whole = self._files.tensor(name, dtype, device)
        summed = name.endswith(".bias") and name.removesuffix(".bias").endswith(self._columns)
        return torch.zeros_like(whole) if self._part and summed else whole

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """shape: of the part."""
        axis = self._axis(name)
        self._files.check(
            name, tuple(size * self._parts if at == axis else size for at, size in enumerate(shape))
        )

    def _axis(self, name: str) -> int | None:
        module, _, kind = name.rpartition(".")
        if module.endswith(self._rows):
            return 0
        return 1 if kind == "weight" and module.endswith(self._columns) else None


def _endings(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f".{name}" for name in names if name)


class SplitBlock(Block):
    """A layer as blocks of fewer heads and a narrower MLP, one a device."""

    def __init__(
        self, fetch: Fetch, index: int, config: ModelConfig, devices: Sequence[torch.device]
    ) -> None:
        parts = len(devices)
        self.config = config
        each = _narrowed(config, parts)
        self.parts = tuple(
            Block(
                replace(fetch, files=WeightPart(fetch.files, config.names, part, parts), device=device),
                index,
                each,
            )
            for part, device in enumerate(devices)
        )


def block_maker(devices: Sequence[torch.device]) -> MakeBlock:
    """Of whole layers where there are no devices."""
    return partial(SplitBlock, devices=devices) if devices else Block


def _narrowed(config: ModelConfig, parts: int) -> ModelConfig:
    return replace(
        config,
        heads=config.heads // parts,
        kv_heads=config.kv_heads // parts,
        intermediate=config.intermediate // parts,
    )


@dataclass(frozen=True, slots=True)
class SplitPlan(AttentionPlan):
    """parts: the plan of each device, over its heads."""

    parts: tuple[AttentionPlan, ...] = ()


class SplitPages(KVPages):
    """The same pages on each device, of its heads; what is done to rows is done on all."""

    def __init__(self, parts: Sequence[KVPages]) -> None:
        self.parts, (first, *_) = parts, parts
        self.layers = tuple(layer for part in parts for layer in part.layers)
        self.pages = first.pages
        self.page_rows = first.page_rows

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def move(self, moves: Moves) -> None:
        for part in self.parts:
            part.move(moves)

    def keep_least(
        self,
        layer: int,
        sources: Tensor,
        targets: Tensor,
        own: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        first = 0
        for part in self.parts:
            here = part.layers[layer]
            heads = slice(first, first + here.shape[2])
            device = here.device
            first = heads.stop
            mine = None if own is None else own[:, heads].to(device)
            kept = None if counts is None else counts[heads].to(device)
            part.keep_least(layer, sources.to(device), targets.to(device), mine, kept)

    def copy_page(self, source: int, target: int, rows: int) -> None:
        for part in self.parts:
            part.copy_page(source, target, rows)

    def clear_rows(self, slots: Sequence[int]) -> None:
        for part in self.parts:
            part.clear_rows(slots)

    def clear_page(self, page: int) -> None:
        for part in self.parts:
            part.clear_page(page)


def split_captured(config: ModelConfig, devices: Sequence[torch.device]) -> bool:
    """Whether such layers, split over these devices, are captured as a graph on each."""
    if not all(map(runs_kernels, devices)) or not can_fuse(config):
        return False
    from specsot_kernels.gpu.exchange import reach_each_other

    return reach_each_other(devices)


@dataclass(frozen=True, slots=True)
class SummedProduct:
    """A device's part of a product; what is added is the sum of all parts. place: of `exchange`."""

    weight: Tensor
    exchange: PeerSums
    part: int
    place: int

    def add_to(self, hidden: Tensor, x: Tensor | ShortRows, following: NormWeight | None = None) -> None:
        from specsot_kernels.gpu.products import multiply_row

        assert isinstance(x, Tensor), "rows in 8 bits are for such a weight"
        own = self.exchange.own(self.part, self.place, len(x))
        if len(x) == 1:
            multiply_row(x, self.weight, into=own)
        else:
            torch.mm(x, self.weight.t(), out=own)
        self.exchange.add(self.part, self.place, hidden)


class SummedBlock(FusedBlock):
    """A layer's part on one device, which has the whole residual stream."""

    def __init__(self, block: Block, exchange: PeerSums, part: int, first: bool) -> None:
        """first: rows enter here, on the first device."""
        places = iter((ATTENTION, MLP))

        def summed(linear: Linear) -> SummedProduct:
            assert linear.weight is not None, "see split_captured"
            return SummedProduct(linear.weight, exchange, part, next(places))

        super().__init__(block, turning_of(block), adding=summed)
        self._entry = (exchange, part) if first else None

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        kv: KVPages,
        layer: int,
        rows: ShortRows | None = None,
    ) -> ShortRows | None:
        if self._entry:
            exchange, part = self._entry
            exchange.own(part, ENTRY, len(hidden)).copy_(hidden)
            exchange.add(part, ENTRY, hidden.zero_())
        return super().forward(hidden, positions, slots, plan, kv, layer, rows)


@dataclass(frozen=True, slots=True)
class FusedPart:
    """A range's layers on one device. alone: see `PeerSums`."""

    config: ModelConfig
    device: torch.device
    blocks: tuple[FusedBlock, ...]
    alone: Callable[[], AbstractContextManager[None]]


class SplitHead:
    """The final norm and lm_head: each device multiplies some of the vocabulary's rows."""

    def __init__(self, norm: Norm, weight: Tensor, devices: Sequence[torch.device]) -> None:
        """weight: [vocab, hidden], on the first device."""
        shares = zip(weight.chunk(len(devices)), devices)
        self._products = [RowProduct(share.to(device)) for share, device in shares]
        self._norms = [(norm.weight.to(device), norm.eps) for device in devices]
        # Of their own: other frames may run there meanwhile.
        self._streams = [torch.cuda.Stream(device) for device in devices[1:]]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden [rows, H] -> fp32 logits [rows, V], on the first device."""
        parts = list[Tensor]()
        for stream, norm, product in zip(self._streams, self._norms[1:], self._products[1:]):
            with torch.cuda.stream(stream):
                parts.append(product.wide(hidden.to(stream.device), norm))
        found = [self._products[0].wide(hidden, self._norms[0])]
        for stream, part in zip(self._streams, parts):
            with torch.cuda.stream(stream):
                found.append(part.to(hidden.device))
        return torch.cat(found, -1)


class SplitLayers:
    """A range's layers, each split over several devices."""

    def __init__(
        self,
        blocks: Sequence[Block],
        config: ModelConfig,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
    ) -> None:
        self._blocks = [block.parts for block in blocks if isinstance(block, SplitBlock)]
        self._each = _narrowed(config, len(devices))
        self._dtype = dtype
        self.devices = devices
        sizes = self._each.heads, self._each.kv_heads, self._each.head_dim
        self._rotaries = [Rotary(config.rope, *sizes, device) for device in devices]

    def make_exchange(self) -> PeerSums:
        from specsot_kernels.gpu.exchange import PeerSums

        return PeerSums(self.devices, MOST_ROWS, self._each.hidden, self._dtype)

    def fuse(self, exchange: PeerSums) -> list[FusedPart]:
        """The same layers as each device's own work, whose parts of each update are summed by kernels."""
        return [
            FusedPart(
                self._each,
                device,
                tuple(
                    SummedBlock(blocks[part], exchange, part, layer == 0)
                    for layer, blocks in enumerate(self._blocks)
                ),
                partial(exchange.alone, part),
            )
            for part, device in enumerate(self.devices)
        ]

    def make_kv(self, pages: int, page_rows: int, kept: KvDtype) -> SplitPages:
        shape = len(self._blocks), pages, page_rows, self._each.kv_heads, self._each.head_dim
        return SplitPages([KVPages(*shape, self._dtype, device, kept) for device in self.devices])

    def plan(self, spans: Sequence[RowSpan], page_rows: int, layout: Layout, kernels: bool) -> SplitPlan:
        group = self._each.heads // self._each.kv_heads
        parts = (
            plan_attention(
                [self._seen_by(part, span) for span in spans],
                page_rows,
                group,
                layout,
                self._dtype,
                device,
                self._rotaries[part].frequencies,
                kernels,
            )
            for part, device in enumerate(self.devices)
        )
        return SplitPlan((), (), None, None, parts=tuple(parts))

    def _seen_by(self, part: int, span: RowSpan) -> RowSpan:
        """What this part's heads see."""
        if not isinstance(span.sight, HeadColumns):
            return span
        first = part * self._each.kv_heads
        heads = self._each.kv_heads
        return replace(span, sight=replace(span.sight, windows=span.sight.windows[first : first + heads]))

    def runner(
        self, positions: Tensor, slots: Tensor, plans: Sequence[AttentionPlan], kv: KVPages
    ) -> Callable[[Tensor, range], None]:
        """See `Decoder._runner`."""
        assert isinstance(kv, SplitPages), "make_kv makes them"
        tables = [rotary.table(positions.to(device)) for rotary, device in zip(self._rotaries, self.devices)]
        places = [part.locate(slots.to(device)) for part, device in zip(kv.parts, self.devices)]

        def attend(blocks: Sequence[Block], rows: Sequence[Tensor], layer: int) -> Tensor:
            plan = plans[layer]
            assert isinstance(plan, SplitPlan), "plan makes them"
            parts = zip(blocks, rows, tables, places, plan.parts, kv.parts)
            return _sum(
                block.attention(x, block.keeping(table, place, pages, layer), pages.layers[layer], own)
                for block, x, table, place, own, pages in parts
            )

        def run(hidden: Tensor, layers: range) -> None:
            for layer in layers:
                blocks, rows = self._blocks[layer], self._spread(hidden)
                update = attend(blocks, rows, layer)
                if not self._each.parallel:
                    rows = self._spread(hidden.add_(update))
                mlp = _sum(block.mlp(block.mlp_norm(x)) for block, x in zip(blocks, rows))
                hidden.add_(mlp.add_(update) if self._each.parallel else mlp)

        return run

    def _spread(self, hidden: Tensor) -> list[Tensor]:
        return [hidden.to(device) for device in self.devices]


def _sum(parts: Iterable[Tensor]) -> Tensor:
    """On the device of the first. All are computed before any is waited for."""
    return reduce(lambda total, part: total.add_(part.to(total.device)), list(parts))
