"""Compiles the large kernel of `steps` once on a machine: processes that need it meanwhile wait for it.

A compiled kernel is kept in the folder `__pycache__` of this package (`kernel`), but Numba does not keep
several processes from compiling the same one. It takes ten seconds of processor time, in each of them.
Importing this module imports NumPy with its package, but neither Numba nor torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

# Folder of the kernels' source files.
FOLDER = Path(__file__).parent
# Processes that `start_compiling` has started. They are kept so that Python does not warn of a process that
# still runs.
_compilers = list[subprocess.Popen[bytes]]()


def source_digest(folder: Path = FOLDER) -> str:
    """Return a digest of the source files of kernels, in hexadecimal. When it changes, kernels for CPUs are
    compiled again, and speeds are measured again.

    folder: the folder of the files; by default that of the kernels for CPUs.
    """
    files = sorted(folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _open_lock() -> IO[bytes] | None:
    """Return the file by which processes take turns, which is empty until the kernel is compiled; None if the
    folder cannot be written to.
    """
    path = FOLDER / "__pycache__" / f"steps-{source_digest(FOLDER)}.lock"
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("ab")
    except OSError:
        return None


def _is_compiled(lock: IO[bytes]) -> bool:
    """Return whether a process has compiled the kernel from these source files. It may have been another kind
    of processor or another Numba: then every process compiles it, and none waits.

    lock: what `_open_lock` has returned.
    """
    return os.fstat(lock.fileno()).st_size > 0


def is_compiling() -> bool:
    """Return whether another process, or another thread of this one, compiles the kernel now, so that a
    caller of the kernel would wait. Return False if the kernel was compiled on this machine before, if no
    process compiles it, and if that is unknown: on systems without `fcntl`, on file systems without locks,
    and if `__pycache__` of this package cannot be written to.
    """
    lock = _open_lock() if find_spec("fcntl") else None
    if lock is None:
        return False
    with lock:
        if _is_compiled(lock):
            return False
        import fcntl

        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        # Not every file system has locks.
        except OSError:
            return False
    return False


@contextmanager
def compilation_lock() -> Generator[None]:
    """Let one process after another run the block, until one of them has ended it without an error. Those
    that waited still take turns, and find what was compiled; later ones do not wait.

    Without a folder to which a lock can be written, and on systems without `fcntl`, nothing is waited for.
    """
    lock = _open_lock() if find_spec("fcntl") else None
    if lock is None:
        yield
        return
    with lock:
        if not _is_compiled(lock):
            import fcntl

            # Not every file system has locks.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        # If the disk is full, later processes take turns, too.
        with suppress(OSError):
            if not _is_compiled(lock):
                lock.write(b"compiled\n")
                lock.flush()


def start_compiling() -> None:
    """Start a process that compiles the kernel, if it was never compiled here, so that this process can
    import torch and read a model meanwhile. Nothing is awaited, and a failure is not reported: a process that
    needs the kernel compiles it then.

    Nothing happens without Numba, on processors that are not x86-64, on systems without `fcntl`, and if
    `__pycache__` of this package cannot be written to.
    """
    if platform.machine() not in {"x86_64", "AMD64"} or not (find_spec("numba") and find_spec("fcntl")):
        return
    lock = _open_lock()
    if lock is None:
        return
    with lock:
        compiled = _is_compiled(lock)
    if not compiled:
        command = [
            sys.executable,
            "-c",
            "from specsot_kernels.cpu.kernel import kernel_address; kernel_address()",
        ]
        silent = subprocess.DEVNULL
        # Without this process, the one that needs the kernel compiles it.
        with suppress(OSError):
            _compilers.append(subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent))
