"""Weights held in 8 and 4 bits: how far off, how many bytes, what is refused, and that a model takes them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specsot.checkpoint import config
from specsot.errors import InvalidRequest, ModelError
from specsot.members import Quantization, Range
from specsot_model import linear
from specsot_model.decoder import Decoder
from specsot_model.linear import Linear, check_quantization, quantize, stored_bytes
from tests.model.tiny import Ring
from tests.models import Shape, write_base

if find_spec("numba") is None:
    pytest.skip("needs numba", allow_module_level=True)
OFF: dict[Quantization, float] = {
    "int8": 0.017,  # activations included
    "int4": 0.12,
    "fp8": 0.06,  # activations on a GPU included
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


def test_what_gpus_hold_in_4_bits_is_near_the_weights() -> None:
    """Made and multiplied where there is no GPU, too."""
    pytest.importorskip("torchao")
    weight = normal(48, 96)
    assert 0 < (linear.Int4(weight)(torch.eye(96)).t() - weight).norm() <= OFF["int4"] * weight.norm()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_every_weight_is_off_by_half_a_step_at_most(kind: Quantization) -> None:
    weight = normal(40, 64)
    found = quantize(weight, kind)(torch.eye(64)).t()
    groups = weight.view(40, -1, 32)
    steps = {"int8": weight.abs().amax(1, True) / 127, "int4": (groups.amax(-1) - groups.amin(-1)) / 15}
    allowed = steps[kind].repeat_interleave(64 // steps[kind].shape[1], 1)
    # int4 also rounds what a group begins at.
    assert ((found - weight).abs() <= allowed * (1.02 if kind == "int4" else 0.51)).all()


def rounded_rows(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers and scales of groups, [rows, groups, size] and [rows, groups, 1]; zeros fill the last."""
    groups = F.pad(x, (0, -x.shape[1] % size)).view(len(x), -1, size)
    peak = groups.abs().amax(-1, keepdim=True)
    return (groups * (127 / peak)).round(), peak / 127


def test_sums_of_extreme_numbers_are_exact() -> None:
    """Also over inputs as many as a 7B model has; sums of 16-bit pairs would saturate. Of 20 rows 16
    go another way where there is AMX.
    """
    size = 11008
    signs = torch.where(normal(48, size) < 0, -1.0, 1.0)
    x = torch.stack((torch.ones(size), -torch.ones(size), signs[0], normal(size)))
    whole, scales = rounded_rows(x, 64)
    sums = torch.einsum("rgk,ogk->rgo", whole.long(), (signs * 127).long().view(48, -1, 64))
    wanted = (sums.double() * scales.double()).sum(1) / 127
    held = quantize(signs, "int8")
    found = held(x)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
    assert found[2, 0] == size
    assert torch.equal(held(x.repeat(5, 1)), found.repeat(5, 1))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_row_is_the_same_bits_in_any_company(kind: Quantization) -> None:
    held, x = quantize(normal(176, 160), kind), normal(64, 160, seed=1)
    alone = torch.cat([held(row[None]) for row in x])
    for rows in (2, 3, 6, 7, 8, 9, 16, 17, 22, 23, 31, 64):
        assert torch.equal(held(x[-rows:].clone()), alone[-rows:]), rows


@pytest.mark.parametrize(("features", "answer"), [(set(), 0), ({"amx-tile", "amx-int8"}, -1)])
def test_without_amx_or_leave_to_use_it_it_is_not_used(
    features: set[str], answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specsot_kernels.cpu import layout

    system = SimpleNamespace(syscall=lambda *asked: answer)
    monkeypatch.setattr(layout, "INSTRUCTIONS", "avx512vnni")
    monkeypatch.setattr(layout, "_features", lambda: frozenset(features))
    monkeypatch.setattr(layout.ctypes, "CDLL", lambda name: system)
    assert not layout._has_amx()


def test_blocks_of_a_gguf_file_are_kept_as_they_are() -> None:
    """Q4_1: what 16 steps from a least value on can say in fp16."""
    least, step = normal(32, 4).half().float(), normal(32, 4, seed=1).abs().half().float()
    codes = torch.stack([torch.arange(32) % 16] * 4).expand(32, 4, 32)
    weight = (codes * step[..., None] + least[..., None]).view(32, 128)
    found = quantize(weight, "int4")(torch.eye(128)).t()
    torch.testing.assert_close(found, weight, rtol=1e-6, atol=1e-6)


def test_what_is_not_finite_stays_so() -> None:
    x = normal(3, 64)
    x[1, 5] = torch.inf
    for kind in ("int8", "int4"):
        found = quantize(normal(32, 64), kind)(x)
        assert not found[1].isfinite().any()
        assert found[[0, 2]].isfinite().all()


def held_bytes(held: Any) -> int:
    """Of what a product keeps of a weight; a scale of one is a constant."""
    if isinstance(held, linear.Packed):
        return held.weight.nbytes
    return sum(getattr(held, name).nbytes for name in held.__slots__ if name not in ("_unit_scale", "bias"))


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_what_is_counted_is_what_is_held(dtype: torch.dtype) -> None:
    weight = normal(48, 96).to(dtype)
    plain = stored_bytes((48, 96), dtype.itemsize, None)
    assert plain == weight.nbytes
    eight, four, floats = (held_bytes(quantize(weight, kind)) for kind in ("int8", "int4", "fp8"))
    assert eight == stored_bytes((48, 96), dtype.itemsize, "int8") == 48 * (128 + 8)
    assert four == stored_bytes((48, 96), dtype.itemsize, "int4") == 48 * (96 * 5 // 8 + 4)
    assert floats == stored_bytes((48, 96), dtype.itemsize, "fp8") == 48 * (96 + 4)


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_quantization(None)
    check_quantization("int4")
    with pytest.raises(InvalidRequest, match="quantization must be one of int8, int4, fp8, got 'int3'"):
        check_quantization("int3")
    with pytest.raises(ModelError, match="int4 weights need a number of inputs that 32 divides, got 56"):
        quantize(normal(8, 56), "int4")
    monkeypatch.setattr(config, "find_spec", {}.get)
    for kind, device, library, extra in (
        ("int8", "cpu", "numba", "model"),
        ("int4", "cuda:0", "torchao", "quant"),
    ):
        with pytest.raises(
            ModelError, match=rf"{kind} weights need {library}: pip install 'specsot\[{extra}\]'"
        ):
            check_quantization(kind, device)
    check_quantization("int8", "cuda:0")


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
        assert whole.decoders[0].capturable == (kind in ("int8", "fp8") and device == "cuda")
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
    assert rounded.capturable == (device == "cuda")
    wanted, found = (Ring.of([decoder]).feed(prompt, 0)[0] for decoder in (plain, rounded))
    assert 0 < (found - wanted).norm() < 0.03 * wanted.norm()
