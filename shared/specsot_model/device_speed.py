"""Describes a device, measures how fast it copies memory, and lets measurements on one device take turns."""

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

# Bytes. Size of the copied buffers on a CPU and on a GPU: more than caches hold. Untuned.
COPIED = 1 << 26
COPIED_ON_GPU = 1 << 29
# Bytes. Sizes of copies on a CPU. Short copies find gaps between other processes (two cores with a load of
# 12: 31 GB/s, but 3 to 6 GB/s by copies of the whole buffer); long copies keep many cores busy.
PIECES = (1 << 21,) * 10 + (1 << 24,) * 2
# Seconds. No copy starts later than this. On a quiet machine all copies end in a tenth of it. Untuned.
COPY_SECONDS = 0.5
# Seconds. How long to wait for other processes that measure on this device, and how often to look. Untuned.
WAIT_SECONDS = 2.0
LOOK_SECONDS = 0.02


def device_name(device: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return a device's name: "NVIDIA H100 80GB HBM3", or "AMD EPYC, 2 cores".

    The cores are those that this process may use. A single core is written "1 core".

    device: Name of a device, such as "cpu" or "cuda:0".
    cpuinfo: The file in which Linux describes its processors; "CPU" is the model if it cannot be read.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        model = next(value.strip() for key, _, value in lines if key.strip() == "model name")
    except (OSError, StopIteration):
        model = "CPU"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{model}, {cores} core{'s' * (cores != 1)}"


def measured_bytes(device: str) -> int:
    """Return how many bytes `copy_speed` allocates on a device: those it copies, and the copy.

    device: Name of a device, such as "cpu" or "cuda:0".
    """
    return 2 * (COPIED_ON_GPU if torch.device(device).type == "cuda" else COPIED)


@cache
def copy_speed(device: str) -> int:
    """Return the bytes per second, read plus written, of the fastest of many copies in a device's memory.

    No copy starts later than COPY_SECONDS after the first. The result is remembered for each device.

    device: Name of a device, such as "cpu" or "cuda:0".
    """
    on_gpu = torch.device(device).type == "cuda"
    source = torch.ones(measured_bytes(device) // 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def copied_per_second(first_byte: int, size: int) -> float:
        """Return the bytes per second, read plus written, of one copy.

        first_byte: First byte to copy.
        size: Number of bytes to copy.
        """
        began = time.perf_counter()
        target[first_byte : first_byte + size].copy_(source[first_byte : first_byte + size])
        if on_gpu:
            torch.cuda.synchronize(device)
        return 2 * size / (time.perf_counter() - began)

    sizes = (len(source), *(() if on_gpu else PIECES), len(source))
    end = time.monotonic() + COPY_SECONDS
    copies = ((begin, size) for size in sizes for begin in range(0, len(source), size))
    return round(
        max(copied_per_second(*copy) for copy in takewhile(lambda _: time.monotonic() < end, copies))
    )


@contextmanager
def alone_on(device: str, folder: Path | None = None) -> Generator[None]:
    """Run while no other process of this machine measures on the device.

    Processes that start together share cores and memory, so they measure in turns, by a lock file. If another
    process holds the lock for longer than WAIT_SECONDS, or the file cannot be opened, the body runs anyway.

    folder: Where the lock file is; None: the folder for temporary files.
    device: Name of a device, such as "cpu" or "cuda:0".
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
