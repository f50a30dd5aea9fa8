"""Whether what is about to be loaded fits: counted from the headers of weight files, before any is read.

Refuses to know members and epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from specsot.errors import ModelError
from specsot.members import Range
from specsot.model.config import ModelConfig
from specsot.model.weights import Weights

log = structlog.get_logger()

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Need:
    """weights, pages: bytes."""

    weights: int
    pages: int

    @property
    def whole(self) -> int:
        return self.weights + self.pages


def check_fit(what: str, need: Need, device: str, free: int | None) -> None:
    """Tell in one line what it takes and what there is. Raises ModelError where that is too little.

    free: bytes; None: nobody knows.
    """
    takes = f"{in_words(need.weights)} of weights and {in_words(need.pages)} of KV pages"
    has = "an unknown amount" if free is None else in_words(free)
    if free is not None and need.whole > free:
        raise ModelError(
            f"{what} need {takes}, {device} has {has} free: "
            "fewer layers, a smaller --kv-memory or a --dtype of fewer bytes would fit"
        )
    log.info("fits", what=what, weights=in_words(need.weights), pages=in_words(need.pages), free=has)


def weights_of(files: Weights, config: ModelConfig, layers: Range) -> int:
    """Numbers a range loads: its layers', the embedding with the first, norm and lm_head with the last."""
    names = config.names
    parts = [f"{names.layer.format(layer)}." for layer in range(layers.first, layers.last)]
    if layers.first == 0:
        parts.append(f"{names.embedding}.")
    if layers.last == config.layers:
        own = any(name.startswith(f"{names.head}.") for name in files.names())
        parts += [f"{names.norm}.", f"{names.head if own else names.embedding}."]
    return sum(numbers_of(files, (name for name in files.names() if name.startswith(part))) for part in parts)


def numbers_of(files: Weights, names: Iterable[str]) -> int:
    """In these tensors; nothing is read but shapes."""
    return sum(math.prod(files.shape(name)) for name in names)


def room_on(device: str) -> int | None:
    """Free bytes of a device's memory, as far as this process may use it; None where nobody tells."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_memory() if torch.device(device).type == "cpu" else None


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """What the machine has, or what is left of this container's limit, whichever is less."""
    found = [one for one in (_of_machine(meminfo), _of_container(cgroup)) if one is not None]
    return min(found, default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _of_container(cgroup: Path) -> int | None:
    """cgroup 2; file pages that nobody uses are given back before a limit bites."""
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" is no number: no limit
        used = int((cgroup / "memory.current").read_text())
        told = dict(line.split(" ", 1) for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(limit - used + int(told.get("inactive_file", "0")), 0)
    except (OSError, ValueError):
        return None


def in_words(size: int) -> str:
    """ "1.5 GiB"."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 100 or units[0] == "B" else f"{value:.1f} {units[0]}"
