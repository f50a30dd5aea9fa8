"""Which floating-point type to compute in, on this machine, and whether a device is here.

Refuses to know models.
"""

from __future__ import annotations

import torch

from specsot.errors import InvalidRequest

NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """fp32, bf16, fp16, or auto: bf16 on CUDA and on CPUs that multiply it, else fp32.

    InvalidRequest for any other name.
    """
    if name == "auto":
        return torch.bfloat16 if _multiplies_bf16(torch.device(device)) else torch.float32
    if name not in NAMES:
        raise InvalidRequest(f"dtype must be one of auto, {', '.join(NAMES)}, got {name!r}", field="dtype")
    return NAMES[name]


def check_device(device: str) -> None:
    """Raises InvalidRequest for one that nobody knows, and for a GPU that PyTorch does not see."""
    try:
        named = torch.device(device)
    except RuntimeError:
        raise InvalidRequest(f"no device is called {device!r}; cpu and cuda:0 are", field="device") from None
    there = torch.cuda.device_count() if named.type == "cuda" else 0
    if named.type == "cuda" and (named.index or 0) >= there:
        raise InvalidRequest(
            f"device {device}: PyTorch {torch.__version__} sees {there} GPUs", field="device"
        )


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type != "cpu":
        return device.type == "cuda"
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))
