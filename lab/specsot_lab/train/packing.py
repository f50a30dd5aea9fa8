"""Writes a trained head again with its matrices in 8 bits, so that it is half as large as in bf16.

    python -m specsot_lab.train.packing HEAD PACKED

The layout is that of compressed-tensors (`int-quantized`, one scale for each output). The drafter decodes it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

LARGEST_CODE: Final = 127  # Largest 8-bit code; symmetric about zero.
OFFSETS: Final = "d2t"  # Draft id -> base id - draft id, [draft vocabulary].
MEMBERSHIP: Final = "t2d"  # Which base ids the head drafts, [vocabulary]; `d2t` says the same.
# What the config of a packed head says of its matrices.
QUANTIZATION: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
        }
    },
    "ignore": [],
}


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8 bits: int8 codes [out, in] and fp16 scales [out, 1] with weight ~ codes * scales.
    A row of zeros has the scale 1.

    weight: [out, in] the matrix.

    Codes lie in -LARGEST_CODE .. LARGEST_CODE.
    """
    largest = weight.float().abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST_CODE, torch.ones_like(largest)).to(torch.float16)
    codes = (weight.float() / scales.float()).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
    return codes, scales


def pack_head(head: Path, packed: Path) -> None:
    """Write a head again, with its matrices in 8 bits. Norms keep their data type, and "t2d" is left out.

    head: Directory of the head.
    packed: Directory to write; it is created if missing.

    "d2t" is stored as int32, and every tensor of two dimensions as codes and "weight_scale". Existing files
    are replaced. Raises OSError if the head's files are missing.
    """
    tensors: dict[str, Tensor] = {}
    with safe_open(head / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if name == OFFSETS:
                tensors[name] = tensor.to(torch.int32)
            elif tensor.dim() == 2:
                module = name.removesuffix(".weight")
                tensors[name], tensors[f"{module}.weight_scale"] = quantize_rows(tensor)
            elif name != MEMBERSHIP:
                tensors[name] = tensor
    packed.mkdir(parents=True, exist_ok=True)
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = QUANTIZATION
    (packed / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line, and write the packed head.

    The process exits with status 0, or with 2 if HEAD or PACKED is missing.
    """
    reader = argparse.ArgumentParser(description="Write a head again with its matrices in 8 bits.")
    reader.add_argument("head", type=Path)
    reader.add_argument("packed", type=Path)
    options = reader.parse_args()
    pack_head(options.head, options.packed)


if __name__ == "__main__":
    main()
