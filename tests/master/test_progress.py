"""When an engine counts as hung: tables over passed-in times."""

from __future__ import annotations

import asyncio
import gc

import pytest
from structlog.testing import capture_logs

from specsot.service.options import ServiceOptions
from specsot.tasks import start
from specsot_master.config import MasterConfig
from specsot_master.core.stats import StallDetector
from specsot_master.service import running_alongside, serve
from tests.master.stage import BASE

Look = tuple[float, int, bool, bool]  # (time, steps so far, owed, moves)


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([(0, 0, False, True), (1000, 0, False, True)], id="idle is healthy"),
        pytest.param([(0, 0, False, True), (1, 0, True, True), (9.9, 0, True, True), (10, 0, True, False)],
                     id="work and no step"),
        pytest.param([(0, 0, True, True), (9, 1, True, True), (18, 2, True, True), (28, 2, True, False)],
                     id="slow steps are steps"),
        pytest.param([(0, 0, True, True), (10, 0, True, False), (11, 1, True, True)], id="it moves again"),
        pytest.param([(0, 0, True, True), (10, 0, True, False), (11, 0, False, True), (15, 0, True, True)],
                     id="nobody waits any more"),
        pytest.param([(1000, 0, True, True), (1010, 0, True, False)], id="nobody looked before"),
    ],
)  # fmt: skip
def test_progress(looks: list[Look]) -> None:
    progress = StallDetector(10)
    assert [progress.is_moving(steps, owed, now) for now, steps, owed, _ in looks] == [
        one[3] for one in looks
    ]


async def test_a_master_ends_with_the_tasks_that_tell_how_it_stands() -> None:
    """A dead reporter would leave its health at what it last was."""

    async def report() -> None:
        raise KeyError("stage")

    with pytest.raises(KeyError, match="stage"):
        async with running_alongside(asyncio.Event().wait(), report()):
            await asyncio.Event().wait()


async def test_once_a_master_listens_no_collection_stops_it_for_what_it_has_loaded() -> None:
    leaving, loaded = asyncio.Event(), len(gc.get_objects())
    leaving.set()
    try:
        config = MasterConfig(BASE, service=ServiceOptions())
        await serve(config, leaving)
        assert gc.get_freeze_count() > loaded / 2 > len(gc.get_objects())
    finally:
        gc.unfreeze()


async def test_tasks_that_run_alongside_a_block_end_with_it() -> None:
    ended = asyncio.Event()

    async def tend() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with running_alongside(tend()):
        await asyncio.sleep(0)
    assert ended.is_set()
    with pytest.raises(ValueError, match="mine"):
        async with running_alongside(tend()):
            raise ValueError("mine")


async def test_a_background_tasks_failure_is_logged_and_reported() -> None:
    told = asyncio.Queue[BaseException]()

    async def fail() -> None:
        raise KeyError("stage")

    with capture_logs() as logs:
        start(fail(), told.put_nowait)
        assert isinstance(await told.get(), KeyError)
        start(asyncio.sleep(1000), told.put_nowait).cancel()
        await asyncio.sleep(0)
    assert told.empty()
    (line,) = logs
    assert line["log_level"] == "error"
    assert line["task"].endswith("fail")
