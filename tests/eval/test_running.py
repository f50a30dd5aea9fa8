"""A run keeps every answer as it comes, and goes on behind the last one."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specsot.errors import InvalidRequest
from specsot.events import Finished, Numbered, Reason, Started, Statistics
from specsot.params import Ask
from specsot_app.eval.running import evaluate, read_records
from specsot_app.eval.tasks import read_task
from specsot_app.fleets import Fleet, Wanted


class Broken(Exception):
    """The run is ended from outside."""


class Speaker:
    """A fleet that says 160 to everything, refuses one question, and breaks off after `answers`."""

    def __init__(self, answers: int, refused: str = "") -> None:
        self.left, self.refused, self.asked = answers, refused, list[Ask]()

    async def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        self.asked.append(ask)
        if self.left == 0:
            raise Broken
        if self.refused and self.refused in str(ask.prompt):
            raise InvalidRequest("too long")
        self.left -= 1
        yield Numbered(0, Started("r", "demo", ask.mode, 1, 3))
        yield Numbered(1, Finished(Reason.STOP, "160", (1,), Statistics(completion_tokens=9, seconds=1.0)))

    async def cancel(self, request: str) -> None: ...

    async def info(self) -> None: ...

    async def close(self) -> None: ...


async def ask(speaker: Speaker, output: Path) -> str:
    async def opener(_: Wanted) -> Fleet:
        return speaker

    out = io.StringIO()
    prompts = read_task("gsm8k")[:2]
    assert await evaluate(prompts, Wanted(), 8, output, out, io.StringIO(), opener) == 0
    return out.getvalue()


async def test_a_run_that_was_broken_off_asks_only_what_is_left(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        await ask(Speaker(3), tmp_path)
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"task": "gsm8k", "cut')
    speaker = Speaker(9)
    told = await ask(speaker, tmp_path)
    assert [(one.mode, one.limits.max_new_tokens) for one in speaker.asked] == [("sot", 8)]
    assert [one["scores"]["final_number"] for one in read_records(tmp_path / "records.jsonl")] == [1, 1, 0, 0]
    assert "gsm8k/math" in told
    assert "means nothing" in told


async def test_what_was_refused_is_told_and_not_scored(tmp_path: Path) -> None:
    told = await ask(Speaker(9, refused="Carla"), tmp_path)
    assert "not answered: gsm8k 0 (direct): too long" in told
