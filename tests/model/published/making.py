"""Writes the tiny checkpoints that lie beside this file by the libraries whose formats they are.

These libraries want other versions of torch or a GPU, so they are no part of our environment: their packages
are unpacked side by side, their packers imported alone. `made.json` has versions, and the SHA-256 of every
matrix as the library itself decodes it.

    pip download --no-deps --no-binary autoawq autoawq==0.2.9 && tar xf autoawq-0.2.9.tar.gz
    pip install --no-deps --target site auto-round==0.16.1 bitsandbytes==0.50.2
    python -m tests.model.published.making site autoawq-0.2.9
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config

from tests.model.published import HERE

GROUP = 32
Tensors = dict[str, Tensor]
Pack = Callable[[torch.nn.Linear], tuple[Tensors, Tensor]]  # what is stored, and what the library makes of it


def dense(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.25,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def stub(**packages: Path) -> None:
    """Packages whose own `__init__` is not run."""
    for name, path in packages.items():
        module = sys.modules[name.replace("__", ".")] = ModuleType(name)
        module.__path__ = [str(path)]


def least(weight: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero [out, groups] of each group's range."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    most, top = groups.amax(2), 2**bits - 1
    if symmetric:
        scale = groups.abs().amax(2) * 2 / top
        return scale, torch.full_like(scale, 2 ** (bits - 1))
    scale = (most - groups.amin(2)) / top
    return scale, (-groups.amin(2) / scale).round().clamp(1, top)


def by_awq(linear: torch.nn.Linear) -> tuple[Tensors, Tensor]:
    layer = import_module("awq.modules.linear.gemm").WQLinear_GEMM
    scale, zero = (one.half().t().contiguous() for one in least(linear.weight.data, 4, False))
    packed = layer.from_linear(linear, 4, GROUP, scales=scale, zeros=zero)
    decode = import_module("awq.utils.packing_utils").dequantize_gemm
    return packed.state_dict(), decode(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).t()


def by_gptq(module: str, bits: int, symmetric: bool) -> Pack:
    def pack(linear: torch.nn.Linear) -> tuple[Tensors, Tensor]:
        kind = import_module(f"auto_round_extension.torch.{module}").QuantLinear
        kind.device = "cpu"
        packed = kind(bits, GROUP, linear.in_features, linear.out_features, False)
        packed.dequant_dtype = torch.int32
        scale, zero = least(linear.weight.data, bits, symmetric)
        packed.pack(linear.float(), scale.half().float(), zero, None)
        made = packed(torch.eye(linear.in_features, dtype=torch.float32))
        groups = torch.arange(linear.in_features, dtype=torch.int32) // GROUP  # as AutoGPTQ always stores
        return {**packed.state_dict(), "g_idx": groups}, made.t()

    return pack


def packed(pack: Pack) -> tuple[Tensors, Tensors]:
    """A checkpoint's tensors, and the matrices as the library decodes them."""
    model, stored, decoded = dense(torch.float16), {}, {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            tensors, made = pack(module)
            stored |= {f"{name}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
            decoded[f"{name}.weight"] = made
        elif name != "lm_head":
            stored |= {f"{name}.{part}": one.data for part, one in module.named_parameters(recurse=False)}
    return stored, decoded


def write_packed(folder: Path, pack: Pack, config: dict[str, Any], version: str) -> None:
    stored, decoded = packed(pack)
    folder.mkdir(exist_ok=True)
    dense(torch.float16).config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "quantization_config": config}, indent=1))
    note(folder, decoded, torch.float16, version)


def write_bitsandbytes(folder: Path, **kind: Any) -> None:
    """By Transformers; decoded by the library's own functions."""
    from bitsandbytes import __version__, functional

    dense(torch.bfloat16).save_pretrained(folder)
    config = BitsAndBytesConfig(**kind)
    AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu", dtype=torch.bfloat16
    ).save_pretrained(folder)
    tensors, decoded = load_file(folder / "model.safetensors"), Tensors()
    for name in [one.removesuffix(".absmax") for one in tensors if one.endswith(".weight.absmax")]:
        parts = {one[len(name) + 1 :]: tensors[one] for one in tensors if one.startswith(f"{name}.")}
        state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
        decoded[name] = functional.dequantize_4bit(tensors[name], state)
    for name in [one.removesuffix(".SCB") for one in tensors if one.endswith(".SCB")]:
        wide = functional.int8_vectorwise_dequant(tensors[f"{name}.weight"], tensors[f"{name}.SCB"])
        decoded[f"{name}.weight"] = wide.bfloat16()
    note(folder, decoded, torch.bfloat16, f"bitsandbytes {__version__}")


def note(folder: Path, decoded: Tensors, dtype: torch.dtype, version: str) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    hashes = {name: digest(matrix.to(dtype)) for name, matrix in decoded.items()}
    said = {"made by": version, "torch": torch.__version__, "dtype": str(dtype), "sha256": hashes}
    (folder / "made.json").write_text(json.dumps(said, indent=1) + "\n")


def digest(matrix: Tensor) -> str:
    return hashlib.sha256(matrix.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main(site: Path, awq: Path) -> None:
    sys.path.insert(0, str(site))
    rounds, modules = site / "auto_round_extension", awq / "awq" / "modules"
    stub(awq=awq / "awq", awq__utils=awq / "awq" / "utils", awq__modules=modules)
    stub(awq__modules__linear=modules / "linear", auto_round=site / "auto_round")
    stub(auto_round_extension=rounds, auto_round_extension__torch=rounds / "torch")
    stub(auto_round__utils=site / "auto_round" / "utils")
    sys.modules["auto_round.utils"].__dict__["get_packing_device"] = lambda device=None: "cpu"
    grouped = {"bits": 4, "group_size": GROUP}
    write_packed(
        HERE / "awq", by_awq, {**grouped, "quant_method": "awq", "version": "gemm", "zero_point": True},
        "autoawq 0.2.9",
    )  # fmt: skip
    old = {**grouped, "quant_method": "gptq", "desc_act": False, "sym": True}
    write_packed(HERE / "gptq", by_gptq("qlinear_torch_zp", 4, True), old, "auto-round 0.16.1")
    new = {**old, "bits": 8, "sym": False, "checkpoint_format": "gptq_v2"}
    write_packed(HERE / "gptq-v2", by_gptq("qlinear_torch", 8, False), new, "auto-round 0.16.1")
    write_bitsandbytes(
        HERE / "bnb-nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["lm_head"],
    )  # fmt: skip
    write_bitsandbytes(HERE / "bnb-int8", load_in_8bit=True, llm_int8_skip_modules=["lm_head"])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
