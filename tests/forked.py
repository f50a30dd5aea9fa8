"""Services by a fork of one process that has imported torch: seconds less for each.

They are processes of their own with all that follows, and run what `python -m` would run. What is not in the
parent's environment when torch is loaded, such as another number of threads, makes a process by exec as ever.
Where files of tests go side by side, what they are forked from is forked too (`serve`), and imports nothing.

Start a process only where the process itself is tested, and by this fork, unless its start is what is tested.
Forms are compiled in the test's own process (`compile_here` in `tests/conftest.py`), and command lines of one
installation share a process.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import gc
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import termios
import traceback
import weakref
from collections.abc import Callable, Mapping
from importlib import import_module, reload
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any, TextIO

from specsot.service.runtime_env import set_runtime_defaults
from specsot_app.fleet.die_with_parent import end_with

RUNNER = "specsot_app.fleet.die_with_parent"
AT_IMPORT = ("OMP_", "MKL_", "TORCH", "TRITON", "PYTHON", "LD_")  # variables that are read while modules load
OWN = "TORCHINDUCTOR_CACHE_DIR"  # torch sets it itself, where a test loads its compiler
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.preloaded"])
SPAWN = asyncio.create_subprocess_exec


class Forked:
    """As much of `asyncio.subprocess.Process` as `ChildProcess` needs."""

    def __init__(self, process: ForkServerProcess, stdout: asyncio.StreamReader) -> None:
        self._process, self.stdout = process, stdout
        self.pid: int = process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        while self._process.exitcode is None:
            sentinel = os.dup(self._process.sentinel)  # a reader of its own for each who waits
            loop.add_reader(sentinel, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(sentinel)
                os.close(sentinel)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def run(
    files: tuple[Any, Any],
    folder: str,
    environment: Mapping[str, str],
    module: str,
    arguments: tuple[str, ...],
) -> None:
    """In the new process: what the product asks `die_with_parent` for. files: what it reads, and writes."""
    import_module("tests.preloaded")  # done already; the process that forks says nothing where it cannot be
    os.setsid()
    end_with(os.getppid())
    read, written = (file.detach() for file in files)
    for number, file in enumerate((read, written, written)):
        os.dup2(file, number)
    os.close(read)
    os.close(written)
    sys.stdin = os.fdopen(0)  # multiprocessing has closed it
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches it
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what started the tests may ignore it
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    try:
        sys.modules.pop(f"{module}.__main__", None)  # a test may have loaded it; no new process has
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in environment if name.startswith(AT_IMPORT) and name != OWN}


def install() -> None:
    """From now on `asyncio.create_subprocess_exec` forks what is a member of a fleet."""
    set_runtime_defaults()  # as commands do, whichever test runs the first one
    loaded = at_import(os.environ)

    async def start(*command: str, **how: Any) -> Any:
        if command[1:3] != ("-m", RUNNER) or not command[4:] or at_import(how["env"]) != loaded:
            return await SPAWN(*command, **how)
        module, *arguments = command[4:]
        read, write = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        process = await asyncio.to_thread(fork, (nothing, write), dict(how["env"]), module, tuple(arguments))
        os.close(nothing)
        os.close(write)
        stdout = asyncio.StreamReader(limit=how["limit"])
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(read, "rb", 0)
        )
        return Forked(process, stdout)

    asyncio.create_subprocess_exec = start


def serve(leave: Callable[[], object]) -> None:
    """Fork, while there are no threads, what services of this process and of its children are forked from.

    leave: called there, to end what is this process' own.
    """
    import_module("tests.preloaded")
    resource_tracker.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, held = os.pipe()
        sys.stdout.flush()
        if os.fork() == 0:
            try:
                os.close(held)
                leave()
                as_if_new()
                forkserver.main(os.dup(listener.fileno()), alive, [])
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(alive)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd = address, held
    server.ensure_running = lambda: None  # it is nobody's child among those that ask


def as_if_new() -> None:
    """Without what is the tests': log handlers, folders that go at the end, forks in place of `python -m`."""
    from specsot_master.engine import grammar_sandbox

    gc.set_threshold(700, 10, 10)  # Python's own
    logging.root.handlers.clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    asyncio.create_subprocess_exec = SPAWN
    reload(grammar_sandbox)  # which tries forms in a process of its own
    sys.stdout = sys.__stdout__
    if exporting := sys.modules.get("opentelemetry.sdk.trace.export"):
        reload(exporting)  # spans go to what was stdout when it was imported
    sys.meta_path[:] = [one for one in sys.meta_path if not rewrites(one)]
    for name, module in [*sys.modules.items()]:
        if rewrites(getattr(module, "__loader__", None)):
            del sys.modules[name]  # whoever runs it reads it anew


def rewrites(importer: object) -> bool:
    """Whether it is pytest's, which knows no `python -m`."""
    return type(importer).__name__ == "AssertionRewritingHook"


def started(module: str, *arguments: str, typed: str = "") -> tuple[ForkServerProcess, TextIO]:
    """What `python -m` would run, with this environment: the process, and all it writes.

    typed: all that it reads.
    """
    (theirs, ours), (read, write) = os.pipe(), os.pipe()
    os.write(ours, typed.encode())
    os.close(ours)
    process = fork((theirs, write), dict(os.environ), module, arguments)
    os.close(theirs)
    os.close(write)
    return process, open(read, encoding="utf-8")


def ran(module: str, *arguments: str, typed: str = "") -> tuple[int | None, list[str]]:
    """Its exit status, and the lines it wrote."""
    process, lines = started(module, *arguments, typed=typed)
    with lines:
        told = lines.read().splitlines()
    process.join()
    return process.exitcode, told


def fork(
    files: tuple[int, int], environment: dict[str, str], module: str, arguments: tuple[str, ...]
) -> ForkServerProcess:
    """The first time it takes the seconds of loading torch. files: what it reads, what it writes."""
    read, written = files
    given = ((PipeEnd(read), PipeEnd(written)), os.getcwd(), environment, module, arguments)
    process = FORKING.Process(target=run, args=given, daemon=True)
    process.start()
    return process


class PipeEnd:
    """A file descriptor that travels with what a process is started with."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return unchanged, (DupFd(self._number),)


def unchanged(one: Any) -> Any:
    return one
