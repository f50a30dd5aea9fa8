"""Settings of memory, cores, standard files and Ctrl-C that must be made before libraries are loaded.

Variables that the environment already has are not changed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Final

# Number of mallopt's parameter for how much free memory at the top of the heap is returned (<malloc.h>).
M_TRIM_THRESHOLD = -1
# Number of mallopt's parameter for the size from which on an allocation is mapped on its own.
M_MMAP_THRESHOLD = -3
# Number of mallopt's parameter for how many arenas there may be.
M_ARENA_MAX = -8

# Environment variables that are set unless the environment has them already.
_SETTINGS = {
    # What gRPC's C++ code would print is also in the status of a call.
    "GRPC_VERBOSITY": "NONE",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    # Compiled matrix products of every shape take nearly half a MiB each. PyTorch would keep the newest
    # 1,024, and oneDNN as many of its own. Few shapes repeat, and a new one takes only a millisecond.
    "LRU_CACHE_CAPACITY": "128",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "TOKENIZERS_PARALLELISM": "false",
    # The loss of a peer must end the epoch and not the process, and NCCL is used only within a host.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}


# Exit status of a program that Ctrl-C ended.
INTERRUPTED = 130
# Exit status of a program that SIGTERM ended, as shells report it.
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM ended a program that cleans up after Ctrl-C and SIGTERM alike."""


def interruptible(program: Callable[[], int]) -> int:
    """Run a program and return its exit status. Ctrl-C ends the program silently, also while it imports.

    After the program, Python waits for threads; another Ctrl-C then ends the process at once.

    program: returns the exit status. INTERRUPTED is returned if Ctrl-C ended it.

    SystemExit and errors of the program are raised unchanged.
    """
    try:
        return program()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        # If SIGINT is ignored, it stays ignored.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def set_runtime_defaults() -> None:
    """Make all settings of this module: the standard files are opened if they are closed, characters that the
    standard files cannot encode are escaped, environment variables for libraries are set unless the user has
    set them, the garbage collector runs seldom, and, on Linux, freed memory is kept for reuse. Must be called
    before torch or grpc is imported and before any file is opened.
    """
    gc.set_threshold(STARTING_OBJECTS, *gc.get_threshold()[1:])
    open_standard_files()
    escape_unencodable()
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if sys.platform == "linux":
        keep_memory()


def open_standard_files() -> None:
    """Open the standard files on /dev/null if the parent process closed them (`2>&-`).

    Otherwise a socket would get the number of a standard file, and libuv ends the process when it is closed.

    Files that are open stay as they are.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it has the lowest free number


# The encoding and the error handler with which any bytes that were read can be written unchanged.
LOSSLESS = "utf-8", "surrogateescape"


def escape_unencodable() -> None:
    """Let standard input and output accept any text.

    Characters that the locale's encoding lacks are written as escapes, as Python does on stderr. Bytes of the
    input that are no characters are read as lone surrogates, which requests reject with a clear error.

    A stream that is no text file, or that loses no bytes already, stays as it is.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper) and (stream.encoding, stream.errors) != LOSSLESS:
            stream.reconfigure(errors=errors)


def keep_memory() -> None:
    """Let glibc reuse freed memory for large messages instead of mapping new memory for each.

    The number of arenas is small, so that a thread can use memory that another one freed. By default, each of
    gRPC's threads would keep its own.

    Does nothing if the C library has no `mallopt`, such as musl. Sets the sizes from which glibc maps memory
    (32 MiB) and returns it (256 MiB), and 2 arenas.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl has none
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 256 << 20)
        libc.mallopt(M_ARENA_MAX, 2)


# Objects. The garbage collector searches for cycles after so many new objects. JSON values have no cycles.
# Reading a body with 2.7 million lists took 1.9 s with CPython's 700, and 0.5 s with this value, as without
# any collector. A step of 64 sequences makes a thousand objects that live until the next step.
YOUNG_OBJECTS: Final = 50_000


# Objects. Until a service spares the collector, a search begins only after so many new objects. Importing
# torch and our packages makes 360,000, nearly none of them garbage: the usual searches take 0.1 to 0.2 s of
# the 2.3 s of processor time of these imports. So many objects of garbage take some 40 MB.
STARTING_OBJECTS: Final = 200_000


def spare_collector() -> None:
    """Make the garbage collector stop this process less often, and skip the objects that exist already. A
    search begins only after YOUNG_OBJECTS new objects.

    A search through all objects that are loaded at the start takes 0.1 s or more, in which no request
    continues and no heartbeat is sent. So none is made here either: cycles that are garbage by now stay
    until `gc.unfreeze`. Call that when objects that existed then are no longer used.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def return_freed_memory() -> None:
    """Return freed memory to the system. Takes milliseconds, so it is called while there is no work.

    Does nothing outside of Linux, and if the C library has no `malloc_trim`, such as musl.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
