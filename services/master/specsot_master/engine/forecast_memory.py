"""What forecasts are made of, in a file: a process that answers once, or has just begun, has them too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specsot_master.core.plans.forecast import Forecaster

VERSION = 2  # of the file; another one for each change of what is in it
PAUSE = 10.0  # seconds between two writings, of some 5 KB; not measured


class ForecastMemory:
    """Of one model; the newest of several processes wins. What cannot be read or written is left."""

    def __init__(self, file: Path | None = None) -> None:
        """file None: nothing is kept."""
        self._file = file
        self._written = float("-inf")

    def read(self) -> Forecaster:
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            told = json.loads(self._file.read_text(encoding="utf-8")) if self._file else {}
            if told.get("version") == VERSION:
                return Forecaster(told)
        return Forecaster()

    def write(self, kept: Callable[[], Mapping[str, Any]], now: float) -> None:
        """Not too often."""
        if self._file is None or now - self._written < PAUSE:
            return
        self._written = now
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps({"version": VERSION, **kept()}), encoding="utf-8")
            draft.replace(self._file)
