"""What a layer does between and in its products of one row, against the same in plain torch."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.checkpoint.rope import Rope
from specsot.members import KvDtype
from specsot_model.kv import KVPages, as_numbers
from specsot_model.rotary import Rotary, frequencies, rotate

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
from specsot_kernels.gpu.products import RowTile, multiply_row  # noqa: E402
from specsot_kernels.gpu.rows import Turning, gate, join_rows, norm_rows, turn_and_store  # noqa: E402

KINDS = (torch.float32, torch.float16)
NEAR = {torch.float32: 1e-5, torch.float16: 4e-3}
ROPE = Rope(theta=1e4)


def made(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, kind)


def close(found: Tensor, wanted: Tensor, kind: torch.dtype) -> bool:
    """By the size of the whole: single results may cancel out."""
    return bool((found.double() - wanted.double()).norm() <= NEAR[kind] * wanted.double().norm())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs", "tile", "kind"),
    [(24, 512, None, torch.float16), (10, 300, RowTile(4, 128, 1), torch.float32)],
)
def test_one_row_times_a_matrix(
    outputs: int, inputs: int, tile: RowTile | None, normed: bool, gated: bool, kind: torch.dtype
) -> None:
    torch.manual_seed(outputs)
    x, weight = made(1, inputs, kind=kind), made(outputs * (1 + gated), inputs, kind=kind)
    scale, residual = made(inputs, kind=kind), made(1, outputs, kind=kind)
    wide = F.rms_norm(x.double(), (inputs,), scale.double(), 1e-5) if normed else x.double()
    wanted = wide @ weight.double().T
    if gated:
        opened, up = wanted.chunk(2, 1)
        wanted = F.silu(opened) * up
    norm = (scale, 1e-5) if normed else None
    assert close(multiply_row(x, weight, norm, None, gated, tile=tile), wanted, kind)
    into = residual.clone()
    assert multiply_row(x, weight, norm, into, gated, into, tile) is into
    assert close(into, wanted + residual.double(), kind)


def test_a_gate_of_more_columns_than_a_tile() -> None:
    gate_up = made(3, 2 * 1500)
    opened, up = gate_up.chunk(2, 1)
    assert close(gate(gate_up), F.silu(opened) * up, torch.float32)


@pytest.mark.parametrize(("dim", "normed"), [(64, False), (80, True)])
def test_heads_are_turned_and_stored(dim: int, normed: bool) -> None:
    torch.manual_seed(dim)
    heads, kv_heads, rows, page_rows = 4, 2, 3, 8
    qkv, layer = made(rows, heads + 2 * kv_heads, dim), made(2, 3, kv_heads, page_rows, dim)
    positions, slots = torch.tensor([0, 7, 900]).to(DEVICE), torch.tensor([17, -1, 6]).to(DEVICE)
    norms = (made(dim), made(dim)) if normed else None
    kept, wanted = layer.clone(), qkv.clone()
    turned = wanted[:, : heads + kv_heads]
    if norms is not None:
        for part, norm in zip(turned.split((heads, kv_heads), 1), norms):
            part.copy_(F.rms_norm(part, (dim,), norm, 1e-6))
    rotate(turned, Rotary(ROPE, heads, kv_heads, dim, DEVICE).table(positions))
    turning = Turning(heads, kv_heads, frequencies(ROPE, dim).to(DEVICE), dim**-0.5, norms, 1e-6)
    turn_and_store(qkv, positions, slots, layer, turning)
    assert close(qkv[:, :heads], wanted[:, :heads], torch.float32)
    for row, (page, offset) in ((0, (2, 1)), (2, (0, 6))):
        stored = wanted[row, heads:].view(2, kv_heads, dim)
        assert close(layer[:, page, :, offset], stored, torch.float32)
        layer[:, page, :, offset] = kept[:, page, :, offset]
    assert torch.equal(layer, kept), "rows without a slot leave nothing"


@pytest.mark.parametrize("form", ["auto", "int8"])
def test_rows_that_are_keys_and_values_at_once_are_stored_in_their_own_layer_alone(form: KvDtype) -> None:
    """An odd number of heads is stored, so that the last program has more lanes than heads."""
    torch.manual_seed(5)
    heads, dim, rows, page_rows = 4, 32, 2, 8
    pages = KVPages(3, 2, page_rows, 1, dim, torch.float32, DEVICE, form, tensors=1)
    for layer in pages.layers:
        layer.fill_(7)
    kept = [layer.clone() for layer in pages.layers]
    qkv, slots = made(rows, heads + 1, dim), torch.tensor([3, 12]).to(DEVICE)
    turning = Turning(heads, 1, frequencies(ROPE, dim).to(DEVICE), dim**-0.5)
    wanted = qkv.clone()
    rotate(wanted, Rotary(ROPE, heads, 1, dim, DEVICE).table(slots))
    turn_and_store(qkv, slots, slots, pages.layers[1], turning)
    for number in (0, 2):
        assert torch.equal(pages.layers[number], kept[number]), "of another layer"
    stored = as_numbers(pages.layers[1], torch.float32)[0, :, 0].flatten(0, 1)
    torch.testing.assert_close(stored[slots], wanted[:, -1], atol=2e-2 if form == "int8" else 1e-5, rtol=0)


@pytest.mark.parametrize("unreal", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_come_back_finite_from_int8(unreal: float) -> None:
    dim, heads, kv_heads = 64, 2, 1
    qkv, layer = (
        made(2, heads + 2 * kv_heads, dim),
        KVPages(1, 1, 8, kv_heads, dim, torch.float32, DEVICE, "int8"),
    )
    qkv[1, heads, 5] = qkv[1, heads + 1, 9] = unreal
    turning = Turning(heads, kv_heads, frequencies(ROPE, dim).to(DEVICE), dim**-0.5)
    at = torch.tensor([0, 1]).to(DEVICE)
    turn_and_store(qkv, at, at, layer.layers[0], turning)
    rows = as_numbers(layer.layers[0], torch.float32)[:, 0, 0, :2]
    assert rows[:, 0].isfinite().all()
    assert not rows[:, 1].isfinite().all(-1).any()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_normed_apart(kind: torch.dtype) -> None:
    x, weight = made(3, 300, kind=kind), made(300, kind=kind)
    x[1] *= 100
    wanted = F.rms_norm(x.double(), (300,), weight.double(), 1e-5)
    assert close(norm_rows(x, weight, 1e-5), wanted, kind)


def test_how_a_head_begins() -> None:
    tokens, origins = torch.tensor([3, 0, 3], device=DEVICE), torch.tensor([1, 1, 0], device=DEVICE)
    table, features, one, two = made(5, 24), made(2, 24), made(24), made(24)
    inputs, plain = join_rows(tokens, table, features, origins, (one, two), 1e-5)
    wanted = F.rms_norm(table[tokens], (24,), one, 1e-5), F.rms_norm(features[origins], (24,), two, 1e-5)
    assert close(inputs, torch.cat(wanted, 1), torch.float32)
    assert plain.tolist() == features[origins].tolist()
