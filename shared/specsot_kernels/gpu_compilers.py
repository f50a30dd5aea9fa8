"""Processes that compile Triton kernels for another process, each on a processor of its own.

Most of the time in which Triton compiles a kernel is spent in Python code, and threads of one process take
turns to run Python code. The processes of this module put what they compile into Triton's cache on disk, in
which the process that asked for a kernel then finds it. Importing this module imports NumPy with its package,
but neither Triton nor torch, so that the processes can import these while the process that starts them does.

    processes = CompilerProcesses(16)    # one process imports Triton and the kernels, then forks 16 others
    processes.compile(request)           # returns when the kernel is on disk, or could not be compiled
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
# Seconds. A process that gets no request for so long ends: this model has no kernels to compile, or its
# weights are still being fetched. A kernel that takes a process longer is compiled by the caller. Untuned.
WAIT_SECONDS: Final = 120.0
# Processors. On a machine with fewer, importing torch once more takes longer than the processes save.
# Untuned.
MIN_PROCESSORS: Final = 4


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """What a process needs to compile one form of a kernel.

    module: module that defines the kernel.
    name: name of the kernel in its module.
    target: what to compile for, as the arguments of Triton's `GPUTarget`: ("cuda", 90, 32).
    specialization: types and constants of the arguments, and the options: JSON that Triton has written, and
        that `JITFunction.preload` takes.
    """

    module: str
    name: str
    target: tuple[str, int | str, int]
    specialization: str


class CompilerProcesses:
    """Processes that compile kernels, at most one kernel each at the same time.

    They end when they are closed, after WAIT_SECONDS without a request, and when the process that has started
    them ends, however that happens: their connections are closed then.
    """

    def __init__(self, number: int) -> None:
        """Start the processes, without waiting for them.

        number: how many kernels can be compiled at the same time, at least 1.
        """
        self._free = SimpleQueue[socket.socket]()
        pairs = [socket.socketpair() for _ in range(number)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        command = [sys.executable, "-m", "specsot_kernels.gpu_compilers", *map(str, descriptors)]
        silent = subprocess.DEVNULL
        # The process forks, which is safe only without threads: NumPy would start some.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdin=silent, stdout=silent, stderr=silent, pass_fds=descriptors, env=environment
        )
        # Without this thread, the ended process would stay in the system's table until this one ends.
        Thread(target=process.wait, daemon=True).start()
        self._connections = [own for own, _ in pairs]
        for own, theirs in pairs:
            theirs.close()
            own.settimeout(WAIT_SECONDS)
            self._free.put(own)

    def compile(self, request: KernelRequest) -> None:
        """Let a process compile a kernel, and wait until that has ended. Errors are not reported: a kernel
        that a process could not compile is not in the cache, and compiling it here raises the error.

        request: the kernel. May be called from any thread; if all processes are busy, one is awaited.
        """
        connection = self._free.get()
        try:
            connection.sendall(json.dumps(asdict(request)).encode() + b"\n")
            connection.recv(1)
        # The process has ended, perhaps for want of memory, or takes too long.
        except OSError:
            pass
        finally:
            self._free.put(connection)

    def close(self) -> None:
        """End the processes, without waiting for them. No kernel may be compiled at that time or later."""
        for connection in self._connections:
            connection.close()


# The processes of this process, from `start_unless_compiled` to `stop`.
_running: CompilerProcesses | None = None
# Files that `stop` makes, which record that the kernels were compiled that this process needs.
_marks = set[Path]()


def running() -> CompilerProcesses | None:
    """Return the processes that have been started and not stopped; None if there are none."""
    return _running


def start_unless_compiled(*facts: object) -> None:
    """Start the processes, without waiting for them, unless kernels for these facts were compiled on this
    machine before. They import torch and Triton first, so call it before this process does the same. If the
    processes run already, `stop` records these facts, too.

    Nothing happens on machines with fewer than MIN_PROCESSORS processors, without Triton, and in Triton's
    interpreter.

    facts: what decides which kernels are needed, such as the model and the type of its numbers. Values are
        compared by `str`.
    """
    global _running
    processors = os.cpu_count() or 1
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    mark = _mark(facts)
    if processors < MIN_PROCESSORS or not find_spec("triton") or interpreted or mark.exists():
        return
    _marks.add(mark)
    _running = _running or CompilerProcesses(min(processors, MAX_PROCESSES))


def stop() -> None:
    """End the processes if they run, and record that the kernels were compiled. No kernel may be compiled at
    that time.
    """
    global _running
    if _running:
        _running.close()
        _running = None
        # The cache may be read-only.
        with suppress(OSError):
            for mark in _marks:
                mark.touch()


def _mark(facts: Sequence[object]) -> Path:
    """Return the path of an empty file, which exists once the kernels of these source files were compiled for
    the facts. It is in Triton's cache, so that it disappears together with the kernels.

    facts: what decides which kernels are needed.
    """
    sources = sorted(Path(__file__).with_name("gpu").glob("*.py"))
    digest = sha256(b"".join(source.read_bytes() for source in sources))
    digest.update(repr([str(fact) for fact in facts]).encode())
    home = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    return Path(os.environ.get("TRITON_CACHE_DIR") or home) / f"specsot-{digest.hexdigest()[:16]}"


class _OneTarget:
    """What Triton asks of a driver before it compiles. No CUDA context is made."""

    def __init__(self, target: Any) -> None:
        """Stand for the driver of a target.

        target: the `GPUTarget` to compile for.
        """
        self._target = target

    def get_current_device(self) -> object:
        """Return what tells this target's compiled kernels from those of another: the target itself."""
        return self._target

    def get_current_target(self) -> object:
        """Return the target."""
        return self._target


def _compile(request: KernelRequest) -> None:
    """Compile a kernel into Triton's cache on disk. Raises what Triton raises.

    request: the kernel.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    stand_in: Any = _OneTarget(GPUTarget(*request.target))
    driver.set_active(stand_in)
    getattr(import_module(request.module), request.name).preload(request.specialization)


def _serve(connection: socket.socket) -> None:
    """Compile one kernel after the other, until the other end of the connection is closed. After each, one
    byte is sent, also if the kernel could not be compiled. Raises TimeoutError after WAIT_SECONDS without a
    request.

    connection: receives requests, one JSON object a line.
    """
    connection.settimeout(WAIT_SECONDS)
    for line in connection.makefile("rb"):
        with suppress(Exception):
            _compile(KernelRequest(**json.loads(line)))
        connection.sendall(b"\n")


def main(descriptors: Sequence[int]) -> None:
    """Import Triton and all kernels, then serve each connection in a process of its own until all are closed.

    descriptors: numbers of inherited files, each a socket.
    """
    from triton.runtime.cache import triton_key

    gpu = import_module("specsot_kernels.gpu")
    for module in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
        import_module(module.name)
    # A digest of Triton's own files, which is part of the key of each kernel. It takes half a second, and
    # Triton keeps it.
    triton_key()
    for index, descriptor in enumerate(descriptors):
        if os.fork() == 0:
            # The other process notices that this one has ended only if no third one has its connection.
            for other in descriptors[index + 1 :]:
                os.close(other)
            # The other process may be idle, or leave at any time.
            with suppress(OSError):
                _serve(socket.socket(fileno=descriptor))
            os._exit(0)
        os.close(descriptor)
    for _ in descriptors:
        os.wait()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
