"""Keeps what members measure of a CPU at their first start, so that later starts only check it."""

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
from specsot_kernels.cpu.compiling import source_digest
from specsot_model.device_speed import device_name

# Version of the files' content. Every change of what is measured needs another version.
FORM = 1


@dataclass(frozen=True, slots=True)
class MeasuredSpeeds:
    """What was measured at a start.

    curve: Pairs (rows, seconds) by ascending rows, as `measure_curve` returns them.
    copy_speed: Bytes per second, as `device_speed.copy_speed` returns them. 0: not measured.
    """

    curve: Curve
    copy_speed: int = 0


class KeptSpeeds:
    """The file in the cache that keeps the speeds of one model on one machine.

    Its name is a digest of all that they depend on: the model, the form of its numbers, the processor, the
    number of threads, and the versions of SpecSoT, its kernels and PyTorch. If any of these changes, there is
    no file of that name, and the speeds are measured anew. Files are some 300 bytes, and are not removed.
    """

    def __init__(self, **facts: object) -> None:
        """Find the file's name; nothing is read.

        facts: What the speeds depend on besides processor, threads and versions. Two values are the same fact
            if their texts are.
        """
        machine = device_name("cpu"), torch.get_num_threads()
        versions = FORM, __version__, torch.__version__, source_digest()
        described = repr((machine, versions, sorted((name, str(fact)) for name, fact in facts.items())))
        key = hashlib.sha256(described.encode()).hexdigest()[:16]
        self._file: Path = cache_folder() / "speeds" / f"{key}.json"

    def read(self) -> MeasuredSpeeds | None:
        """Return the speeds that an earlier process kept. None if there are none, or if the file is not one
        that `write` wrote.
        """
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            curve = tuple((int(rows), float(seconds)) for rows, seconds in kept["curve"])
            return MeasuredSpeeds(curve, int(kept["copy_speed"]))
        return None

    def write(self, speeds: MeasuredSpeeds) -> None:
        """Keep the speeds for later processes. Nothing happens if the cache cannot be written.

        speeds: What was measured. Those that were kept before are replaced.
        """
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            written = self._file.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(asdict(speeds)), encoding="utf-8")
            written.replace(self._file)
