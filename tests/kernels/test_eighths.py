"""Rows as 8-bit floats, and back with each row's scale, against the same in plain torch."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
from specsot_kernels.gpu.rows import Turning, lengthen_rows, shorten_gated, shorten_rows, turn_and_store  # noqa: E402


@pytest.fixture
def rows() -> torch.Tensor:
    """Five, of very different sizes; one is nothing but zeros."""
    sizes = torch.tensor([1e-3, 1.0, 0.0, 300.0, 3e4])
    seeded = torch.Generator().manual_seed(3)
    return (torch.randn(5, 1030, generator=seeded) * sizes[:, None] / 4).to(DEVICE, torch.float16)


def test_each_row_keeps_four_bits_of_every_number(rows: torch.Tensor) -> None:
    cut = rows[:, 3:1027]
    short, scales = shorten_rows(cut)
    back = short.float() * scales[:, None]
    assert short.dtype == torch.float8_e4m3fn
    assert bool((back[2] == 0).all())
    step = cut.float().abs() / 15 + scales[:, None] / 512
    near = (back - cut.float()).abs() <= step
    if DEVICE == "cpu":  # Triton's interpreter forgets the carry where rounding reaches the next power of two
        near |= (cut.float() / scales[:, None]).to(short.dtype).float().abs().log2().frac() == 0
    assert bool(near.all())


@pytest.mark.parametrize("gated", [False, True])
def test_rows_get_their_sizes_back(rows: torch.Tensor, gated: bool) -> None:
    scales = torch.tensor([0.5, 2.0, 3.0, 0.25, 0.125], device=DEVICE)
    columns = torch.linspace(0.5, 1.5, 1030, device=DEVICE)
    wanted = rows.double() * scales[:, None].double() * columns.double()
    if gated:
        first, second = wanted.chunk(2, 1)
        wanted = F.silu(first) * second
    wanted = wanted.clamp(-6e4, 6e4)
    residual = torch.ones_like(wanted, dtype=torch.float16)
    added = lengthen_rows(rows.clone(), scales, columns, gated, residual)
    assert added is residual
    found = lengthen_rows(rows.clone(), scales, columns, gated)
    for one, other in ((found, wanted), (added, wanted + 1)):
        torch.testing.assert_close(one.double().clamp(-6e4, 6e4), other, atol=1e-2, rtol=4e-3)


def test_the_gate_is_rounded_as_if_it_were_written_down_first(rows: torch.Tensor) -> None:
    rows = rows[:4] / 100
    scales, columns = torch.tensor([0.5, 2.0, 3.0, 0.25], device=DEVICE), torch.ones(1030, device=DEVICE)
    wanted, wanted_scales = shorten_rows(lengthen_rows(rows.clone(), scales, columns, gated=True))
    found, found_scales = shorten_gated(rows, scales, columns)
    torch.testing.assert_close(found_scales, wanted_scales)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.13, atol=0.1)


def test_rows_are_rounded_as_if_the_product_were_added_before(rows: torch.Tensor) -> None:
    scales, columns = torch.tensor([0.5, 2.0, 3.0, 0.25, 1.0]), torch.linspace(0.5, 1.5, 1030)
    product = rows.roll(7, 1), scales.to(DEVICE), columns.to(DEVICE)
    norm, hidden = (columns.to(DEVICE, torch.float16), 1e-5), rows / 4
    wanted = hidden.clone()
    lengthen_rows(product[0].clone(), *product[1:], into=wanted)
    added = hidden.clone()
    found = shorten_rows(added, norm, product)
    assert torch.equal(added, wanted)
    for one, other in zip(found, shorten_rows(wanted, norm)):
        assert torch.equal(one.float(), other.float())


def test_heads_are_scaled_as_they_turn() -> None:
    heads, kv_heads, dim = 2, 1, 16
    seeded = torch.Generator().manual_seed(1)
    qkv = torch.randn(3, heads + 2 * kv_heads, dim, generator=seeded).to(DEVICE, torch.bfloat16)
    scales = torch.tensor([0.5, 2.0, 3.0], device=DEVICE), torch.linspace(0.5, 1.5, qkv[0].numel()).to(DEVICE)
    turning = Turning(heads, kv_heads, torch.linspace(1, 0.1, dim // 2).to(DEVICE), 0.25)
    at, layers = torch.arange(3, device=DEVICE), torch.zeros(2, 2, 1, kv_heads, 4, dim).to(qkv)
    whole = lengthen_rows(qkv.clone().flatten(1), *scales).view_as(qkv)
    turn_and_store(whole, at, at, layers[0], turning)
    turn_and_store(qkv, at, at, layers[1], turning, scales)
    assert torch.equal(qkv[:, :heads], whole[:, :heads])
    assert torch.equal(layers[1], layers[0])
