"""The pure parts of deploy/hosts: what an answer under faults is held to, and how that is told."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "deploy" / "hosts"))

import hosts
from trials import (
    STEP_PREFIX,
    Outcome,
    Report,
    ServiceLog,
    Step,
    Trial,
    outcome_of,
    run_steps,
    same_answer,
    table,
    trial_lines,
)

FIRST = Report("nothing", Outcome("An answer.", 2.0, 0.5), ())


@pytest.mark.parametrize(
    ("last", "text", "error"),
    [
        (json.dumps({"event": "finished", "text": "An answer."}), "An answer.", ""),
        (json.dumps({"event": "merged_text", "text": "An"}), None, "the answer ended with merged_text"),
        ("specsot: the ring is not complete", None, "specsot: the ring is not complete"),
        ("", None, "no output"),
    ],
)
def test_a_client_s_last_line_says_how_it_ended(last: str, text: str | None, error: str) -> None:
    assert outcome_of(last, 2.0, 0.5) == Outcome(text, 2.0, 0.5, error)


@pytest.mark.parametrize(("text", "alike"), [("An answer.", True), ("An answer", False), (None, False)])
def test_an_answer_is_held_to_the_undisturbed_one(text: str | None, alike: bool) -> None:
    report = Report("a fault", Outcome(text, 3.0, 1.5, "" if text else "gone"), ("master | member lost",))
    assert same_answer(FIRST, report) is alike
    ended = {True: "identical", False: "**another one**"}[alike] if text else "gone"
    assert table([FIRST, report])[-1] == f"| a fault | {ended} | 3.0 | 1.5 |"
    assert trial_lines(FIRST, report)[1:] == ["   master | member lost"]


def test_an_answer_that_was_written_before_anything_broke_proves_nothing() -> None:
    lines = ("master | 10:00:00 [info] finished steps=9", f"{STEP_PREFIX}cable out", "master | member lost")
    report = Report("a fault", FIRST.outcome, lines)
    assert report.late
    assert not same_answer(FIRST, report)
    assert "too late" in table([FIRST, report])[-1]
    assert not Report("a fault", FIRST.outcome, lines[::-1]).late


async def test_steps_wait_for_what_the_services_say(tmp_path: Path) -> None:

    service_log, writing, taken = (
        ServiceLog(["master | member lost: of an earlier trial"]),
        asyncio.Event(),
        list[str](),
    )

    async def pull() -> None:
        taken.append("pulled")
        service_log.lines.append("master | member lost name=worker-0")

    async def plug() -> None:
        taken.append("plugged")

    trial = Trial("a cable", (Step("out", pull), Step("in", plug, hosts.lost_pattern("worker-0"))))
    steps = asyncio.create_task(run_steps(trial, writing, service_log, 1))
    await asyncio.sleep(0)
    assert taken == []
    writing.set()
    await steps
    assert taken == ["pulled", "plugged"]


def test_what_serve_prints_is_started_on_the_host_it_names() -> None:
    line = "on 10.77.0.3: specsot-worker --model 'my models/base' --name worker-1 --insecure on"
    words = ["specsot-worker", "--model", "my models/base", "--name", "worker-1", "--insecure", "on"]
    assert hosts.parse_start_line(line) == ("worker-1", "c", words)
    assert hosts.parse_start_line("waiting for worker-1 on 10.77.0.3") is None
