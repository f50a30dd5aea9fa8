"""Services by a fork of one process that has imported torch: seconds less for each.

They are processes of their own with all that follows, and run what `python -m` would run. What is not in the
parent's environment when torch is loaded, such as another number of threads, makes a process by exec as ever.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import multiprocessing
import os
import runpy
import signal
import sys
import termios
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any, TextIO

from specsot.service.runtime_env import set_runtime_defaults
from specsot_app.fleet.die_with_parent import end_with

RUNNER = "specsot_app.fleet.die_with_parent"
AT_IMPORT = ("OMP_", "MKL_", "TORCH", "TRITON", "PYTHON", "LD_")  # variables that are read while modules load
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.preloaded"])


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
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(AT_IMPORT)}


def install() -> None:
    """From now on `asyncio.create_subprocess_exec` forks what is a member of a fleet."""
    set_runtime_defaults()  # as commands do, whichever test runs the first one
    loaded, spawn = at_import(os.environ), asyncio.create_subprocess_exec

    async def start(*command: str, **how: Any) -> Any:
        if command[1:3] != ("-m", RUNNER) or at_import(how["env"]) != loaded:
            return await spawn(*command, **how)
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
