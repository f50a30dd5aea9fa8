"""8-bit floats in fused layers and graphs: products of one row and of many, and whole steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from specsot.core.tree import ancestry
from specsot.members import Range
from specsot_model import fp8, linear
from specsot_model.attention import RowSpan, plan_with_kernel
from specsot_model.cuda_graphs import CapturedSteps, GraphCapture, StepRows
from specsot_model.decoding import Codes
from specsot_model.fp8 import Fp8
from specsot_model.fused import FusedBlock, can_capture, head_turns_of
from specsot_model.linear import InvariantRowProduct, RowProduct, describe_rounding, quantize
from tests.model.test_steps import DEVICE, KIND, PAGE, Fused, again
from tests.model.tiny import write_model

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot_kernels.gpu.attention import plan_attention

# Triton's interpreter cuts where a GPU rounds to 8 bits.
OFF = 4e-3 if DEVICE == "cuda" else 0.12
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda" and not fp8.multiplies_fp8(torch.device(DEVICE)):
        pytest.skip("this GPU has no products of 8-bit floats")
    for room in (fp8, linear):
        monkeypatch.setattr(room, "multiplies_fp8", lambda device: True)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """As near as 8-bit floats with a scale a row come."""
    scales = x.abs().amax(1, keepdim=True).double() / 448
    return (x.double() / scales).to(fp8.FP8_DTYPE).double() * scales


def behind_norm(x: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gains.double()


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", [1, 3])
def test_products_are_those_of_rounded_rows_and_weights(rows: int) -> None:
    """Outputs and rows of very different sizes: each has a scale of its own."""
    sizes = 10 ** torch.linspace(-3, 1, 96, device=DEVICE, dtype=torch.bfloat16)
    weight, bias = normal(96, 64, seed=0) * sizes[:, None], normal(96, seed=1)
    hidden, gains = normal(rows, 64, seed=2), normal(64, seed=3)
    hidden[-1] *= 100
    held, short = Fp8(weight), rounded(weight).t()
    assert held.capturable
    norm = rounded(behind_norm(hidden, gains))
    assert off(held.normed(hidden, (gains, 1e-5)), norm @ short) < OFF
    biased = Fp8(weight, bias).normed(hidden, (gains, 1e-5))
    assert off(biased, norm @ short + bias.double()) < OFF
    first, second = (norm @ short).chunk(2, 1)
    inner = held.gated(hidden, (gains, 1e-5))
    wanted = F.silu(first) * second
    read = rounded(inner) if isinstance(inner, torch.Tensor) else inner.short.double() * inner.scales[:, None]
    assert off(read, wanted) < (0.04 if DEVICE == "cuda" else 0.25)
    down, added = normal(64, 48, seed=4), hidden.clone()
    Fp8(down).add_to(added, inner)
    assert off(added, read @ rounded(down).t() + hidden.double()) < OFF


def test_a_row_is_nearly_the_same_alone_and_among_others() -> None:
    """It is rounded by itself: only sums may run in another order."""
    weight, hidden, gains = normal(96, 64, seed=0), normal(5, 64, seed=1), normal(64, seed=2)
    held = Fp8(weight)
    among, alone = held.normed(hidden, (gains, 1e-5))[3:4], held.normed(hidden[3:4].clone(), (gains, 1e-5))
    assert off(alone, among.double()) < 5e-3  # bf16 has 8 bits


@pytest.mark.parametrize("rows", [1, pytest.param(3, id="more")])
@pytest.mark.parametrize("form", [RowProduct, InvariantRowProduct, Fp8])
def test_logits_that_are_apart_stay_apart(
    form: Callable[[torch.Tensor], RowProduct | Fp8], rows: int
) -> None:
    """In bf16 127.94 is 128."""
    if DEVICE == "cpu" and (form, rows) not in ((RowProduct, 1), (Fp8, 1), (Fp8, 3)):
        pytest.skip("CPUs' libraries write the dtype alone, and Triton's interpreter multiplies no bf16")
    ones = torch.ones(rows, 128, device=DEVICE, dtype=torch.bfloat16)
    weight = ones.new_ones(16, 128)
    weight[0, 5] = 0.9375
    found = form(weight).wide(ones, (ones[0], 0.0))
    assert found.dtype == torch.float32
    assert (found[:, 0] / found[:, 1]).tolist() == pytest.approx([127.94 / 128] * rows, abs=1e-4)


def test_steps_of_a_base_in_8_bit_floats(tmp_path: Path) -> None:
    """A frame of three rows in a graph of four is what the same layers do with weights that are rounded."""
    write_model(tmp_path, "qwen3", **SIZES)
    plain = Fused.load(tmp_path, Range(0, 1), KIND, DEVICE)
    short = Fused.load(tmp_path, Range(0, 1), KIND, DEVICE, quantization="fp8")
    assert short.capturable
    outputs = list[torch.Tensor]()
    for decoder in (plain, short):
        assert all(isinstance(each, FusedBlock) for each in decoder._fused_blocks or ())
        kv = decoder.make_kv(4, PAGE)
        steps = CapturedSteps(decoder, kv, {}, GraphCapture() if DEVICE == "cuda" else again, (4,))
        spans = [RowSpan(3, 0, 3, (3,), ancestry((0, 0, 1)))]
        found = steps.run(StepRows([7, 8, 9], (0, 1, 2), (24, 25, 26), spans))
        assert found is not None
        outputs.append(decoder.logits(found[0]))
        one = plan_with_kernel(plan_attention([RowSpan(1, 3, 1, (3,))], PAGE, 2, DEVICE))
        at, slot = torch.tensor([3], device=DEVICE), torch.tensor([27], device=DEVICE)
        hidden, _ = decoder.forward(decoder.embed(torch.tensor([5], device=DEVICE)), at, slot, one, kv)
        outputs.append(decoder.logits(hidden))
    for found, wanted in zip(outputs[2:], outputs[:2]):
        assert 0 < off(found, wanted.double()) < 0.15


def test_layers_hand_rounded_rows_on(tmp_path: Path) -> None:
    """The same bits as where each layer rounds its own."""
    write_model(tmp_path, "llama", **SIZES | {"num_hidden_layers": 2})
    decoder = Fused.load(tmp_path, Range(0, 2), KIND, DEVICE, quantization="fp8")
    kv, at = decoder.make_kv(1, PAGE), torch.arange(3, device=DEVICE)
    plan = plan_with_kernel(plan_attention([RowSpan(3, 0, 3, (0,), ancestry((0, 0, 1)))], PAGE, 2, DEVICE))
    found, _ = decoder.forward(decoder.embed(at), at, at, plan, kv)
    alone = decoder.embed(at)
    for layer, block in enumerate(decoder._fused_blocks or ()):
        migrated = block.forward(alone, at, at, plan, kv, layer)
        assert (migrated is None) == (layer == 1)
    assert torch.equal(found, alone)


def test_which_bases_run_in_graphs(tmp_path: Path) -> None:
    decoder = write_and_load(tmp_path)
    assert can_capture(decoder.config, kernels=True, any_quantized=True, all_in_8_bits=True)
    assert not can_capture(decoder.config, kernels=False, any_quantized=True, all_in_8_bits=True)
    assert not can_capture(
        replace(decoder.config, hidden=40), kernels=True, any_quantized=True, all_in_8_bits=True
    )
    assert head_turns_of(decoder._blocks[0]).frequencies.device.type == DEVICE


def write_and_load(folder: Path) -> Fused:
    write_model(folder, "llama", **SIZES)
    found = Fused.load(folder, Range(0, 1), KIND, DEVICE, quantization="fp8")
    assert isinstance(found, Fused)
    return found


def test_members_say_what_is_rounded() -> None:
    """A GPU that rounds activations, too, writes other texts than a CPU that does not."""
    assert (
        describe_rounding("fp8", "cuda") == "fp8 weights, a scale an output, and activations, a scale a row"
    )
    assert describe_rounding("int8", "cuda") == "int8 weights, 64 activations a scale"
    assert describe_rounding(None, "cuda") == ""


@pytest.mark.parametrize("rows", [1, 3])
def test_codes_that_were_rounded_elsewhere_run_in_the_same_kernels(rows: int) -> None:
    """Bit for bit what a weight gives that is rounded here, if the codes are the same."""
    weight, hidden, gains = normal(96, 64, seed=0), normal(rows, 64, seed=2), normal(64, seed=3)
    own, scale = Fp8(weight), Fp8(weight)._scales[:, None]
    codes = Codes(own._fp8_weight.view(torch.uint8), scale, torch.zeros_like(scale))
    held = quantize(codes, "fp8")
    assert isinstance(held, Fp8)
    assert torch.equal(held.normed(hidden, (gains, 1e-5)), own.normed(hidden, (gains, 1e-5)))
