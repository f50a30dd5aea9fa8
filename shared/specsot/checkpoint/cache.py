"""The folders of files that SpecSoT keeps between runs."""

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

# File in a folder of the cache. Its modification time is that of the last use; it is locked during a use.
USED = ".used"
# Seconds. A folder that was not used for so long is removed. Untuned.
UNUSED_SECONDS = 30 * 86_400.0
# The end of messages about a folder that cannot be written.
OTHER_CACHE = " (XDG_CACHE_HOME names another cache)"


def cache_folder() -> Path:
    """Return the cache folder: `specsot` in XDG_CACHE_HOME, or in ~/.cache. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specsot"


def state_folder() -> Path:
    """Return the folder of files that cannot be made again: `specsot` in XDG_STATE_HOME, or ~/.local/state.

    It need not exist.
    """
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "specsot"


def publish(whole: Path, folder: Path, mark: str = "") -> None:
    """Rename a complete folder, unless another process was faster; then its folder is kept, and `whole` is
    removed.

    whole: the folder.
    folder: its new path, which may exist.
    mark: name of a file by which a complete folder is known. Empty: any existing folder is complete.

    Raises OSError if the folder cannot be renamed, and no complete one exists.
    """
    try:
        whole.rename(folder)
    except OSError:
        shutil.rmtree(whole, ignore_errors=True)
        if not (folder / mark).exists():
            raise


def use(folder: Path) -> IO[str]:
    """Mark a folder as used now, and return an open file that keeps it.

    As long as the returned file is open, no process removes the folder. The time of use is that of the file
    USED in the folder, which is created if it is missing.

    folder: a folder of the cache.

    Raises OSError if the folder does not exist or cannot be written.
    """
    (folder / USED).touch()
    mark = (folder / USED).open()
    fcntl.flock(mark, fcntl.LOCK_SH)
    return mark


def remove_unused(
    parent: Path, now: float, is_outdated: Callable[[Path], bool] = lambda folder: False
) -> None:
    """Remove the folders in `parent` that no process uses, and that are outdated or that none has used for
    UNUSED_SECONDS.

    Folders without a USED file are left alone, and folders that cannot be removed are skipped.

    parent: the directory whose folders are examined.
    now: the present time in seconds since 1970.
    is_outdated: tells whether a folder is of no use any more, however new it is. By default, none is.

    A folder whose file USED is held open by a process that called `use` is skipped, however old it is.
    """
    for mark in parent.glob(f"*/{USED}"):
        with suppress(OSError), mark.open() as used:
            if now - mark.stat().st_mtime > UNUSED_SECONDS or is_outdated(mark.parent):
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(mark.parent)
