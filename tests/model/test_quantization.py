"""Weights held in 8 and 4 bits: how far off, how many bytes, what is refused, and that a model takes them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from specsot.errors import InvalidRequest, ModelError
from specsot.members import Quantization, Range
from specsot.model import linear
from specsot.model.attention import RowSpan
from specsot.model.decoder import Decoder
from specsot.model.linear import Linear, check_quantization, quantise, size_of
from tests.model.tiny import Ring
from tests.models import Shape, write_base

if find_spec("torchao") is None:
    pytest.skip("needs torchao", allow_module_level=True)
pytestmark = pytest.mark.torch

OFF: dict[Quantization, float] = {
    "int8": 0.012,
    "int4": 0.12,
    "fp8": 0.045,
}  # of normal weights, relative to their norm
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUMBERS = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("kind", list(OFF))
def test_the_product_is_near_the_plain_one(kind: Quantization, dtype: torch.dtype, device: str) -> None:
    weight, bias = normal(48, 96).to(device, dtype), normal(48, seed=1).to(device, dtype)
    linear = Linear(weight, bias, kind)
    assert linear.weight is None
    assert linear.shape == (48, 96)
    for rows in (0, 1, 3, 65):
        x = normal(rows, 100, seed=rows).to(device, dtype)[:, 2:98]
        found, plain = linear(x), F.linear(x, weight, bias)
        assert (found.shape, found.dtype) == (plain.shape, dtype)
        assert (found - plain).norm() <= OFF[kind] * plain.norm() + 0.01
    assert not torch.equal(found, plain), "it must really have fewer bits"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_every_weight_is_off_by_half_a_step_at_most(kind: Quantization) -> None:
    weight = normal(40, 64)
    found = quantise(weight, kind)(torch.eye(64)).t()
    groups = weight.view(40, -1, 32)
    steps = {"int8": weight.abs().amax(1, True) / 127, "int4": (groups.amax(-1) - groups.amin(-1)) / 15}
    allowed = steps[kind].repeat_interleave(64 // steps[kind].shape[1], 1)
    # int4 also rounds what a group begins at.
    assert ((found - weight).abs() <= allowed * (1.02 if kind == "int4" else 0.51)).all()


def held_bytes(held: object) -> int:
    """Of what a product keeps of a weight; a scale of one is a constant."""
    kept = [getattr(held, name) for name in held.__slots__ if name != "_one"]  # type: ignore[attr-defined]
    return sum(tensor.nbytes for tensor in kept)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_in_parts_it_is_the_same(kind: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = normal(70, 64), normal(5, 64, seed=1)
    whole = quantise(weight, kind)
    monkeypatch.setitem(linear.FLOATS_AT_A_TIME, "cpu", 64 * 32)
    parts = quantise(weight, kind)
    assert isinstance(parts, linear.PartedWeight)
    assert sum(map(held_bytes, parts._parts)) == held_bytes(whole)
    torch.testing.assert_close(parts(x), whole(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_what_is_counted_is_what_is_held(dtype: torch.dtype) -> None:
    weight = normal(48, 96).to(dtype)
    plain = size_of((48, 96), dtype.itemsize, None)
    assert plain == weight.nbytes
    eight, four, floats = (held_bytes(quantise(weight, kind)) for kind in ("int8", "int4", "fp8"))
    assert eight == size_of((48, 96), dtype.itemsize, "int8") == 48 * 96 + 48 * dtype.itemsize
    assert four == size_of((48, 96), dtype.itemsize, "int4") == 48 * 96 * 5 // 8
    assert floats == size_of((48, 96), dtype.itemsize, "fp8") == 48 * 96 + 4


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_quantization(None)
    check_quantization("int4")
    with pytest.raises(InvalidRequest, match="quantization must be one of int8, int4, fp8, got 'int3'"):
        check_quantization("int3")
    with pytest.raises(ModelError, match="int4 weights need a number of inputs that 32 divides, got 56"):
        quantise(normal(8, 56), "int4")
    monkeypatch.setattr(linear, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"int8 weights need torchao: pip install 'specsot\[quant\]'"):
        check_quantization("int8")


def test_a_model_in_fewer_bits_is_itself_over_any_ranges(tmp_path: Path, device: str) -> None:
    """Its logits are near the plain ones, the nearer the more bits; cut in two it writes the same."""
    base = write_base(tmp_path, replace(Shape(), layers=3))
    prompt, count = [3, 1, 4, 1, 5, 9, 2, 6], 24

    def ring(cuts: tuple[tuple[int, int], ...], kind: Quantization | None) -> Ring:
        make = [Decoder.load(base, Range(*cut), torch.float32, device, quantization=kind) for cut in cuts]
        return Ring.of(make)

    plain = ring(((0, 3),), None).feed(prompt, 0)[0]
    off = {}
    for kind in OFF:
        whole = ring(((0, 3),), kind)
        assert not whole.decoders[0].capturable
        off[kind] = float((whole.feed(prompt, 0)[0] - plain).norm() / plain.norm())
        text = whole.greedy(prompt, count)
        assert ring(((0, 1), (1, 3)), kind).greedy(prompt, count) == text
    assert 0 < off["int8"] < 0.05 < off["int4"] < 0.6


def test_a_model_with_rows_in_int8_is_near_itself(tmp_path: Path, device: str) -> None:
    base = write_base(tmp_path, replace(Shape(), layers=3))
    prompt = list(range(30))
    plain, rounded = (
        Decoder.load(base, Range(0, 3), torch.float32, device, kv_dtype=kept) for kept in ("auto", "int8")
    )
    assert not rounded.capturable
    wanted, found = (Ring.of([decoder]).feed(prompt, 0)[0] for decoder in (plain, rounded))
    assert 0 < (found - wanted).norm() < 0.03 * wanted.norm()


def test_no_kernel_is_planned_for_rows_in_int8(tmp_path: Path) -> None:
    """A GPU's read pages in the dtype alone; what is planned for one row names no device."""
    base = write_base(tmp_path, replace(Shape(), layers=1))
    decoder = Decoder.load(base, Range(0, 1), torch.float32, "cpu", kv_dtype="int8")
    decoder.device = torch.device("cuda")
    assert decoder.plan([RowSpan(1, 4, 1, (0,))], 8, "packed").kernel is None
