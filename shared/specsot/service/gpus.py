"""Reads the GPUs of this machine through NVIDIA's library.

No library, no driver, no GPU: an empty list, never an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """used, total: bytes of its memory. busy: share of the last moments in which it computed."""

    index: int
    name: str
    used: int
    total: int
    busy: float


def read_gpus() -> list[Gpu]:
    if not _ready():
        return []
    import pynvml

    try:
        return [_read(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


@cache
def _ready() -> bool:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # missing library, missing driver, no permission: all the same to us
        return False
    return True


def _read(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    shown = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    rates: Any = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return Gpu(index, shown, int(memory.used), int(memory.total), rates.gpu / 100)
