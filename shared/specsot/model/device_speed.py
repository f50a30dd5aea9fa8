"""What computes here, in words, and how fast it copies memory; measurements on one device take turns."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

COPIED = 1 << 26  # bytes on a CPU, and on a GPU eight times as many: more than caches hold; not measured
COPIES = 5  # of which the fastest counts
WAIT_SECONDS, LOOK_SECONDS = 5.0, 0.02  # for others that measure on this device; not measured


def device_name(device: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """ "NVIDIA H100 80GB HBM3", or "AMD EPYC, 2 cores": those that this process may use."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        model = next(value.strip() for key, _, value in lines if key.strip() == "model name")
    except (OSError, StopIteration):
        model = "CPU"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{model}, {cores} core{'s' * (cores != 1)}"


@cache
def copy_speed(device: str) -> int:
    """Bytes a second, read and written, of a large copy within the device's memory: the fastest of some."""
    on_gpu = torch.device(device).type == "cuda"
    source = torch.ones(COPIED * (8 if on_gpu else 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def seconds() -> float:
        began = time.perf_counter()
        target.copy_(source)
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return round(2 * source.nbytes / min(seconds() for _ in range(COPIES)))


@contextmanager
def alone_on(device: str, folder: Path | None = None) -> Generator[None]:
    """While nobody else on this machine measures there: processes that start together share cores and memory.

    Whoever keeps it for long, or locks where this process must not, is not waited for.
    """
    place = (folder or Path(tempfile.gettempdir())) / f"specsot-measuring-{device.replace(':', '-')}"
    end = time.monotonic() + WAIT_SECONDS
    try:
        file = place.open("a")
    except OSError:
        yield
        return
    with file:
        while time.monotonic() < end:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(LOOK_SECONDS)
        yield
