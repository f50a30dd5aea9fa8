"""Keeps what members measure of a device at their first start, so that later starts only check it."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from specsot._version import __version__
from specsot.checkpoint.cache import cache_folder
from specsot.members import Curve
from specsot_kernels.cpu.compiling import FOLDER, source_digest
from specsot_model.device_speed import device_name

# Version of the files' content. Every change of what is measured needs another version.
FORM = 1


@dataclass(frozen=True, slots=True)
class MeasuredSpeeds:
    """What a member measured of a device.

    curve: Pairs (rows, seconds) by ascending rows, as `measure_curve` returns them.
    copy_speed: Bytes per second, as `device_speed.copy_speed` returns them. 0: not measured.
    """

    curve: Curve
    copy_speed: int = 0


class KeptSpeeds:
    """The file in the cache that keeps the speeds of one model on one machine.

    The file's name is a digest of all that the speeds depend on: the processor and its number of threads, or
    the GPU, the versions of SpecSoT, its kernels and PyTorch, and what the caller names, such as the model
    and the form of its numbers. If any of these changes, there is no file of that name, and the speeds are
    measured anew. Files have some 300 bytes each, and are never removed.
    """

    def __init__(self, device: str, **facts: object) -> None:
        """Determine the file's name; nothing is read.

        device: Name of the device, such as "cpu" or "cuda:0". GPUs of one kind have the same speeds.
        facts: What the speeds depend on in addition to device and versions, by names of the caller's choice.
            Values are compared by `str`, so that two objects with equal texts count as equal.

            # KeptSpeeds("cpu", model="1f2e", dtype=torch.float32) is another file than
            # KeptSpeeds("cpu", model="1f2e")
        """
        on_cpu = torch.device(device).type == "cpu"
        machine = device_name(device), torch.get_num_threads() if on_cpu else 0
        versions = (
            *(FORM, __version__, torch.__version__),
            source_digest(FOLDER if on_cpu else FOLDER.with_name("gpu")),
        )
        described = repr((machine, versions, sorted((name, str(fact)) for name, fact in facts.items())))
        key = hashlib.sha256(described.encode()).hexdigest()[:16]
        self._file: Path = cache_folder() / "speeds" / f"{key}.json"

    def read(self) -> MeasuredSpeeds | None:
        """Return the speeds that an earlier process kept. Return None if there are none, or if the file is
        damaged.
        """
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            curve = tuple((int(rows), float(seconds)) for rows, seconds in kept["curve"])
            return MeasuredSpeeds(curve, int(kept["copy_speed"]))
        return None

    def write(self, speeds: MeasuredSpeeds) -> None:
        """Keep the speeds for later processes, in place of those that were kept before. Nothing happens if
        the cache cannot be written. A reader never sees a part of the file of another process.

        speeds: What was measured.
        """
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            written = self._file.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(asdict(speeds)), encoding="utf-8")
            written.replace(self._file)
