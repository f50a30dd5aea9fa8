"""An EAGLE-3 head in GPU kernels: a pass never waits for the host, so several can be captured as one graph.

Heads with several layers, with a mask (P-EAGLE), or with a bias in the attention output or the MLP are not
supported here; they run as `Eagle3Head`.
"""

from __future__ import annotations

from torch import Tensor

from specsot_drafter.heads import DraftHead, GraphHead, HeadRows
from specsot_drafter.heads.decoder import DecoderHead
from specsot_drafter.heads.eagle import Eagle3Head
from specsot_model.attention import attend
from specsot_model.fp8 import runs_kernels
from specsot_model.fused import rotate_heads
from specsot_model.linear import CapturedProduct, Linear, captured_product


class FusedHead:
    """An `Eagle3Head` whose weights run in fused kernels, as a `GraphHead`.

    layers: Number of layers, always 1.
    asks_alone: True, because in a head with one layer only asked rows take part in attention.
    shape: The sizes of the head.
    head: The head whose weights are used.
    offsets: What is added to a draft id to get the base model's id, [draft vocabulary]. None: the ids are
        equal.
    dtype: Type of the head's numbers.
    device: The GPU on which the head computes.
    window: Number of positions that each row can attend to. None: all positions.
    """

    layers = 1
    asks_alone = True

    def __init__(self, head: Eagle3Head) -> None:
        """Prepare the kernels.

        head: A head for which `fuse_head` has found kernels.

        Asserts that each of the head's matrices has a product that can be captured. Without norms for heads
        in the layer, none are used.
        """
        layer = head.decoder.first
        self.shape = head.shape
        self.head = head
        self.offsets = head.offsets
        self.dtype = head.dtype
        self.device = head.device
        self.window = head.decoder.window.rows if head.decoder.window and layer.near else None
        self._qkv = _product(layer.qkv)
        self._out = _product(layer.out)
        self._gate_up = _product(layer.gate_up)
        self._down = _product(layer.down)
        self._lm_head = _product(head.lm_head)
        self._mlp_norm = layer.mlp_norm
        self._turning = layer.turning(head.shape.heads)

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.shape.kv_heads

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.shape.heads // self.shape.kv_heads

    def step(self, tokens: Tensor, features: Tensor, origins: Tensor, rows: HeadRows) -> Tensor:
        """Run one forward pass in fused kernels, and return the outputs of the asked rows, [asked, hidden];
        see `GraphHead.step`.

        tokens: Token ids, [rows].
        features: Features from which those of the rows are gathered, [n, hidden].
        origins: Index into `features` for each row, [rows].
        rows: Positions, slots and attention of the rows.

        The outputs are normed if the head's next feature is the normed output.
        """
        from specsot_kernels.gpu.rows import join_rows, norm_rows

        head = self.head
        shape = self.shape
        kv_layer = rows.kv.layers[0]
        assert rows.plan is not None
        assert isinstance(head.table, Tensor)
        norms = head.token_norm.weight, head.feature_norm.weight
        inputs, hidden = join_rows(
            tokens, head.table, features, origins, norms, head.token_norm.eps, head.norm_before_residual
        )
        heads = rotate_heads(self._qkv.heads(inputs), rows.positions, rows.slots, kv_layer, self._turning)
        queries = heads.narrow(1, 0, shape.heads)
        if rows.asked is not None:
            queries = queries[rows.asked]
            hidden = hidden[rows.asked]
        queries = queries.unflatten(1, (shape.kv_heads, self.group))
        norm = self._mlp_norm.weight, self._mlp_norm.eps
        short = self._out.add_to(hidden, attend(queries, kv_layer, rows.plan), norm)
        self._down.add_to(hidden, self._gate_up.gated(hidden, norm, short))
        return norm_rows(hidden, head.norm.weight, head.norm.eps) if head.norm_output else hidden

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of outputs, [rows, draft vocabulary].

        outputs: Outputs of `step`, [rows, hidden].

        The last norm is applied here unless the outputs are normed already.
        """
        norm = self.head.norm
        if self.head.norm_output:
            return self._lm_head(outputs)
        return self._lm_head.normed(outputs, (norm.weight, norm.eps))


def graph_head(head: DraftHead) -> GraphHead | None:
    """Return a head in a form that runs in graphs. Return None if the head or the machine cannot.

    head: Any draft head.

    A small language model that is not capturable gives None.
    """
    if isinstance(head, DecoderHead):
        return head if head.capturable else None
    return fuse_head(head)


def fuse_head(head: DraftHead) -> FusedHead | None:
    """Return a head in fused kernels. Return None if the head or the machine has no kernels for that.

    head: Any draft head.

    None on a CPU, without triton, for a head that `can_fuse` refuses, and if a matrix has a form for which
    there is no captured product.
    """
    if not runs_kernels(head.device) or not can_fuse(head):
        return None
    assert isinstance(head, Eagle3Head)
    layer = head.decoder.first
    linears = layer.qkv, layer.out, layer.gate_up, layer.down, head.lm_head
    return FusedHead(head) if all(map(captured_product, linears)) else None


def _product(linear: Linear) -> CapturedProduct:
    """Return the matrix product in a form that can be captured.

    linear: The weights, for which `captured_product` must find a kernel.

    Asserts that there is one.
    """
    product = captured_product(linear)
    assert product is not None, "see fuse_head"
    return product


def can_fuse(head: DraftHead) -> bool:
    """Return whether a head has the published form of EAGLE-3: one layer, no mask, no bias in the attention
    output or the MLP. Return False for every head of another family.

    head: Any draft head.

    A head with several layers or with a mask gives False.
    """
    if not isinstance(head, Eagle3Head) or head.layers > 1 or head.mask:
        return False
    layer = head.decoder.first
    return all(linear.bias is None for linear in (layer.out, layer.down, layer.gate_up))
