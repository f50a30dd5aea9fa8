"""The folders of what SpecSoT keeps between runs."""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

USED = ".used"  # in a folder of the cache: its time is that of the last use; locked while one goes on
KEPT_SECONDS = 30 * 86_400.0  # that nobody used it; a choice, not measured


def cache_folder() -> Path:
    """`specsot` in XDG_CACHE_HOME, or in ~/.cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specsot"


def state_folder() -> Path:
    """What cannot be had again: `specsot` in XDG_STATE_HOME, or in ~/.local/state; it need not exist."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "specsot"


def use(folder: Path) -> IO[str]:
    """While this file is open, nobody forgets the folder. Raises OSError."""
    (folder / USED).touch()
    used = (folder / USED).open()
    fcntl.flock(used, fcntl.LOCK_SH)
    return used


def forget_unused(place: Path, now: float) -> None:
    """Removes the folders in it that no process uses, and none has used for a month.

    now: seconds since 1970.
    """
    for mark in place.glob(f"*/{USED}"):
        with suppress(OSError), mark.open() as used:
            if now - mark.stat().st_mtime > KEPT_SECONDS:
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(mark.parent)
