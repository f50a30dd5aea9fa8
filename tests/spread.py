"""Files of tests side by side, in processes that are forked once everything is imported and collected.

A process takes file after file, so what a file's tests share is made once. What pytest-xdist starts imports
and collects all tests again in each process: ten seconds of a core. Where there are several, one more process
takes the files whose tests mostly wait: their 85 s need a third as many of a processor.
"""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import signal
import struct
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from specsot_app.fleet.die_with_parent import end_with

# What is compiled or loaded when it is first used: once, for all processes. What many files
# load late belongs here.
LAZY = (
    ("torch", "torch.distributed.fsdp"),  # With sympy: when Transformers first saves or opens a model.
    ("matplotlib", "matplotlib.figure"),
    ("transformers", "transformers.models.llama.modeling_llama"),
    ("transformers", "transformers.generation"),
)
WAITING = {
    f"tests/{name}.py"
    for name in (
        "app/test_standing",
        "endpoints/test_invariant_09_liveness",
        "fleet/test_standby",
        "http/test_page",
        "lab/test_ring_bench",
        "laws/test_processes",
        "master/test_trying",
        "rpc/test_links",
        "rpc/test_links_direct",
        "rpc/test_master_service",
        "rpc/test_uplink",
    )
}
FILE = struct.Struct("<H")  # a number in the pipe that is the list of files which nobody has taken yet


class Reporter:
    """In a forked process: what is said of tests goes to the process that shows it."""

    def __init__(self, config: pytest.Config, told: Connection) -> None:
        self._config, self._told = config, told

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._told.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._told.send((nodeid, location))


def run(session: pytest.Session, count: int) -> None:
    """All tests of a session, in so many processes. Raises what ends a session early."""
    for library, name in LAZY:
        if find_spec(library):
            import_module(name)
    if find_spec("numba"):
        from specsot_kernels.cpu.kernel import kernel_address

        kernel_address()
    gc.freeze()  # What was imported here need not be looked at, either.
    config = session.config
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if (forked := sys.modules.get("tests.forked")) is not None:
        forked.serve(capture.stop_global_capturing)
    lists = lists_of(session.items, count)
    base: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    parent, children = os.getpid(), dict[Connection, int]()
    for number, (own, left) in enumerate(lists):
        heard, told = Pipe(duplex=False)
        if (child := os.fork()) == 0:
            end_with(parent)
            for other in (heard, *children):
                other.close()  # so that who says something to nobody ends
            work(session, taken(own, left), told, base / f"fork{number}")
        told.close()
        children[heard] = child
    for left in {left for _, left in lists}:
        os.close(left)
    try:
        listen(session, children)
    except BaseException:
        for child in children.values():
            os.kill(child, signal.SIGKILL)
        raise
    finally:
        for child in children.values():
            os.waitpid(child, 0)


def work(session: pytest.Session, items: Iterator[pytest.Item], told: Connection, base: Path) -> None:
    """In a forked process, which ends here."""
    config = session.config
    try:
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(Reporter(config, told))
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # into a file that all would write to
        capture.start_global_capturing()
        base.mkdir()
        config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        told.send(None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def lists_of(items: list[pytest.Item], count: int) -> list[tuple[list[list[pytest.Item]], int]]:
    """For each process the files it may take, and which nobody has taken yet."""
    files = [(name, [*own]) for name, own in groupby(items, file_of)]
    waiting = [own for name, own in files if name in WAITING and count > 1]
    busy = [own for name, own in files if name not in WAITING or count == 1]
    return [(busy, listed(busy))] * count + ([(waiting, listed(waiting))] if waiting else [])


def listed(files: list[list[pytest.Item]]) -> int:
    """A pipe that holds the number of each, until somebody takes it."""
    left, end = os.pipe()
    os.write(end, b"".join(FILE.pack(number) for number in range(len(files))))
    os.close(end)
    return left


def taken(files: list[list[pytest.Item]], left: int) -> Iterator[pytest.Item]:
    while number := os.read(left, FILE.size):
        yield from files[FILE.unpack(number)[0]]


def listen(session: pytest.Session, children: dict[Connection, int]) -> None:
    config, hook, going = session.config, session.config.hook, set(children)
    while going:
        for heard in wait([*going]):
            assert isinstance(heard, Connection)
            try:
                what = heard.recv()
            except EOFError:
                raise session.Failed("a process of the tests ended before it had done its part") from None
            if what is None:
                going.remove(heard)
            elif isinstance(what, dict):
                report = hook.pytest_report_from_serializable(config=config, data=what)
                hook.pytest_runtest_logreport(report=report)
            else:
                hook.pytest_runtest_logfinish(nodeid=what[0], location=what[1])
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
