"""Saves the measured costs on which forecasts are based, so that a new process can forecast at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specsot_master.core.plans.forecast import Forecaster

# Version of the file format. It changes whenever the contents change; files of another version are ignored.
VERSION = 2
# Seconds. The minimum time between two writes, of about 5 KB each. Untuned.
PAUSE = 10.0


class ForecastMemory:
    """The file of one model's measured costs, from which forecasts are computed.

    If several processes write the file, the last one wins. A file that cannot be read or written is ignored.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Create the memory; the file is read and written later.

        file: the path of the file; None to save nothing.
        """
        self._file = file
        self._written = float("-inf")

    def read(self) -> Forecaster:
        """Return a forecaster with the saved costs, or an empty one if there is no readable file. A file of
        another version, or with contents of another form, counts as unreadable.
        """
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            saved = json.loads(self._file.read_text(encoding="utf-8")) if self._file else {}
            if saved.get("version") == VERSION:
                return Forecaster(saved)
        return Forecaster()

    def write(self, kept: Callable[[], Mapping[str, Any]], now: float) -> None:
        """Write the measured costs to the file, unless the last write was less than PAUSE seconds ago.
        Nothing happens without a file, or if it cannot be written. Missing folders are created. A failed
        write counts as a write, so the next one waits as long.

        kept: returns the costs as JSON values; called only if the file is written.
        now: the present time, in seconds of any clock that only goes forward.
        """
        if self._file is None or now - self._written < PAUSE:
            return
        self._written = now
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps({"version": VERSION, **kept()}), encoding="utf-8")
            draft.replace(self._file)
