"""Splits a range's layers over the devices of one host (tensor parallelism).

Every device has some of the heads and some of the MLP's columns, and KV pages of its own heads. The first
device also has the embedding, the final norm and the lm_head. If the GPUs reach each other's memory, each has
the whole residual stream and runs a CUDA graph, and kernels sum the parts of each update. Otherwise only the
first device has the residual stream, and the parts of each update are sent there.
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
from specsot_model.fp8 import NormedRows, NormWeight, ShortRows, runs_kernels
from specsot_model.fused import FusedBlock, can_fuse, head_turns_of
from specsot_model.joined_pages import JoinedPages
from specsot_model.kv import KVPages
from specsot_model.layers import Block, Norm
from specsot_model.linear import Linear, RowProduct, check_device
from specsot_model.rotary import Rotary
from specsot_model.weights import Fetch, Weights

if TYPE_CHECKING:
    from specsot_kernels.gpu.exchange import PeerSums

# The option that errors name.
FIELD = "tensor_parallel"
# Rows. The largest graph; equals the largest of `cuda_graphs.BUCKETS`.
MAX_ROWS = 512
# Buffers of `PeerSums`. Consecutive sums use different buffers, so that no sum overwrites a part of the
# previous sum while another GPU still reads that part.
ENTRY, ATTENTION, MLP = range(3)

# Loads the layer of this index.
MakeBlock = Callable[[Fetch, int, ModelConfig], Block]


def devices_of(device: torch.device | str, parts: int) -> tuple[torch.device, ...]:
    """Return the devices that share each layer: the named device and those that follow it.

    The result is empty if `parts` is 1, because nothing is split then. Every device that is not a GPU is
    returned `parts` times.

    device: The first device, such as "cuda:0".
    parts: Number of devices, at least 1.

    Raises InvalidRequest for a GPU without a number, or if there are fewer GPUs than parts.

    # "cuda:2", 2 parts -> (cuda:2, cuda:3)
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
    """Raise InvalidRequest if a model, or a form of it, cannot be split over devices.

    Numbers of query heads, of KV heads and of MLP columns must be multiples of `parts`, and `parts` must be
    at least 1. Refused are also latent attention, experts, gated delta layers, gated heads, sliding windows,
    layers without rotary positions, attention sinks, norms over all query and key heads at once, projections
    or gates that the files hold in one tensor (unless ordered by head), norms over a layer's updates, scaled
    queries, capped scores, quantized weights and batch invariance. The first of these that applies is named.

    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    parts: Number of devices; 1 always passes.
    quantization: Form of the matrices; only None can be split.
    batch_invariant: Whether the output of a token must not depend on its batch; only False can be split.
    """
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
        "families that run through Transformers": config.transformers is not None,
        "latent attention": config.latent is not None,
        "layers with experts": config.routing is not None,
        "gated delta layers and gated heads": config.delta is not None or config.gated_heads,
        "sliding windows": config.window is not None,
        "layers without rotary positions": bool(config.unrotated),
        "attention sinks": bool(names.sinks),
        "norms over all heads at once": config.qk_norm and config.whole_qk_norm,
        "projections or gates in one tensor": bool(names.gate_up or (names.qkv and not names.qkv_by_head)),
        "norms over what layers add": bool(names.after_attention or names.after_mlp),
        "scaled queries or capped scores": bool(config.query_scalar or config.attention_softcap),
        "quantized weights": quantization is not None,
        "batch_invariant": batch_invariant,
    }
    for feature, present in refused.items():
        if present:
            raise InvalidRequest(f"tensor_parallel does not work with {feature}", FIELD)


class WeightPart(Weights):
    """The weights that one device reads: its part of every split tensor, and the other tensors whole.

    Projections to heads and to the MLP's columns are split by outputs (rows of the weight); projections back
    to the hidden size are split by inputs (columns).

    files: Source of the whole tensors.
    names: Tensor names of the model's family, which tell how each tensor is split.
    part: Number of the device, from 0.
    parts: Number of devices.
    """

    def __init__(self, files: Weights, names: Names, part: int, parts: int) -> None:
        """Note which tensors are split by rows and which by columns; nothing is read.

        files: Source of the whole tensors.
        names: Tensor names of the model's family, which tell how each tensor is split.
        part: Number of the device, from 0.
        parts: Number of devices.
        """
        self._files = files
        self._part = part
        self._parts = parts
        heads = (names.qkv,) if names.qkv else ("q_proj", "k_proj", "v_proj")
        self._rows = _endings((*heads, names.gate, names.up))
        self._columns = _endings((names.out, names.down))

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return self._files.names()

    def where(self, name: str) -> str:
        """Return where a tensor comes from, such as a file, for messages.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return self._files.where(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return self._files.shape(name)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return this device's part of a tensor.

        A bias that is added to a sum over devices belongs to the first device; the others get zeros. A tensor
        that is not split is returned whole. ModelError is raised if the tensor cannot be read.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        dtype: Type of the result.
        device: Device of the result.
        """
        axis = self._axis(name)
        if axis is not None:
            whole = self._files.tensor(name, dtype, "cpu")
            return whole.chunk(self._parts, axis)[self._part].contiguous().to(device)
        whole = self._files.tensor(name, dtype, device)
        summed = name.endswith(".bias") and name.removesuffix(".bias").endswith(self._columns)
        return torch.zeros_like(whole) if self._part and summed else whole

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ModelError if this device's part of a tensor does not have a certain shape.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        shape: The shape of the part that the config of the part asks for.
        """
        axis = self._axis(name)
        self._files.check(
            name, tuple(size * self._parts if at == axis else size for at, size in enumerate(shape))
        )

    def _axis(self, name: str) -> int | None:
        """Return the axis along which a tensor is split, or None if it is not split.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        module, _, kind = name.rpartition(".")
        if module.endswith(self._rows):
            return 0
        return 1 if kind == "weight" and module.endswith(self._columns) else None


def _endings(names: Iterable[str]) -> tuple[str, ...]:
    """Return what tensor names of these modules end with: ".q_proj" for "q_proj". Empty names are left out.

    names: Module names; "" or None for modules that the model does not have.
    """
    return tuple(f".{name}" for name in names if name)


class SplitBlock(Block):
    """A layer that is split over devices.

    parts: One block per device, with fewer heads and a narrower MLP.
    fetch: Reads whole tensors from the model's files.
    index: Index of the layer in the whole model.
    config: The config of the whole model.
    devices: The devices, in order.
    """

    def __init__(
        self, fetch: Fetch, index: int, config: ModelConfig, devices: Sequence[torch.device]
    ) -> None:
        """Load every device's part of the layer onto the device.

        ModelError is raised if a tensor is missing or has another shape.

        fetch: Reads whole tensors from the model's files.
        index: Index of the layer in the whole model.
        config: The config of the whole model.
        devices: The devices, in order.
        """
        parts = len(devices)
        self.config = config
        part_config = _config_of_part(config, parts)
        self.parts = tuple(
            Block(
                replace(fetch, files=WeightPart(fetch.files, config.names, part, parts), device=device),
                index,
                part_config,
            )
            for part, device in enumerate(devices)
        )


def block_maker(devices: Sequence[torch.device]) -> MakeBlock:
    """Return the function that loads layers: split over devices, or whole if there are none.

    devices: The devices that share each layer; empty: no split.
    """
    return partial(SplitBlock, devices=devices) if devices else Block


def _config_of_part(config: ModelConfig, parts: int) -> ModelConfig:
    """Return the config of one device's part of the layers: fewer heads and a narrower MLP.

    config: The config of the whole model.
    parts: Number of devices, which divides all these sizes.
    """
    return replace(
        config,
        heads=config.heads // parts,
        kv_heads=config.kv_heads // parts,
        intermediate=config.intermediate // parts,
    )


@dataclass(frozen=True, slots=True)
class SplitPlan(AttentionPlan):
    """The attention plan of split layers.

    parts: The plan of each device, over its heads.
    """

    parts: tuple[AttentionPlan, ...] = ()


class SplitPages(JoinedPages):
    """KV pages on several devices: the same pages and slots on each, with the KV of the device's heads.

    Every operation on rows or pages runs on all devices.

    parts: The KV pages of each device, in device order.
    """

    def __init__(self, parts: Sequence[KVPages]) -> None:
        """Combine the pages of all devices; nothing is copied.

        parts: The KV pages of each device, in device order; at least one.
        """
        layers = range(len(parts[0].layers))
        super().__init__(parts, [(part, layer) for part in range(len(parts)) for layer in layers])

    def keep_smallest_keys(
        self,
        layer: int,
        sources: Tensor,
        targets: Tensor,
        holds_row: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        """Prune by key norm on every device: each device gets its own heads of `holds_row` and `counts`.

        layer: Index of the layer within the cache.
        sources: LongTensor [rows], slots to choose from, on any device.
        targets: LongTensor [kept], slots that receive the chosen rows.
        holds_row: bool [rows, kv_heads], which sources hold a row of each head; None: every source does.
        counts: [kv_heads], how many rows each head keeps; None: every head fills all targets.
        """
        first = 0
        for part in self.parts:
            kv_layer = part.layers[layer]
            heads = slice(first, first + kv_layer.shape[2])
            device = kv_layer.device
            first = heads.stop
            part_holds_row = None if holds_row is None else holds_row[:, heads].to(device)
            part_counts = None if counts is None else counts[heads].to(device)
            part.keep_smallest_keys(
                layer, sources.to(device), targets.to(device), part_holds_row, part_counts
            )


def can_capture_split(config: ModelConfig, devices: Sequence[torch.device]) -> bool:
    """Tell whether layers split over devices run as one CUDA graph per device.

    This needs fused kernels for the layers, and GPUs that reach each other's memory. False for other layers
    or devices.

    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    devices: The devices that share each layer.
    """
    if not all(map(runs_kernels, devices)) or not can_fuse(config):
        return False
    from specsot_kernels.gpu.exchange import reach_each_other

    return reach_each_other(devices)


@dataclass(frozen=True, slots=True)
class SummedProduct:
    """One device's part of a product whose parts are summed over all devices.

    weight: This device's part of the weight, [out, in / devices].
    exchange: Sums the parts.
    part: Number of this device.
    place: Buffer of `exchange`: ATTENTION or MLP.
    """

    weight: Tensor
    exchange: PeerSums
    part: int
    place: int

    def add_to(self, hidden: Tensor, x: Tensor | ShortRows, next_norm: NormWeight | None = None) -> None:
        """Add the sum of all devices' products to the hidden states, in place, and return None.

        hidden: [rows, out], this device's copy of the residual stream.
        x: [rows, in / devices], this device's inputs. AssertionError is raised for rows in 8 bits.
        next_norm: Not used.
        """
        from specsot_kernels.gpu.products import multiply_row

        assert isinstance(x, Tensor), "rows in 8 bits are only multiplied with weights in 8 bits"
        partial_sum = self.exchange.own(self.part, self.place, len(x))
        if len(x) == 1:
            multiply_row(x, self.weight, into=partial_sum)
        else:
            torch.mm(x, self.weight.t(), out=partial_sum)
        self.exchange.add(self.part, self.place, hidden)


class SummedBlock(FusedBlock):
    """One device's part of a layer; the device has the whole residual stream."""

    def __init__(self, block: Block, exchange: PeerSums, part: int, is_first: bool) -> None:
        """Prepare the device's part of a layer.

        AssertionError is raised if one of these products is quantized.

        block: This device's part of the layer. Neither its attention's nor its MLP's last product may be
            quantized.
        exchange: Sums the parts of each update over the devices.
        part: Number of this device, from 0.
        is_first: True for the first layer of the range. It copies the hidden states, which enter on the first
            device, to all devices.
        """
        buffers = iter((ATTENTION, MLP))

        def make_summed(linear: Linear) -> SummedProduct:
            """Return this device's part of a product whose parts are summed.

            linear: The device's part of the product: attention's output on the first call, the MLP's on the
                second.
            """
            assert linear.weight is not None, "can_capture_split has checked that the weight is not quantized"
            return SummedProduct(linear.weight, exchange, part, next(buffers))

        super().__init__(block, head_turns_of(block), make_product=make_summed)
        self._entry = (exchange, part) if is_first else None

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        kv: KVPages,
        layer: int,
        rows: NormedRows | None = None,
    ) -> NormedRows | None:
        """Add this layer's two updates to the residual stream, in place, and return the next layer's input.

        In the first layer, `hidden` becomes the sum over all devices, of which only the first one has numbers
        other than zero: so the hidden states reach every device.

        hidden: [rows, hidden], this device's copy of the residual stream.
        positions: LongTensor [rows], the position of each row in its sequence.
        slots: LongTensor [rows], the KV slot of each row; a row with a negative slot writes no KV.
        plan: The attention plan of the frame, over this device's heads.
        kv: The KV pages of this device.
        layer: Index of this layer within `kv`.
        rows: The normed rows of `hidden`, if the previous layer returned them.

        Return the normed rows for the next layer, or None.
        """
        if self._entry:
            exchange, part = self._entry
            exchange.own(part, ENTRY, len(hidden)).copy_(hidden)
            exchange.add(part, ENTRY, hidden.zero_())
        return super().forward(hidden, positions, slots, plan, kv, layer, rows)


@dataclass(frozen=True, slots=True)
class FusedPart:
    """The part of a layer range that one device runs.

    config: Config of the part: fewer heads, and a narrower MLP.
    device: The device that runs the part.
    blocks: The device's part of every layer.
    alone: Context in which the device waits for no other, for capturing; see `PeerSums.alone`.
    """

    config: ModelConfig
    device: torch.device
    blocks: tuple[FusedBlock, ...]
    alone: Callable[[], AbstractContextManager[None]]


class SplitHead:
    """The final norm and lm_head, split over devices by vocabulary."""

    def __init__(self, norm: Norm, weight: Tensor, devices: Sequence[torch.device]) -> None:
        """Copy each device's part of the lm_head to the device.

        norm: The final norm, on the first device.
        weight: The whole lm_head [vocab, hidden], on the first device.
        devices: The devices, in order.
        """
        weight_parts = zip(weight.chunk(len(devices)), devices)
        self._products = [RowProduct(weight_part.to(device)) for weight_part, device in weight_parts]
        self._norms = [(norm.weight.to(device), norm.eps) for device in devices]
        # Streams of their own, because other frames may run on these devices at the same time.
        self._streams = [torch.cuda.Stream(device) for device in devices[1:]]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the fp32 logits [rows, V], on the first device.

        V is the whole vocabulary; each device computes a part of it, and the parts are joined in device
        order.

        hidden: [rows, H], the output of the last layer, on the first device.
        """
        parts = list[Tensor]()
        for stream, norm, product in zip(self._streams, self._norms[1:], self._products[1:]):
            with torch.cuda.stream(stream):
                parts.append(product.wide(hidden.to(stream.device), norm))
        logits = [self._products[0].wide(hidden, self._norms[0])]
        for stream, part in zip(self._streams, parts):
            with torch.cuda.stream(stream):
                logits.append(part.to(hidden.device))
        return torch.cat(logits, -1)


class SplitLayers:
    """A range's layers, each split over several devices, run layer by layer from the host.

    blocks: The layers, each a `SplitBlock`.
    config: The config of the whole model.
    dtype: Type of activations.
    devices: The devices, in order.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        config: ModelConfig,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
    ) -> None:
        """Keep the layers' parts, and compute rotary tables on every device.

        Layers that are not split are left out.

        blocks: The layers, each a `SplitBlock`.
        config: The config of the whole model.
        dtype: Type of activations.
        devices: The devices, in order.
        """
        self._blocks = [block.parts for block in blocks if isinstance(block, SplitBlock)]
        self._part_config = _config_of_part(config, len(devices))
        self._dtype = dtype
        self.devices = devices
        sizes = self._part_config.heads, self._part_config.kv_heads, self._part_config.head_dim
        self._rotaries = [Rotary(config.rope, *sizes, device) for device in devices]

    def make_exchange(self) -> PeerSums:
        """Allocate the buffers by which GPUs sum their parts of each update, and return them."""
        from specsot_kernels.gpu.exchange import PeerSums

        return PeerSums(self.devices, MAX_ROWS, self._part_config.hidden, self._dtype)

    def fuse(self, exchange: PeerSums) -> list[FusedPart]:
        """Return each device's part of the layers for CUDA graphs; kernels sum the parts of each update.

        exchange: The buffers by which GPUs sum their parts; see `make_exchange`.
        """
        return [
            FusedPart(
                self._part_config,
                device,
                tuple(
                    SummedBlock(blocks[part], exchange, part, layer == 0)
                    for layer, blocks in enumerate(self._blocks)
                ),
                partial(exchange.alone, part),
            )
            for part, device in enumerate(self.devices)
        ]

    def make_kv(self, pages: int, page_rows: int, kv_dtype: KvDtype) -> SplitPages:
        """Allocate the KV cache on every device, and return it.

        pages: Number of pages in every layer.
        page_rows: Rows (tokens) of a page.
        kv_dtype: Type of the rows: "int8", or "auto" for the type of activations.
        """
        shape = len(self._blocks), pages, page_rows, self._part_config.kv_heads, self._part_config.head_dim
        return SplitPages([KVPages(*shape, self._dtype, device, kv_dtype) for device in self.devices])

    def plan(self, spans: Sequence[RowSpan], page_rows: int, layout: Layout, use_kernels: bool) -> SplitPlan:
        """Return the plan of one frame's attention on every device.

        The plan's own tables are empty; `parts` holds one plan per device.

        spans: One span per segment of the frame, in row order.
        page_rows: Rows of a KV page.
        layout: Whether segments are read one by one ("packed") or padded into one product ("batched").
        use_kernels: Whether the GPU kernels can read the pages.
        """
        group = self._part_config.heads // self._part_config.kv_heads
        parts = (
            plan_attention(
                [self._span_on_device(part, span) for span in spans],
                page_rows,
                group,
                layout,
                self._dtype,
                device,
                self._rotaries[part].frequencies,
                use_kernels,
            )
            for part, device in enumerate(self.devices)
        )
        return SplitPlan((), (), None, None, parts=tuple(parts))

    def _span_on_device(self, part: int, span: RowSpan) -> RowSpan:
        """Return the span as the heads of one device see it: with the windows of that device's KV heads only.

        A span whose windows do not differ by head is returned as it is.

        part: Number of the device, from 0.
        span: The rows of one segment. Only windows that differ by head differ by device.
        """
        if not isinstance(span.sight, HeadColumns):
            return span
        first = part * self._part_config.kv_heads
        heads = self._part_config.kv_heads
        return replace(span, sight=replace(span.sight, windows=span.sight.windows[first : first + heads]))

    def runner(
        self, positions: Tensor, slots: Tensor, plans: Sequence[AttentionPlan], kv: KVPages
    ) -> Callable[[Tensor, range], None]:
        """Return a function that runs hidden states [rows, H], in place, through a range of layers.

        The range counts layers from the first of these layers. The hidden states are on the first device.
        AssertionError is raised for pages or plans that were made by other classes.

        positions: LongTensor [rows], the position of each token in its sequence.
        slots: LongTensor [rows], the KV slot of each token.
        plans: The attention plan of each layer, as `plan` of this class makes it.
        kv: The KV pages that `make_kv` of this class made.
        """
        assert isinstance(kv, SplitPages), "split layers need the pages that their make_kv made"
        tables = [rotary.table(positions.to(device)) for rotary, device in zip(self._rotaries, self.devices)]
        places = [part.locate(slots.to(device)) for part, device in zip(kv.parts, self.devices)]

        def attention_update(blocks: Sequence[Block], hidden_parts: Sequence[Tensor], layer: int) -> Tensor:
            """Return the attention update of a layer, summed over the devices.

            blocks: The layer's part of each device.
            hidden_parts: The hidden states [rows, H] on each device.
            layer: Index of the layer.
            """
            plan = plans[layer]
            assert isinstance(plan, SplitPlan), "split layers need a plan that their plan method made"
            parts = zip(blocks, hidden_parts, tables, places, plan.parts, kv.parts)
            return _sum_parts(
                block.attention(
                    x, block.kv_writer(table, place, pages, layer), pages.layers[layer], part_plan
                )
                for block, x, table, place, part_plan, pages in parts
            )

        def run(hidden: Tensor, layers: range) -> None:
            """Run hidden states through some layers, in place.

            hidden: [rows, H], on the first device, the residual stream.
            layers: Indices of the layers among these.
            """
            for layer in layers:
                blocks, rows = self._blocks[layer], self._spread(hidden)
                update = attention_update(blocks, rows, layer)
                if not self._part_config.parallel:
                    rows = self._spread(hidden.add_(update))
                mlp = _sum_parts(block.mlp(block.mlp_norm(x)) for block, x in zip(blocks, rows))
                hidden.add_(mlp.add_(update) if self._part_config.parallel else mlp)

        return run

    def _spread(self, hidden: Tensor) -> list[Tensor]:
        """Return the hidden states on every device, in device order.

        hidden: [rows, H], on the first device.
        """
        return [hidden.to(device) for device in self.devices]


def _sum_parts(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of all parts, on the device of the first; the first part is changed in place.

    All parts are launched before any is waited for.

    parts: One tensor per device, all of one shape; at least one.
    """
    return reduce(lambda total, part: total.add_(part.to(total.device)), list(parts))
