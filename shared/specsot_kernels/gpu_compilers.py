"""Compiles Triton kernels in other processes, so that several kernels are compiled at the same time.

Most of the time in which Triton compiles a kernel is spent in Python code, and threads of one process take
turns to run Python code. The compiler processes put each compiled kernel into Triton's cache on disk, from
which the process that requested the kernel then reads it.

Importing this module imports NumPy, because its package does, but neither Triton nor torch. So a process can
start the compiler processes before it imports torch itself, and both imports run at the same time.

    processes = CompilerProcesses(16)    # one process imports Triton and the kernels, then forks 16 others
    processes.compile(request)           # returns when the kernel is on disk, or no process could compile it
    processes.close()                    # the processes end
"""

from __future__ import annotations

import json
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

# Processes. Largest number that compile at the same time; each takes some 200 MB of memory. Untuned.
MAX_PROCESSES: Final = 16
# Seconds. A compiler process that receives no request for this long ends, because the model may have no
# kernels to compile, or its weights may still be downloading. The requesting process waits for a reply at
# most this long, and then compiles the kernel itself. Untuned.
WAIT_SECONDS: Final = 120.0
# Processors. On a machine with fewer processors, no compiler processes are started, because importing torch
# in one more process takes longer than these processes save. Untuned.
MIN_PROCESSORS: Final = 4


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """What a compiler process needs to compile a kernel for one combination of argument types and constants.

    module: name of the module that defines the kernel, such as "specsot_kernels.gpu.growing".
    name: name of the kernel in its module.
    target: the GPU to compile for, as the arguments of Triton's `GPUTarget`: backend, architecture and warp
        size, such as ("cuda", 90, 32).
    specialization: types and constants of the arguments, and the options: JSON that Triton has written for
        its cache hook, and that `JITFunction.preload` reads.
    """

    module: str
    name: str
    target: tuple[str, int | str, int]
    specialization: str


class CompilerProcesses:
    """Processes that compile kernels. Each of them compiles one kernel at a time.

    The compiler processes end when `close` is called, after WAIT_SECONDS without a request, and when the
    process that has started them ends. Even if that process is killed, the system closes its connections, and
    the compiler processes notice.
    """

    def __init__(self, number: int) -> None:
        """Start the processes, without waiting for them. Raises OSError if the system cannot start a process.

        number: number of processes, which is how many kernels can be compiled at the same time; at least 1.
        """
        # Connections whose processes are compiling nothing. Connections of processes that have ended return
        # here, too; a request over such a connection fails at once.
        self._free = SimpleQueue[socket.socket]()
        pairs = [socket.socketpair() for _ in range(number)]
        descriptors = [child_end.fileno() for _, child_end in pairs]
        command = [sys.executable, "-m", "specsot_kernels.gpu_compilers", *map(str, descriptors)]
        silent = subprocess.DEVNULL
        # The started process forks, which is safe only if it has no threads. By default, NumPy starts some.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdin=silent, stdout=silent, stderr=silent, pass_fds=descriptors, env=environment
        )
        # Without a thread that waits for the started process, it would remain as a zombie after its end.
        Thread(target=process.wait, daemon=True).start()
        self._connections = [own_end for own_end, _ in pairs]
        for own_end, child_end in pairs:
            child_end.close()
            own_end.settimeout(WAIT_SECONDS)
            self._free.put(own_end)

    def compile(self, request: KernelRequest) -> None:
        """Let one of the processes compile a kernel, and wait until it has finished. May be called from any
        thread; if all processes are busy, the call waits until one is free.

        No error is raised if the kernel cannot be compiled, if the process has ended, if the reply takes
        longer than WAIT_SECONDS, or after `close`. In these cases the kernel may be missing from Triton's
        cache. So the caller must compile the kernel afterwards in any case: this reads the kernel from the
        cache, or compiles it and raises its error.

        request: the kernel.
        """
        connection = self._free.get()
        # The process may have ended, perhaps because memory ran out, or take too long. Then the connection is
        # closed, because a late reply would answer the next request.
        try:
            connection.sendall(json.dumps(asdict(request)).encode() + b"\n")
            connection.recv(1)
        except OSError:
            connection.close()
        finally:
            self._free.put(connection)

    def close(self) -> None:
        """End the processes, without waiting for them: each finishes the kernel that it is compiling. Later
        calls of `compile` return at once, without a compiled kernel.
        """
        for connection in self._connections:
            connection.close()


# The compiler processes that this process has started. None before `start_unless_compiled`, if that call
# started none, and after `stop`.
_running: CompilerProcesses | None = None
# The files that `stop` creates, one for each call of `start_unless_compiled` that found its file missing; see
# `_mark`.
_marks = set[Path]()


def running() -> CompilerProcesses | None:
    """Return the compiler processes, from `start_unless_compiled` to `stop`; None at other times, and if none
    were started. They are returned even if they have ended because they received no request.
    """
    return _running


def start_unless_compiled(*facts: object) -> None:
    """Start compiler processes, without waiting for them, unless an earlier start on this machine has
    compiled the kernels for these facts. If the processes run already, no further processes are started, and
    `stop` records these facts, too.

    Call this before torch is imported: the compiler processes import torch and Triton first, which takes
    seconds, and then this process and they do that at the same time.

    Nothing happens on machines with fewer than MIN_PROCESSORS processors, if Triton is not installed, in
    Triton's interpreter, and if the system cannot start a process.

    facts: values that decide which kernels are needed, such as the model's options with its dtype and device.
        Two values are the same if `str` gives the same text. The versions of Triton and of the driver are not
        part of the facts: after an update, kernels are compiled by threads.
    """
    global _running
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    mark = _mark(facts)
    if processors < MIN_PROCESSORS or not find_spec("triton") or interpreted or mark.exists():
        return
    # Without these processes, the kernels are compiled by threads.
    with suppress(OSError):
        _running = _running or CompilerProcesses(min(processors, MAX_PROCESSES))
        _marks.add(mark)


def stop() -> None:
    """End the compiler processes, and record that the kernels for all facts of `start_unless_compiled` were
    compiled, so that the next start needs no processes. Nothing happens if no processes were started.

    Call this when all kernels of a start are compiled. Kernels that are requested at that time or later are
    compiled by their threads.
    """
    global _running
    if _running:
        _running.close()
        _running = None
        # Triton's cache may be read-only. Then every start starts compiler processes.
        with suppress(OSError):
            for mark in _marks:
                mark.touch()
        _marks.clear()


def _mark(facts: Sequence[object]) -> Path:
    """Return the path of the empty file that records that the kernels for the facts were compiled. The file
    may not exist yet. Its name is a digest of the facts and of the kernels' source files, so that changed
    kernels count as not compiled. It is in Triton's cache, so that it is deleted together with the kernels.

    facts: values that decide which kernels are needed, see `start_unless_compiled`.
    """
    sources = sorted(Path(__file__).with_name("gpu").glob("*.py"))
    digest = sha256(b"".join(source.read_bytes() for source in sources))
    digest.update(repr([str(fact) for fact in facts]).encode())
    home = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"
    return Path(os.environ.get("TRITON_CACHE_DIR") or home) / f"specsot-{digest.hexdigest()[:16]}"


class _OneTarget:
    """Stand-in for Triton's driver that has only the methods that Triton calls to compile a kernel. Triton's
    own driver would make a CUDA context, which takes time and memory of the GPU.
    """

    def __init__(self, target: Any) -> None:
        """Stand in for the driver of one target.

        target: the `GPUTarget` to compile for.
        """
        self._target = target

    def get_current_device(self) -> object:
        """Return the key under which Triton keeps a device's compiled kernels in memory. The target itself is
        that key, because a process may compile for several targets.
        """
        return self._target

    def get_current_target(self) -> object:
        """Return the target to compile for."""
        return self._target


def _compile(request: KernelRequest) -> None:
    """Compile a kernel, and store it in Triton's cache on disk. Raises the errors that Triton raises, such as
    a CompilationError.

    request: the kernel.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    stand_in: Any = _OneTarget(GPUTarget(*request.target))
    driver.set_active(stand_in)
    getattr(import_module(request.module), request.name).preload(request.specialization)


def _serve(connection: socket.socket) -> None:
    """Compile one kernel after the other, until the other end of the connection is closed. After each request
    one byte is sent, even if the kernel could not be compiled.

    Raises TimeoutError after WAIT_SECONDS without a request, and OSError if the connection is lost.

    connection: receives requests, each a line with the JSON object of a `KernelRequest`.
    """
    connection.settimeout(WAIT_SECONDS)
    for line in connection.makefile("rb"):
        with suppress(Exception):
            _compile(KernelRequest(**json.loads(line)))
        connection.sendall(b"\n")


def main(descriptors: Sequence[int]) -> None:
    """Import Triton and all kernels, then serve each connection in a forked process of its own. Return when
    all of these processes have ended, see `_serve`.

    descriptors: file descriptors of inherited sockets, one for each process.
    """
    from triton.runtime.cache import triton_key

    gpu = import_module("specsot_kernels.gpu")
    for module in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
        import_module(module.name)
    # The digest of Triton's own files is part of each kernel's key. Computing it takes half a second, so this
    # process computes it once, and the forked processes inherit the result.
    triton_key()
    for index, descriptor in enumerate(descriptors):
        if os.fork() == 0:
            # The requesting process notices the end of a compiler process only if no other process holds the
            # same end of the connection.
            for other in descriptors[index + 1 :]:
                os.close(other)
            # The requesting process may send nothing for WAIT_SECONDS, or end at any time.
            with suppress(OSError):
                _serve(socket.socket(fileno=descriptor))
            os._exit(0)
        os.close(descriptor)
    for _ in descriptors:
        os.wait()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
