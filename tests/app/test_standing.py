"""How a master's state is told: lines, a picture, look after look; and at a pseudo-terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from specsot.core.info import Info, MemberInfo, ModelInfo, PagesInfo, ReplicaInfo, RequestsInfo, StepsInfo
from specsot.errors import Unavailable
from specsot.members import Range
from specsot_app.commands.status import is_complete
from specsot_app.terminal.status_view import (
    CURVE_LENGTH,
    StatusView,
    curve,
    draw_status,
    lines_of,
    status_views,
)
from tests.app.screen import Screen
from tests.forked import started

INFO = Info(
    models=(ModelInfo("demo", "abc", 8, 2048),),
    members=(
        MemberInfo("worker", "late", "b:2", "abc", Range(4, 8)),
        MemberInfo("worker", "early", "a:1", "abc", Range(0, 4), min_seconds=0.00065),
        MemberInfo("drafter", "head", "c:3", "abc", head="the MTP layer of demo"),
    ),
    epoch=2,
    ready=True,
    pages=PagesInfo(total=512, free=384, rows=256, kept=3),
    steps=StepsInfo(100, 420, 12.5, 4.2, 31.0, (0.001, 0.002)),
    requests=RequestsInfo(1, 2, 9, 0, 3, (("stop", 7),), 200, 50),
    version="1.2.3",
)


def test_every_fact_is_a_line() -> None:
    assert lines_of(INFO) == [
        "model     demo · 8 layers · 2048 positions",
        "worker    late at b:2 · layers 4:8 · 2.0 ms a step",
        "worker    early at a:1 · layers 0:4 · 1.0 ms a step, at least 0.7",
        "drafter   head at c:3 · drafts with the MTP layer of demo",
        "pages     384 of 512 free · 3 hold beginnings of prompts",
        "requests  2 running in 9 sequences · 1 waiting · 7 stop · 3 refused"
        " · 25% of prompt tokens were cached",
        "steps     12.5/s with 4.2 tokens and 31.0 rows each · 52 tokens/s · 100 steps, 420 tokens in all",
        "epoch     2 · ready",
        "version   1.2.3",
    ]


def test_a_rebalanced_ring_is_settled_when_the_newest_and_all_others_are_complete() -> None:
    formed = tuple(ReplicaInfo(n, 2, True, plan="a worker for all") for n in range(2))
    half = (formed[0], replace(formed[1], ready=False))
    assert is_complete(replace(INFO, replicas=formed), 2)
    assert not is_complete(replace(INFO, replicas=formed), 3), "that is the ring before"
    assert not is_complete(replace(INFO, replicas=formed, ready=False), 2)
    assert not is_complete(replace(INFO, replicas=half), 2)


def test_several_rings_are_distinguished() -> None:
    rings = tuple(
        ReplicaInfo(n, n + 5, n == 0, (), PagesInfo(8, 6, 16), StepsInfo(1, 1, 2.5, stages=(0.002 + n,)))
        for n in range(2)
    )
    members = tuple(MemberInfo("worker", f"w{n}", "a:1", "abc", Range(0, 8), replica=n) for n in range(2))
    lines = lines_of(Info(members=members, epoch=6, ready=True, replicas=rings, version="1"))
    assert lines == [
        "worker    w0 at a:1 · layers 0:8 · 2.0 ms a step · replica 0",
        "worker    w1 at a:1 · layers 0:8 · 1002.0 ms a step · replica 1",
        "epoch     6 · ready",
        "replica   0 · epoch 5 · ready · 6 of 8 pages free · 2.5 steps/s",
        "replica   1 · epoch 6 · not ready · 6 of 8 pages free · 2.5 steps/s",
        "version   1",
    ]


def test_a_master_without_a_ring_says_what_it_waits_for() -> None:
    lines = lines_of(Info(waiting_for=("1 of 1 workers",), version="1"))
    assert lines == ["epoch     0 · not ready", "waiting   1 of 1 workers", "version   1"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_is_one_line_a_fact_at_any_width(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(draw_status(StatusView(INFO, (0.0, 6.25, 12.5), "no process answers")))
    lines = console.export_text().splitlines()
    assert len(lines) == len(lines_of(INFO)) + 3  # pages used, the pace, the last line
    assert any("▁▅█" in line for line in lines)
    assert {line.partition(" ")[0] for line in lines_of(INFO)} <= {line.partition(" ")[0] for line in lines}
    assert lines[-1].startswith("no process answers")


def test_the_curve_of_nothing_is_flat() -> None:
    assert curve((0.0, 0.0)) == "▁▁"
    assert curve(()) == ""


async def test_a_lost_master_is_looked_for_and_found_again() -> None:
    answers: Iterator[Info | Exception] = iter(
        [INFO, Unavailable("no process answers at a:1"), replace(INFO, epoch=3), *[INFO] * CURVE_LENGTH]
    )

    async def look() -> Info:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pause() -> None: ...

    seen = status_views(look, pause)
    first, lost, found = [await anext(seen) for _ in range(3)]
    assert (first.lost, lost.info, found.lost, found.info.epoch) == (None, INFO, None, 3)
    assert lost.lost == "no process answers at a:1; retrying. Ctrl-C leaves"
    assert len([await anext(seen) for _ in range(CURVE_LENGTH)][-1].pace) == CURVE_LENGTH


async def test_a_master_that_was_never_there_is_an_error() -> None:
    async def look() -> Info:
        raise Unavailable("no process answers at a:1")

    async def pause() -> None: ...

    with pytest.raises(Unavailable):
        await anext(status_views(look, pause))


@pytest.mark.processes
def test_status_retries_if_its_master_is_lost(demo_model: Path) -> None:
    words = ["--model", str(demo_model / "base"), "--listen", "127.0.0.1:0"]
    master, lines = started("specsot_master", *words, "--log-format", "json")
    with lines:
        address = json.loads(lines.readline())["at"]
        with Screen("specsot_app", "status", "--master", address, "--every", "0.1") as screen:
            screen.wait_for("1 of 1 workers")
            screen.wait_for("Ctrl-C leaves")
            screen.wait_for("Ctrl-C leaves")  # another look
            master.kill()
            screen.wait_for("retrying")
            screen.type("\x03")
            assert screen.ends() == 0
