"""8-bit whole numbers on GPUs: exact sums, rows that are the same in any company, layers and graphs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from specsot.core.tree import ancestry
from specsot.members import Range
from specsot_model import int8, layer_inputs, linear, weights
from specsot_model.attention import RowSpan
from specsot_model.cuda_graphs import CapturedSteps, GraphCapture, StepRows
from specsot_model.decoder import Decoder
from specsot_model.fused import FusedBlock
from specsot_model.int8 import Int8
from specsot_model.linear import Packed
from tests.conftest import is_full, some
from tests.model.test_steps import DEVICE, KIND, PAGE, Fused, again
from tests.model.tiny import write_model

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot_kernels.gpu.whole import WholeTile, multiply_gated_whole, multiply_whole, round_rows

TILES = (None, WholeTile(32, 16, 1, 4, 2), WholeTile(64, 32, 4, 4, 2), WholeTile(16, 64, 2, 4, 2))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "runs_kernels", lambda device: True)
    for module in (linear, layer_inputs, weights):
        monkeypatch.setattr(module, "uses_packed_kernels", lambda kind, device: False)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def none(many: int) -> torch.Tensor:
    return torch.zeros(many, dtype=torch.int32, device=DEVICE)


def as_floats(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rounded rows as float64."""
    whole = F.pad(codes, (0, -codes.shape[1] % 64)).view(len(codes), -1, 64).double()
    return (whole * scales.t().double()[..., None]).flatten(1)[:, : codes.shape[1]]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("inputs", [4096, 14336, 1040])
def test_sums_of_extreme_codes_are_whole_numbers_sums(inputs: int, tile: WholeTile | None) -> None:
    """The largest there are, over as many inputs as an 8B model has, and over a last group that is not full:
    with scales of one a result is the sum itself, as 64-bit whole numbers add up.
    """
    drawn = torch.Generator().manual_seed(inputs)
    codes, weight = (
        torch.randint(0, 2, (many, inputs), generator=drawn).mul_(254).sub_(127) for many in (5, 48)
    )
    codes[0], codes[1], weight[0] = 127, -127, 127
    ones = [torch.ones(shape, device=DEVICE) for shape in ((-(-inputs // 64), 5), (48,))]
    short, held = (each.to(DEVICE, torch.int8) for each in (codes, weight))
    found = multiply_whole(short, ones[0], held, ones[1], none(8), tile=tile)
    wanted = codes @ weight.t()
    # fp32 holds sums below 2 ** 24 as they are, and a larger one to its 24th bit, group by group.
    assert (found.cpu().long() - wanted).abs().max() <= (0 if inputs == 1040 else 64)
    assert found[0, 0] == inputs * 127 * 127


def test_rows_are_rounded_as_on_a_cpu() -> None:
    x, gains = normal(5, 200, seed=0), normal(200, seed=1)
    x[2] *= 1e6
    x[3] = 0
    normed = F.rms_norm(x, (200,), gains, 1e-5)
    for norm, rows in ((None, x), ((gains, 1e-5), normed)):
        codes, scales = round_rows(x, norm)
        groups = F.pad(rows, (0, 56)).view(5, 4, 64)
        peaks = groups.abs().amax(-1)
        torch.testing.assert_close(scales.t(), peaks / 127)
        wanted = (groups * (127 / peaks.clamp_min(1e-30))[..., None]).round().flatten(1)[:, :200]
        assert (codes - wanted).abs().max() <= (1 if norm else 0)
    x[1, 70], x[4, 199] = torch.inf, torch.nan
    unreal = ~round_rows(x)[1].t().isfinite()
    assert unreal.nonzero().tolist() == [[1, 1], [4, 3]]


@pytest.mark.parametrize("inputs", some([512, 1024], 0))
def test_a_row_is_the_same_bits_in_any_company(inputs: int) -> None:
    """Of products, sums onto a residual stream, and gated ones, whatever the tile."""
    x, gains = normal(130, inputs, seed=0), normal(inputs, seed=1)
    held, twice = Int8(normal(80, inputs, seed=2), normal(80, seed=3)), Int8(normal(96, inputs, seed=4))

    def all_of(rows: torch.Tensor) -> list[torch.Tensor]:
        short, stream = twice.gated(rows, (gains, 1e-5)), normal(130, 80, seed=5)[-len(rows) :].clone()
        held.add_to(stream, rows)
        return [held.wide(rows, (gains, 1e-5)), held(rows), stream, short.short, short.scales.t()]

    whole = all_of(x)
    for rows in (1, 7, 16, 17, 64, 65, 128) if is_full() else (1, 17, 65):  # in each tile, not full
        for found, among in zip(all_of(x[-rows:].clone()), whole):
            assert torch.equal(found, among[-rows:]), rows
    assert not held._counts.any(), "the next product counts from zero"
    codes, scales = round_rows(x)
    plain = multiply_whole(codes, scales, held._int8_weight, held._scales, held._counts)
    gated = multiply_gated_whole(codes, scales, twice._int8_weight, twice._scales)
    for tile in TILES[1:]:
        assert torch.equal(
            multiply_whole(codes, scales, held._int8_weight, held._scales, held._counts, tile=tile), plain
        )
        if tile and tile.outputs == 64:
            found = multiply_gated_whole(codes, scales, twice._int8_weight, twice._scales, tile)
            assert all(map(torch.equal, found, gated))


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
def test_products_are_those_of_a_cpu() -> None:
    """The same codes and scales; groups are added up in another order at most."""
    weight, bias, x = normal(96, 320, seed=0), normal(96, seed=1), normal(9, 320, seed=2)
    on_cpu = Packed(weight.cpu(), bias.cpu(), "int8")
    torch.testing.assert_close(Int8(weight, bias)(x).cpu(), on_cpu(x.cpu()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_products_are_those_of_rounded_rows_and_weights(rows: int) -> None:
    sizes = 10 ** torch.linspace(-3, 1, 160, device=DEVICE)
    weight, hidden, gains = (
        normal(160, 64, seed=0) * sizes[:, None],
        normal(rows, 64, seed=1),
        normal(64, seed=2),
    )
    held = Int8(weight)
    short = as_floats(held._int8_weight, held._scales.expand(1, -1))
    assert ((short - weight.double()).abs() <= weight.abs().amax(1, keepdim=True) / 253).all()
    product = as_floats(*round_rows(hidden, (gains, 1e-5))) @ short.t()
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(held.heads(hidden, (gains, 1e-5)).double(), product, **near)
    floats = torch.zeros_like(hidden)
    assert torch.equal(held.heads(hidden, (gains, 1e-5), floats), held.heads(hidden, (gains, 1e-5)))
    first, second = product.chunk(2, 1)
    inner = held.gated(hidden, (gains, 1e-5))
    wanted = F.silu(first) * second
    assert (as_floats(*inner) - wanted).norm() < 0.01 * wanted.norm()
    down, added = Int8(normal(64, 80, seed=3)), hidden.clone()
    down.add_to(added, inner)
    held_down = as_floats(down._int8_weight, down._scales.expand(2, -1))
    torch.testing.assert_close(added.double(), as_floats(*inner) @ held_down.t() + hidden.double(), **near)


def test_steps_of_a_base_in_whole_numbers(tmp_path: Path) -> None:
    """A frame of three rows in a graph of four: near the plain one, and each row as it is alone."""
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 96,
    }
    write_model(tmp_path, "qwen3", **sizes)
    plain = Fused.load(tmp_path, Range(0, 1), KIND, DEVICE)
    short = Fused.load(tmp_path, Range(0, 1), KIND, DEVICE, quantization="int8")
    assert short.capturable
    outputs = list[torch.Tensor]()
    for decoder in (plain, short):
        assert all(isinstance(each, FusedBlock) for each in decoder._fused_blocks or ())
        steps = CapturedSteps(
            decoder, decoder.make_kv(4, PAGE), {}, GraphCapture() if DEVICE == "cuda" else again, (4,)
        )
        spans = [RowSpan(3, 0, 3, (3,), ancestry((0, 0, 1)))]
        found = steps.run(StepRows([7, 8, 9], (0, 1, 2), (24, 25, 26), spans))
        assert found is not None
        outputs.append(decoder.logits(found[0]))
    assert 0 < (outputs[1] - outputs[0]).norm() < 0.05 * outputs[0].norm()
    assert outputs[1].dtype == torch.float32
    hidden = short.embed(torch.tensor([7, 8, 9], device=DEVICE))
    alone = torch.cat([short.logits(row[None]) for row in hidden])
    assert torch.equal(short.logits(hidden), alone)


def test_sizes_that_no_kernel_reads_are_multiplied_all_the_same() -> None:
    weight, bias, x = normal(24, 40, seed=0), normal(24, seed=1), normal(3, 40, seed=2)
    held = Int8(weight, bias)
    assert not held.capturable
    wanted = F.linear(x, weight, bias)
    assert 0 < (held(x) - wanted).norm() < 0.01 * wanted.norm()


def test_a_decoder_that_is_not_fused_multiplies_so_too(tmp_path: Path) -> None:
    write_model(tmp_path, "gpt_neox", num_hidden_layers=1)
    plain, short = (
        Decoder.load(tmp_path, Range(0, 1), torch.float32, DEVICE, quantization=kind)
        for kind in (None, "int8")
    )
    rows = normal(3, plain.config.hidden, seed=0)
    assert 0 < (short.logits(rows) - plain.logits(rows)).norm() < 0.02 * plain.logits(rows).norm()
