"""Weights that others quantized: decoded bit for bit as the formats' own libraries do; logits over ranges."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from specsot.checkpoint.config import read_config
from specsot.errors import InvalidRequest, ModelError
from specsot.service.options import ModelOptions
from specsot_model.decoder import Decoder
from specsot_model.decoding import StoredMatrix, fp4_table, halves
from specsot_model.published import PublishedWeights, open_weights
from specsot_worker.loader import StageLoader
from tests.model.compressing import rename_to_fp8, scheme_of, write_compressed
from tests.model.published import HERE as KEPT
from tests.model.published.making import digest
from tests.model.tiny import GROWING, Ring, load, write_model

PROMPT = [7, 99, 3, 50, 21, 21, 64, 8, 15, 30, 77, 41, 5, 90, 13, 2, 66, 38, 4, 19]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
MOE = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SCHEMES: dict[str, Callable[[], list[Any]]] = {
    "W8A8": lambda: [scheme_of("W8A8")],
    "W8A16": lambda: [scheme_of("W8A16")],
    "W4A16": lambda: [scheme_of("W4A16")],
    "W4A16 asymmetric": lambda: [scheme_of("W4A16_ASYM", group_size=32)],
    "FP8": lambda: [scheme_of("FP8")],
    "FP8 rows": lambda: [scheme_of("FP8_DYNAMIC")],
    "FP8 blocks": lambda: [scheme_of("FP8_BLOCK", block_structure=[96, 80])],
    "MXFP4": lambda: [scheme_of("MXFP4")],
    "two kinds": lambda: [down(scheme_of("W8A16")), scheme_of("W4A16", group_size=32)],
}
SAID = {
    "awq": "awq 4 bit in groups of 32",
    "gptq": "gptq 4 bit in groups of 32",
    "gptq-v2": "gptq 8 bit in groups of 32",
    "bnb-nf4": "bitsandbytes 4 bit",
    "bnb-int8": "bitsandbytes 8 bit",
}


def down(scheme: Any) -> Any:
    scheme.targets = [r"re:.*\.down_proj$"]
    return scheme


def published(directory: Path) -> PublishedWeights:
    files = open_weights(directory)
    assert isinstance(files, PublishedWeights)
    return files


def expect_logits(directory: Path) -> None:
    """Over ranges, within 1e-4 of a plain Transformers model that has the decoded matrices."""
    files, config = published(directory), AutoConfig.from_pretrained(directory)
    del config.quantization_config
    config._experts_implementation = "eager"
    plain = directory / "plain"
    config.save_pretrained(plain)
    tensors = {name: files.tensor(name, torch.float32, "cpu").contiguous() for name in files.names()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    layers = config.num_hidden_layers
    for cuts in ((layers,), tuple(range(1, layers + 1))):
        told, _ = Ring.of(load(directory, cuts)).feed(PROMPT, 0)
        torch.testing.assert_close(told, expected, atol=1e-4, rtol=0)


def expect_decoded(directory: Path, decoded: dict[str, torch.Tensor]) -> None:
    files = published(directory)
    for name, matrix in decoded.items():
        assert files.shape(name) == matrix.shape
        assert torch.equal(files.tensor(name, matrix.dtype, "cpu"), matrix), name


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    decoded = write_compressed(tmp_path, SCHEMES[name](), **WIDE)
    assert len(decoded) == 3 * 7
    expect_decoded(tmp_path, decoded)
    expect_logits(tmp_path)


@pytest.mark.parametrize("start", ["model.language_model.", "language_model.model."])
def test_groups_that_name_modules_of_a_model_that_reads_images(start: str, tmp_path: Path) -> None:
    """One group lists its modules, as they are called in the whole model, the other one their class."""
    decoded = write_compressed(tmp_path, SCHEMES["two kinds"](), **WIDE)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    save_file({name.replace("model.", start, 1): one for name, one in tensors.items()}, file)
    said = json.loads(config.read_text())
    groups = said["quantization_config"]["config_groups"].values()
    wide, narrow = sorted(groups, key=lambda one: one["weights"]["num_bits"])
    narrow["targets"] = [f"{start}layers.{layer}.mlp.down_proj" for layer in range(3)]
    wide["targets"] = ["Linear"]
    config.write_text(json.dumps(said))
    expect_decoded(tmp_path, decoded)
    narrow["targets"] = [rf"re:{re.escape(start)}.*down_proj$"]
    config.write_text(json.dumps(said))
    expect_decoded(tmp_path, decoded)


def test_fp8_blocks_as_deepseek_and_qwen_name_them(tmp_path: Path) -> None:
    """The last block of a row or column is not whole; its scale multiplies."""
    scheme = scheme_of("FP8_BLOCK", block_structure=[96, 80])
    decoded = write_compressed(tmp_path, [scheme], **WIDE)
    rename_to_fp8(tmp_path)
    expect_decoded(tmp_path, decoded)
    expect_logits(tmp_path)
    assert str(read_config(tmp_path).published) == "fp8 in blocks of 96x80"


def test_fp8_by_tensor_in_a_model_that_reads_images(tmp_path: Path) -> None:
    """As Ministral 3 is published: one scale of a matrix, and one of activations, which is not needed."""
    model = write_model(tmp_path, "mistral3", model_type="ministral3", rope_parameters=GROWING)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    stored = load_file(file)
    for name, weight in list(stored.items()):
        if "_proj.weight" in name and "language_model" in name:
            scale = weight.abs().max() / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            stored[name.replace("weight", "activation_scale")] = torch.tensor(0.5)
            held = model.get_parameter(f"model.{name.replace('language_model.model', 'language_model')}")
            held.data = stored[name].float() * scale
    save_file(stored, file)
    said = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": said}))
    told, _ = Ring.of(load(tmp_path, (1, 3))).feed(PROMPT, 0)
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(told, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SAID)
def test_kept_checkpoints(name: str, tmp_path: Path) -> None:
    """Written by the libraries of their formats, which `made.json` names."""
    files, made = published(KEPT / name), json.loads((KEPT / name / "made.json").read_text())
    dtype = {"torch.float16": torch.float16, "torch.bfloat16": torch.bfloat16}[made["dtype"]]
    assert len(made["sha256"]) == 2 * 7
    for matrix, sha256 in made["sha256"].items():
        assert digest(files.tensor(matrix, dtype, "cpu")) == sha256, matrix
    assert str(files.published) == SAID[name]
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((KEPT / name / file).read_bytes())
    expect_logits(tmp_path)


def test_experts_in_few_bits(tmp_path: Path) -> None:
    """The router is left as it is."""
    decoded = write_compressed(tmp_path, [scheme_of("W4A16", group_size=32)], "qwen3_moe", **WIDE, **MOE)
    assert sum(".experts." in name for name in decoded) == 3 * 5 * 3
    expect_decoded(tmp_path, decoded)
    expect_logits(tmp_path)


@pytest.mark.parametrize("name", ["gptq", "compressed-tensors"])
def test_inputs_may_belong_to_groups_in_any_order(name: str, tmp_path: Path) -> None:
    """As g_idx has them: with the groups told in reverse order everything is what it was."""
    if name == "gptq":
        directory, parts, axis, group = KEPT / name, ("scales", "qzeros"), 0, "g_idx"
    else:
        write_compressed(tmp_path, [scheme_of("W4A16", group_size=32)], **WIDE)
        directory, parts, axis, group = tmp_path, ("weight_scale",), 1, "weight_g_idx"
    before, module = published(directory), "model.layers.0.mlp.down_proj"
    matrix = before.tensor(f"{module}.weight", torch.float32, "cpu")
    tensors = load_file(directory / "model.safetensors")
    for part in parts:
        tensors[f"{module}.{part}"] = tensors[f"{module}.{part}"].flip(axis)
    tensors[f"{module}.{group}"] = (matrix.shape[1] - 1 - torch.arange(matrix.shape[1]).int()) // 32
    (turned := tmp_path / "turned").mkdir()
    save_file(tensors, turned / "model.safetensors")
    (turned / "config.json").write_bytes((directory / "config.json").read_bytes())
    assert torch.equal(published(turned).tensor(f"{module}.weight", torch.float32, "cpu"), matrix)


def test_mxfp4_blocks_are_those_of_transformers() -> None:
    """Of random bytes, stored as gpt-oss stores them."""
    draw = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (1, 6, 2, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(118, 136, (1, 6, 2), generator=draw, dtype=torch.uint8)
    codes = torch.stack(halves(blocks[0].flatten(1)), -1).flatten(1)
    ours = StoredMatrix(codes, torch.exp2(scales[0].float() - 127), 32, table=fp4_table(codes.device))
    theirs = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(ours.dense(torch.float32), theirs[0].t())


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not one of awq, gptq, bitsandbytes, fp8, "),
        ({}, "quant_method None is not one of"),
        ([], "quantization_config must be an object"),
        ({**AWQ, "version": "gemv"}, "version 'gemv' is not one of gemm"),
        ({"quant_method": "awq"}, "quantization_config of awq: 'bits'"),
        ({**GPTQ, "bits": 3}, "bits 3 is not one of 4, 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not one of gptq, gptq_v2"),
        ({**GPTQ, "dynamic": {"+:a": {}}}, "modules of other bits (dynamic) are not supported"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "quantization_config of fp8: cannot unpack"),
        ({"quant_method": "compressed-tensors"}, "of compressed-tensors: 'config_groups'"),
        (COMPRESSED, "of compressed-tensors: config_groups is empty"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config is not supported"),
    ],
)
def test_an_unsupported_quantization_is_refused_in_one_line(
    config: Any, message: str, tmp_path: Path
) -> None:
    source = tmp_path / "config.json"
    said = json.loads((KEPT / "awq" / "config.json").read_text())
    source.write_text(json.dumps({**said, "quantization_config": config}))
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path)
    assert str(caught.value).startswith(f"{source}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("awq", "model.layers.1.mlp.up_proj.scales", "no tensor model.layers.1.mlp.up_proj.scales"),
        (
            "gptq",
            "model.layers.0.self_attn.o_proj.qzeros",
            "no tensor model.layers.0.self_attn.o_proj.qzeros",
        ),
        (
            "bnb-int8",
            "model.layers.1.mlp.up_proj.SCB",
            "model.layers.1.mlp.up_proj.weight is torch.int8, but",
        ),
    ],
)
def test_a_missing_scale_is_named(name: str, tensor: str, message: str, tmp_path: Path) -> None:
    tensors = load_file(KEPT / name / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((KEPT / name / "config.json").read_bytes())
    with pytest.raises(ModelError, match=message):
        load(tmp_path, (2,))


def test_tensors_that_do_not_fit_one_another_are_named(tmp_path: Path) -> None:
    tensors = load_file(KEPT / "awq" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.scales"] = tensors[f"{name}.scales"][:1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((KEPT / "awq" / "config.json").read_bytes())
    with pytest.raises(ModelError, match=f"{name}: its tensors are not awq 4 bit in groups of 32: scales"):
        load(tmp_path, (2,))


def test_a_worker_says_what_is_decoded(capsys: pytest.CaptureFixture[str]) -> None:
    options = ModelOptions(KEPT / "awq", dtype="fp32", kv_memory=1 << 20)
    StageLoader(options, "w").registration()
    said = [line for line in capsys.readouterr().out.splitlines() if "published weights" in line]
    assert "awq 4 bit in groups of 32" in said[0]
    assert "decoded to float32" in said[0]


def test_no_second_quantization() -> None:
    with pytest.raises(InvalidRequest, match=r"quantized already \(awq 4 bit .*: leave out --quantization"):
        Decoder.load(KEPT / "awq", None, torch.float32, "cpu", quantization="int8")
