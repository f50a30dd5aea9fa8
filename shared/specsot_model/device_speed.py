"""What computes here, in words, and how fast it copies memory; measurements on one device take turns."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import takewhile
from pathlib import Path

import torch

# bytes: more than caches hold
COPIED = 1 << 26
COPIED_ON_GPU = 1 << 29
# Bytes of a copy: many short ones pass between what else runs (two cores with a load of 12: 31 GB/s, and
# 3 to 6 by whole ones); long ones keep many cores busy.
PIECES = (1 << 21,) * 10 + (1 << 24,) * 2
COPY_SECONDS = 0.5  # in which nothing begins any more; where it is quiet, all are over in a tenth of that
# for others that measure on this device; not measured
WAIT_SECONDS = 5.0
LOOK_SECONDS = 0.02


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
    """Bytes a second, read and written, of copies within the device's memory: the fastest of many."""
    on_gpu = torch.device(device).type == "cuda"
    source = torch.ones(COPIED_ON_GPU if on_gpu else COPIED, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def speed(begin: int, size: int) -> float:
        began = time.perf_counter()
        target[begin : begin + size].copy_(source[begin : begin + size])
        if on_gpu:
            torch.cuda.synchronize(device)
        return 2 * size / (time.perf_counter() - began)

    sizes, end = (len(source), *(() if on_gpu else PIECES), len(source)), time.monotonic() + COPY_SECONDS
    copies = ((begin, size) for size in sizes for begin in range(0, len(source), size))
    return round(max(speed(*copy) for copy in takewhile(lambda _: time.monotonic() < end, copies)))


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
