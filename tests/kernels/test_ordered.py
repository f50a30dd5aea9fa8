"""Products whose rows are the same bits in any company; on a CPU of whole numbers, whose sums are exact."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot_kernels.gpu import ordered
from specsot_kernels.gpu.ordered import (
    ALWAYS_FASTER_ROWS,
    FEW_ROWS,
    MIN_PART_INPUTS,
    MIN_TILE_OUTPUTS,
    SHORT_GATED_TILES,
    TALL_OUTPUT_TILES,
    OrderedTile,
    is_faster,
    multiply_ordered,
    parts_of,
    tile_for,
)
from specsot_model.linear import InvariantRowProduct, RowProduct

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = (torch.bfloat16, torch.float16, torch.float32) if DEVICE == "cuda" else (torch.float16,)
ROWS = (1, 2, 3, 16, 17, 33, 64, 65, 128, 130, 200, 256, 300)
SIZES = (
    (80, 150),
    (640, 2048),
    (128, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
)  # the last: of an 8B model


def whole(*shape: int, kind: torch.dtype) -> Tensor:
    return torch.randint(-3, 4, shape).to(DEVICE, kind)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("outputs", "inputs"), [(80, 150), (64, 96)])
@pytest.mark.parametrize("gated", [False, True])
def test_it_is_the_product(rows: int, parts: int, outputs: int, inputs: int, gated: bool) -> None:
    torch.manual_seed(outputs)
    tile, kind = OrderedTile(64, 16 if rows < FEW_ROWS else 64, 32, 4, 2, rows < FEW_ROWS), torch.float32
    x, weight = whole(rows, inputs, kind=kind), whole(outputs * (1 + gated), inputs, kind=kind)
    wanted = x.double() @ weight.double().T
    if gated:
        opened, up = wanted.chunk(2, 1)
        wanted = F.silu(opened) * up
        found = multiply_ordered(x, weight, gated=True, tile=tile, parts=parts)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
        return
    bias, residual = whole(outputs, kind=kind), whole(rows, outputs, kind=kind)
    assert torch.equal(multiply_ordered(x, weight, bias, tile=tile, parts=parts).double(), wanted + bias)
    into = residual.clone()
    assert multiply_ordered(x, weight, into=into, tile=tile, parts=parts) is into
    assert torch.equal(into.double(), wanted + residual)


def test_the_split_of_inputs_depends_on_the_matrix_alone() -> None:
    assert [parts_of(*size) for size in SIZES] == [1, 4, 8, 2, 1, 4]
    assert all(inputs // parts_of(outputs, inputs) >= MIN_PART_INPUTS or parts_of(outputs, inputs) == 1
               for outputs, inputs in SIZES)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_few_rows_have_the_sums_of_batch_invariant_products(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates of tall matrices, too; every matrix counts as tall here."""
    monkeypatch.setattr(ordered, "SHORT_GATED_TILES", 0)
    torch.manual_seed(5)
    x, weight, hidden = (torch.randn(size).to(DEVICE, kind) for size in ((3, 608), (64, 608), (3, 64)))
    usual, invariant, norm = RowProduct(weight), InvariantRowProduct(weight), (x[0], 1e-5)
    assert torch.equal(usual(x), invariant(x))
    assert torch.equal(usual.gated(x, norm), invariant.gated(x, norm))
    assert torch.equal(usual.wide(x, norm), invariant.wide(x, norm))
    one, other = hidden.clone(), hidden.clone()
    usual.add_to(one, x)
    invariant.add_to(other, x)
    assert torch.equal(one, other)


def test_many_rows_are_the_librarys() -> None:
    """And those of four bytes a number, and of odd widths."""
    rows, tall = torch.zeros(FEW_ROWS + 1, 32, dtype=torch.bfloat16), TALL_OUTPUT_TILES * MIN_TILE_OUTPUTS
    assert is_faster(rows[:ALWAYS_FASTER_ROWS], MIN_TILE_OUTPUTS, False)
    assert not is_faster(rows[: ALWAYS_FASTER_ROWS + 1], MIN_TILE_OUTPUTS, False)
    assert is_faster(rows[:FEW_ROWS], tall, False)
    assert not is_faster(rows[:FEW_ROWS], tall, True), "half of them are gates"
    assert not is_faster(rows, 2 * tall, True)
    assert [
        is_faster(rows[:2], tiles * 2 * MIN_TILE_OUTPUTS, True)
        for tiles in (SHORT_GATED_TILES - 1, SHORT_GATED_TILES)
    ] == [False, True]
    assert not is_faster(rows[:2].float(), tall, False)
    assert not is_faster(rows[:2, :24], tall, False)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_row_is_the_same_bits_alone_and_among_others(
    outputs: int, inputs: int, kind: torch.dtype, gated: bool
) -> None:
    """Wherever it lies among them."""
    torch.manual_seed(3)
    x = torch.randn(max(ROWS), inputs, device=DEVICE).to(kind)
    weight = torch.randn(outputs, inputs, device=DEVICE).div(9).to(kind)
    assert len({tile_for(rows, kind.itemsize, gated) for rows in ROWS}) > 2
    found = multiply_ordered(x, weight, gated=gated)
    wanted = x.double() @ weight.double().T
    if gated:
        opened, up = wanted.chunk(2, 1)
        wanted = F.silu(opened) * up
    assert (found - wanted).norm() < 1e-2 * wanted.norm()
    for rows in ROWS:
        for first in {0, max(ROWS) - rows, min(7, max(ROWS) - rows)}:
            some = slice(first, first + rows)
            assert torch.equal(multiply_ordered(x[some], weight, gated=gated), found[some]), (rows, first)
