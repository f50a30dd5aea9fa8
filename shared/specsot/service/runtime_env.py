"""Environment settings for memory and cores, standard files and Ctrl-C, settled before libraries are loaded.

What the environment already says is left alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper

# <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

_SETTINGS = {
    # A forward has dozens of short parallel stretches: threads that sleep between them (as the passive
    # policy has it) double its time; threads that spin for long take cores from the next service.
    "GOMP_SPINCOUNT": "10000",
    "GRPC_VERBOSITY": "NONE",  # what gRPC's C++ would print comes as a status too
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    # Compiled products of every shape that was met, nearly half a MiB each: PyTorch would keep the newest
    # 1,024, and oneDNN as many of its own. Few shapes come again and again; a new one takes a millisecond.
    "LRU_CACHE_CAPACITY": "128",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "TOKENIZERS_PARALLELISM": "false",
    # Who loses a peer ends an epoch, not its process; and rows go by NCCL within a host alone.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}


INTERRUPTED = 130  # exit status of what Ctrl-C ended


def interruptible(program: Callable[[], int]) -> int:
    """Its exit status; Ctrl-C ends it without a word, also while it imports.

    Behind it Python waits for threads: another Ctrl-C then ends the process at once.
    """
    try:
        return program()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # where it is ignored, it stays so
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def set_runtime_defaults() -> None:
    """Call before importing torch or grpc, and before anything is opened."""
    open_standard_files()
    survive_any_text()
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if sys.platform == "linux":
        keep_memory()


def open_standard_files() -> None:
    """On nothing, where whoever started us closed them (`2>&-`): else a socket has such a number, and libuv
    ends the process once that is closed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it has the lowest free number


WHOLE = "utf-8", "surrogateescape"  # what came in goes out again


def survive_any_text() -> None:
    """Characters that the locale's encoding lacks are written as their numbers, as Python does on stderr.

    Bytes that are none come as half characters, which are refused by name.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper) and (stream.encoding, stream.errors) != WHOLE:
            stream.reconfigure(errors=errors)


def keep_memory() -> None:
    """Let glibc reuse freed memory for large messages instead of mapping it anew for each.

    Few arenas: what one thread frees, another can use; by default each of gRPC's threads gathers its own.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl has none
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 256 << 20)
        libc.mallopt(M_ARENA_MAX, 2)


def return_freed_memory() -> None:
    """Give the system what a peak needed and nobody holds any more. Takes milliseconds: for quiet moments."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
