"""The layers of a range as modules of Transformers, with our pages and our attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.errors import ModelError
from specsot.members import KvDtype, Layout, Range
from specsot_kernels.segments import look_back
from specsot_model.attention import AttentionPlan, RowSpan, attend, plan_attention
from specsot_model.joined_pages import pages_by_size
from specsot_model.kv import KVPages, Places, row_bytes
from specsot_model.layers import Block, present
from specsot_model.linear import Linear, Table
from specsot_model.transformers_layers.interface import Attention, AttentionArguments, attending
from specsot_model.transformers_layers.loading import TransformersBlock, load_shell
from specsot_model.transformers_layers.shapes import LayerShape, layer_shapes
from specsot_model.transformers_layers.skeleton import fill_slots, skeleton_of
from specsot_model.weights import Fetch

# Number of query heads per KV head, and the window: layers that agree in both share a plan.
PlanKey = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class PlansByKey(AttentionPlan):
    """The attention plans of one frame, for layers that differ in their groups of heads or in their windows.

    by_key: The plan of each kind of layer. The fields of the base class are those of the first one.
    """

    by_key: Mapping[PlanKey, AttentionPlan] | None = None


@dataclass(slots=True)
class _ForwardRun:
    """One run of the model's forward, in which slots run some layers.

    hidden: [1, rows, hidden], the input of the next layer that runs. None: what arrives at a layer passes.
    layers: Layers that run, by their numbers in the model.
    entered: What arrived at the first layer of the model; None until then.
    """

    hidden: Tensor | None
    layers: range
    entered: Tensor | None = None


class TransformersLayers:
    """The layers of a range, with what the model's own forward computes before, between and after layers."""

    def __init__(
        self,
        blocks: Sequence[Block],
        fetch: Fetch,
        config: ModelConfig,
        layers: Range,
        embedding: Table | None,
        head: Linear | None,
        kv_dtype: KvDtype,
    ) -> None:
        """Load what is outside of the layers.

        blocks: The layers of the range, each a `TransformersBlock`.
        fetch: Reads tensors from the model's files.
        config: The model's config.
        layers: The range.
        embedding: The embedding, if the range has the first layer.
        head: The lm_head, if the range has the last layer.
        kv_dtype: Type of the KV cache; "auto" means that of `fetch`.

        Raises ModelError if the family cannot run over layer ranges, or if a tensor is missing.
        """
        self._config = config
        self._first = layers.first
        self._dtype = fetch.dtype
        self._device = torch.device(fetch.device)
        self._kv_dtype: KvDtype = kv_dtype
        self._shapes = layer_shapes(config)[layers.first : layers.last]
        self._returns_tuple = [shape.returns_tuple for shape in layer_shapes(config)]
        self._layers = {
            layers.first + index: block.layer
            for index, block in enumerate(blocks)
            if isinstance(block, TransformersBlock)
        }
        self._has_head = head is not None
        skeleton = skeleton_of(config, fetch.dtype)
        self._model = load_shell(skeleton, fetch, config, embedding, head)
        self._trunk = fill_slots(self._model, skeleton.path, list(skeleton.layers), self._visit)
        self._pass = _ForwardRun(None, range(0))
        self._attention: Attention = _OwnRows()
        self._check_rows()

    @property
    def kernels_read(self) -> bool:
        """Tell whether the attention kernels can read the KV pages."""
        return self._kv_dtype == "auto" or self._device.type == "cuda"

    def _check_rows(self) -> None:
        """Raise ModelError if a layer mixes rows elsewhere than in attention, as a convolution does.

        Pages store keys and values only, so what a layer reads of earlier rows otherwise would be lost. One
        layer of each class runs twice on two rows, with attention that reads each row's own value. The second
        row's result must not depend on the first row.
        """
        firsts = {type(layer): index for index, layer in reversed(self._layers.items())}
        for index in firsts.values():
            generator = torch.Generator().manual_seed(0)
            rows = torch.randn(3, 1, self._config.hidden, generator=generator).to(self._device, self._dtype)
            with torch.inference_mode():
                one, other = (self._run_alone(torch.cat((row, rows[2]))[None], index) for row in rows[:2])
            if not torch.allclose(one[0, 1], other[0, 1], rtol=1e-2, atol=1e-2):
                raise ModelError(
                    f"layer {index} of model_type {self._config.model_type!r} mixes rows elsewhere than in"
                    " attention: it keeps a state that is not supported"
                )

    def _run_alone(self, hidden: Tensor, index: int) -> Tensor:
        """Return the output [1, rows, hidden] of one layer whose attention reads each row's own value.

        hidden: [1, rows, hidden], the layer's input.
        index: Number of the layer in the model.
        """
        self._attention = attention = _OwnRows()
        positions = torch.arange(hidden.shape[1], device=self._device)[None]
        work = _ForwardRun(hidden, range(index, index + 1))
        with attending(attention):
            self._run(work, inputs_embeds=hidden, position_ids=positions)
        return present(work.hidden, "layer")

    def make_kv(self, pages: int, page_rows: int) -> KVPages:
        """Allocate the KV cache of the range; see `Decoder.make_kv`.

        pages: Number of pages in every layer.
        page_rows: Rows (tokens) of a page.
        """
        sizes = [(shape.kv_heads, shape.dim) for shape in self._shapes]
        form = self._dtype, self._device, self._kv_dtype
        return pages_by_size(sizes, range(len(sizes)), pages, page_rows, *form)

    def plan(self, spans: Sequence[RowSpan], page_rows: int, layout: Layout) -> AttentionPlan:
        """Return the plan of one frame's attention, for all layers of the range.

        spans: One span per segment of the frame, in row order.
        page_rows: Rows of a KV page.
        layout: Whether segments are read one by one ("packed") or padded into one product ("batched").
        """
        by_key = dict[PlanKey, AttentionPlan]()
        for shape in layer_shapes(self._config):
            key = plan_key(shape)
            if key not in by_key:
                by_key[key] = self._plan(spans, page_rows, layout, key)
        first = next(iter(by_key.values()))
        if len(by_key) == 1:
            return first
        return PlansByKey(**{one.name: getattr(first, one.name) for one in fields(first)}, by_key=by_key)

    def _plan(self, spans: Sequence[RowSpan], page_rows: int, layout: Layout, key: PlanKey) -> AttentionPlan:
        """Return the plan of one frame's attention for one kind of layers.

        spans: One span per segment of the frame, in row order.
        page_rows: Rows of a KV page.
        layout: Whether segments are read one by one ("packed") or padded into one product ("batched").
        key: The kind of layers.
        """
        group, window = key
        # A window that hides nothing from any row of the frame costs nothing.
        if window and [part for span in spans for part in look_back(span, window, drafts=False)] == list(
            spans
        ):
            window = None
        options = page_rows, group, layout, self._dtype, self._device
        return plan_attention(spans, *options, None, self.kernels_read, False, window)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Return what enters the first layer, [rows, hidden].

        tokens: LongTensor [rows], token ids.
        """
        work = self._run(
            _ForwardRun(None, range(0)), input_ids=tokens[None], position_ids=torch.zeros_like(tokens)[None]
        )
        entered = present(work.entered, "embedding")
        return entered[0].clone()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocab] of hidden states after the last layer.

        hidden: [rows, hidden], the output of the last layer.

        Raises ModelError if the range does not hold the lm_head.
        """
        present(self._has_head or None, "lm_head")
        positions = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        self._pass = _ForwardRun(hidden[None], range(0))
        return self._model(inputs_embeds=hidden[None], position_ids=positions, use_cache=False).logits[0]

    def runner(
        self, positions: Tensor, slots: Tensor, plans: Sequence[AttentionPlan], kv: KVPages
    ) -> Callable[[Tensor, range], None]:
        """Return a function that runs hidden states [rows, hidden], in place, through a range of layers.

        The range counts layers from the first layer of this range.

        positions: LongTensor [rows], the position of each token in its sequence.
        slots: LongTensor [rows], the KV slot of each token.
        plans: The attention plan of each layer of this range.
        kv: The KV cache of this range.
        """
        attention = _PagedAttention(self._shapes, plans, kv, kv.locate(slots))

        def run(hidden: Tensor, layers: range) -> None:
            """Run hidden states through some layers, in place.

            hidden: [rows, hidden], the residual stream.
            layers: Indices of the layers, counted from the first layer of this range.
            """
            if not layers:
                return
            self._attention = attention
            work = _ForwardRun(hidden[None], range(self._first + layers.start, self._first + layers.stop))
            with attending(attention):
                self._run(work, inputs_embeds=hidden[None], position_ids=positions[None])
            assert work.hidden is not None
            hidden.copy_(work.hidden[0])

        return run

    def _run(self, work: _ForwardRun, **inputs: Tensor) -> _ForwardRun:
        """Run the model's forward without its lm_head, and return `work` after it.

        work: What the slots do.
        inputs: Arguments of the forward.
        """
        self._pass = work
        self._trunk(use_cache=False, **inputs)
        return work

    def _visit(self, index: int, hidden: Tensor, args: Sequence[Any], given: dict[str, Any]) -> Any:
        """Run a layer, or pass the hidden state on; return what the layer would return.

        index: Number of the layer in the model.
        hidden: What arrives at the layer. It is replaced by the hidden state of the pass, if that has one.
        args: Further arguments of the layer by place.
        given: Further arguments by name.
        """
        work = self._pass
        if index == 0:
            work.entered = hidden
        if index in work.layers:
            self._attention.layer = index - self._first
            output = self._layers[index](work.hidden, *args, **given)
            work.hidden = output[0] if isinstance(output, tuple) else output
            return output
        passed = hidden if work.hidden is None else work.hidden
        return (passed,) if self._returns_tuple[index] else passed


class _OwnRows:
    """Attention in which each row reads its own value only.

    layer: Not used.
    """

    layer = 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: AttentionArguments
    ) -> Tensor:
        """Return each row's value for every query head, [1, rows, heads, value_dim].

        query: [1, heads, rows, key_dim], for the number of heads.
        key: Not used.
        value: [1, kv_heads, rows, value_dim].
        mask: Not used.
        options: Not used.
        """
        by_head = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return by_head.transpose(1, 2).contiguous()


class _PagedAttention:
    """Attention of one frame over KV pages.

    layer: Index of the layer that runs, within the range.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], plans: Sequence[AttentionPlan], kv: KVPages, places: Places
    ) -> None:
        """Prepare the attention of all layers of a range.

        shapes: The shape of each layer.
        plans: The plan of each layer.
        kv: The KV cache of the range.
        places: Page and offset at which the KV of each row is stored.
        """
        self.layer = 0
        self._shapes = shapes
        self._plans = plans
        self._kv = kv
        self._places = places

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: AttentionArguments
    ) -> Tensor:
        """Store the rows' keys and values in the pages, and return the attention output, [1, rows, heads,
        value_dim].

        query: [1, heads, rows, key_dim].
        key: [1, kv_heads, rows, key_dim].
        value: [1, kv_heads, rows, value_dim].
        mask: Not used; the plan says what each row sees.
        options: Scaling, softcap and sinks.
        """
        shape = self._shapes[self.layer]
        plan = self._plans[self.layer]
        if isinstance(plan, PlansByKey) and plan.by_key is not None:
            plan = plan.by_key[plan_key(shape)]
        rows = query.shape[2]
        stored = torch.stack([_rows_of(part, shape.dim) for part in (key, value)], 1)
        self._kv.put(self.layer, self._places, stored)
        queries = (_rows_of(query, shape.dim) * options.scaling).view(
            rows, shape.kv_heads, shape.group, shape.dim
        )
        sinks = None if options.sinks is None else options.sinks.float().view(shape.kv_heads, shape.group)
        out = attend(queries, self._kv.layers[self.layer], plan, sinks, options.softcap)
        return out.view(1, rows, shape.heads, shape.dim)[..., : shape.value_dim].contiguous()


def plan_key(shape: LayerShape) -> PlanKey:
    """Return what decides which plan a layer uses.

    shape: The shape of the layer.
    """
    return shape.group, shape.window


def page_row_bytes(config: ModelConfig, layers: Range, itemsize: int, kv_dtype: KvDtype) -> int:
    """Return the bytes that one token takes in the KV pages of a range.

    config: A config with `transformers`.
    layers: The range.
    itemsize: Bytes of a number of the KV cache, unless `kv_dtype` is int8.
    kv_dtype: Type of the KV cache.

    Raises ModelError as `layer_shapes` does.
    """
    shapes = layer_shapes(config)[layers.first : layers.last]
    return sum(2 * shape.kv_heads * row_bytes(shape.dim, itemsize, kv_dtype) for shape in shapes)


def _rows_of(heads: Tensor, dim: int) -> Tensor:
    """Return heads row by row, [rows, heads, dim], padded with zeros at the end of each head.

    heads: [1, heads, rows, numbers of a head], at most `dim` numbers.
    dim: Numbers of a padded head.
    """
    return F.pad(heads[0].transpose(0, 1), (0, dim - heads.shape[-1]))
