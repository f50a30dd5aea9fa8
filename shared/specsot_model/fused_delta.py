"""A gated delta layer in GPU kernels that never wait for the host, for captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specsot_model.attention import AttentionPlan
from specsot_model.delta import DeltaBlock
from specsot_model.delta_pages import WalkedPages
from specsot_model.fp8 import NormedRows
from specsot_model.kv import KVPages
from specsot_model.layers import Norm
from specsot_model.linear import RowProduct, captured_product


class FusedDelta:
    """Runs the layer of a `DeltaBlock` in GPU kernels, over the same weights."""

    def __init__(self, block: DeltaBlock, add_mlp: Callable[[Tensor], object]) -> None:
        """Prepare the products and the rule of a layer.

        ValueError is raised if a product is not in floats, and AssertionError if the input norm is not an
        RMSNorm.

        block: The layer, whose weights are shared.
        add_mlp: Adds the layer's MLP update to the residual stream [rows, hidden], in place.
        """
        from specsot_kernels.gpu.delta import DeltaRule

        products = [captured_product(product) for product in (block.qkv, block.out)]
        norm = block.input_norm
        self._inputs, self._out = (product for product in products if isinstance(product, RowProduct))
        assert isinstance(norm, Norm)
        self._input_norm = (norm.weight, norm.eps)
        self._add_mlp = add_mlp
        self._norm = (block.norm, block.config.eps)
        delta = block.delta
        sizes = delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.half
        self._rule = DeltaRule(*sizes, block.taps, block.decay, block.bias)
        self._row = delta.row

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        kv: KVPages,
        layer: int,
        rows: NormedRows | None = None,
    ) -> None:
        """Add this layer's two updates to the residual stream, in place.

        The rows run in the order of `kv.walks`. AssertionError is raised for pages of another class. After
        the last gated delta layer of the range, the states that the frame saves become valid.

        hidden: [rows, hidden], the residual stream.
        positions: Not used.
        slots: LongTensor [rows], the slot at which each row's inputs are stored; negative for surplus rows.
        plan: Not used.
        kv: The pages of the range, a `WalkedPages` that was arranged or filled for the frame.
        layer: Index of this layer within `kv`.
        rows: Not used.
        """
        from specsot_kernels.gpu.delta import norm_gated, run_delta

        assert isinstance(kv, WalkedPages), "gated delta layers need the pages that Decoder.make_kv made"
        inputs = self._inputs.normed(hidden, self._input_norm)
        mixed = run_delta(inputs, slots, kv.layers[layer], kv.states(layer), kv.walks, self._rule)
        kv.finish(layer)
        self._out.add_to(hidden, norm_gated(mixed, inputs[:, self._row :], slots, *self._norm))
        self._add_mlp(hidden)
