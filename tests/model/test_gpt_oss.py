"""gpt-oss as it is published: experts in MXFP4 are what Transformers makes of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specsot.checkpoint.config import read_config
from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot_model.decoder import Decoder
from specsot_model.loaded_parts import open_shapes
from specsot_model.memory_fit import WeightForm, bytes_read_per_token, weights_of
from specsot_model.published import open_weights
from tests.model.tiny import Ring, load, write_model

PROMPT = [7, 99, 3, 50, 21, 21, 64, 8, 15, 30, 77, 41, 5, 90, 13, 2, 66, 38, 4, 19]
STACKED = ("gate_up_proj", "down_proj")


def write_mxfp4(directory: Path) -> torch.nn.Module:
    """A model whose experts are in blocks and scales; Transformers' model of what it reads from them."""
    model = write_model(directory, "gpt_oss", hidden_size=64, intermediate_size=32)
    file, draw = directory / "model.safetensors", torch.Generator().manual_seed(5)
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(STACKED)]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=draw, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, file)
    source = directory / "config.json"
    values = {**json.loads(source.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    source.write_text(json.dumps(values))
    return model


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    model, files = write_mxfp4(tmp_path), open_weights(tmp_path)
    for name in STACKED:
        name = f"model.layers.1.mlp.experts.{name}"
        wanted = model.get_parameter(name).data
        assert name in files
        assert files.shape(name) == tuple(wanted.shape)
        assert torch.equal(files.tensor(name, torch.float32, "cpu"), wanted)
    told, _ = Ring.of(load(tmp_path, (1, 3))).feed(PROMPT, 0)
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(told, wanted, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["glm4_moe", "minimax_m2", "gpt_oss"])
def test_cuda_gives_what_the_cpu_gives(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    here, _ = Ring.of(load(tmp_path, (1, 3))).feed(PROMPT, 0)
    there, _ = Ring.of(load(tmp_path, (1, 3), "cuda")).feed(PROMPT, 0)
    torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=0)


def test_a_plan_counts_experts_as_they_are_held_and_what_a_row_reads_of_them(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    config, layers, held = read_config(tmp_path), Range(1, 2), WeightForm(2)
    assert config.published is not None
    assert str(config.published) == "mxfp4 fp4 in groups of 32"
    files = open_shapes(tmp_path, config)
    whole, experts = weights_of(files, config, layers, held), 5 * (64 * 64 + 64 + 32 * 64 + 64) * 2
    attention = 2 * (64 * (4 + 2 + 2 + 4) * 8 + 64 + 8 * 8 + 4)
    assert whole == experts + attention + 2 * (5 * 64 + 5) + 2 * 2 * 64
    assert bytes_read_per_token(files, config, layers, held) == whole - experts * 2 / 5


def test_what_stays_exact_and_what_is_rounded_is_counted_so(tmp_path: Path) -> None:
    """GLM's router is fp32 in any dtype; of gpt-oss each expert is a matrix in few bits, no router is."""
    shape = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    write_model(tmp_path / "glm", "glm4_moe", **shape)
    files, config = (
        open_shapes(tmp_path / "glm", read_config(tmp_path / "glm")),
        read_config(tmp_path / "glm"),
    )
    numbers = sum(math.prod(files.shape(name)) for name in files.under("model.layers.1"))
    assert weights_of(files, config, Range(1, 2), WeightForm(2)) == 2 * numbers + 2 * (6 * 64 + 6)
    write_model(tmp_path / "oss", "gpt_oss", **shape)
    files, config = (
        open_shapes(tmp_path / "oss", read_config(tmp_path / "oss")),
        read_config(tmp_path / "oss"),
    )
    floats, eights = (weights_of(files, config, Range(1, 2), WeightForm(2, kind)) for kind in (None, "fp8"))
    shapes = [(64, 64), (64, 32)] * 5 + [(64, 64), (32, 64), (32, 64), (64, 64)]
    assert floats - eights == sum(outputs * inputs - 4 * outputs for outputs, inputs in shapes)


def test_they_are_not_rounded_a_second_time(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    with pytest.raises(InvalidRequest, match="quantized already"):
        Decoder.load(tmp_path, Range(0, 1), torch.float32, "cpu", quantization="int8")


def test_a_model_in_floats_can_be_held_in_few_bits(tmp_path: Path) -> None:
    write_model(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=32)
    exact, _ = Ring.of(load(tmp_path)).feed(PROMPT, 0)
    rough, _ = Ring.of([Decoder.load(tmp_path, Range(0, 3), torch.float32, "cpu", quantization="int8")]).feed(
        PROMPT, 0
    )
    assert 0.97 < torch.nn.functional.cosine_similarity(rough, exact, dim=-1).median() < 1
