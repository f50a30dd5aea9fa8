"""Writes tiny checkpoints by the compressed-tensors library, in its formats, and returns what it decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.tiny import make_model

IGNORED = ["lm_head", "re:.*mlp.gate$"]


def scheme_of(name: str, **weights: Any) -> QuantizationScheme:
    """One of the library's presets, with other arguments of its weights."""
    scheme = preset_name_to_scheme(name, ["Linear"])
    if weights:
        given = scheme.weights.model_dump() | weights
        scheme.weights = QuantizationArgs(**given)
    return scheme


def write_compressed(
    directory: Path, schemes: list[QuantizationScheme], kind: str = "qwen3", **changes: Any
) -> dict[str, Tensor]:
    """Every quantized matrix as the library decodes it."""
    model = make_model(kind, **changes).bfloat16()
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            _part_experts(module)
    groups = {f"group_{number}": scheme for number, scheme in enumerate(schemes)}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=IGNORED))
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) and scheme.weights:
            _calibrate(module, scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    directory.mkdir(exist_ok=True)
    model.config.save_pretrained(directory)
    tensors = {name: one.contiguous() for name, one in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    compressor.update_config(str(directory))
    compressor.decompress_model(model)
    return {
        f"{name}.weight": module.weight.detach()
        for name, module in model.named_modules()
        if getattr(module, "quantization_scheme", None)
    }


def _part_experts(module: Any) -> None:
    """Transformers holds experts of a layer as one, checkpoints have them apart."""
    for number, (gate_up, down) in enumerate(zip(module.gate_up_proj, module.down_proj)):
        gate, up = gate_up.chunk(2)
        expert = torch.nn.Module()
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
            linear.weight.data = weight.data
            expert.add_module(name, linear)
        module.add_module(str(number), expert)
    del module.gate_up_proj, module.down_proj


def _calibrate(module: Any, numbers: QuantizationArgs) -> None:
    """Scales by the range of each group, row or block."""
    weight = module.weight.data.float()
    parts = _parts(weight, numbers)
    found = calculate_qparams(parts.amin(-1), parts.amax(-1), numbers)
    for name, value in zip(("weight_scale", "weight_zero_point"), found):
        if (into := getattr(module, name, None)) is not None:
            into.data = value.to(into.dtype).view_as(into)


def _parts(weight: Tensor, numbers: QuantizationArgs) -> Tensor:
    """[..., n]: what shares a scale."""
    if numbers.strategy == "tensor":
        return weight.flatten()
    if numbers.strategy == "channel":
        return weight[:, None]
    if numbers.strategy == "group":
        return weight.unflatten(1, (-1, numbers.group_size))
    tall, wide = numbers.block_structure
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % wide, 0, -weight.shape[0] % tall))
    return padded.unflatten(1, (-1, wide)).unflatten(0, (-1, tall)).transpose(1, 2).flatten(2)


def rename_to_fp8(directory: Path) -> None:
    """The blocks of compressed-tensors as DeepSeek's and Qwen's FP8 checkpoints name them."""
    file, config = directory / "model.safetensors", directory / "config.json"
    save_file(
        {name.replace("weight_scale", "weight_scale_inv"): one for name, one in load_file(file).items()},
        file,
        {"format": "pt"},
    )
    said = json.loads(config.read_text())
    (group,) = said["quantization_config"]["config_groups"].values()
    block = group["weights"]["block_structure"]
    said["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block, "fmt": "e4m3"}
    config.write_text(json.dumps(said))
