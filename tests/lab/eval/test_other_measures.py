"""Runs of the measures that need no judge: aspects and routing."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.drafting import DraftOptions
from specsot_app.fleet.opening import FleetClient, Opener, ring_of
from specsot_app.fleet.options import FleetOptions
from specsot_lab.eval.other_measures import aspects, routing, routing_prompts
from specsot_lab.eval.records import Folder
from specsot_lab.eval.running import Run
from specsot_lab.eval.tasks import Prompt
from tests.lab.eval.speaker import Broken, Speaker
from tests.lab.eval.test_running import ELSEWHERE

QUESTIONS = [Prompt("vicuna", str(n), "generic", (f"Why {n}?", "And then?")) for n in range(2)]
POINTS = {"Why 0?": {"Where": "here", "When": "now"}, "Why 1?": {"Who": "we", "how": "so", "Where": "so"}}


async def test_every_question_is_asked_once_directly_once_planned_and_then_sampled(tmp_path: Path) -> None:
    out, speaker, folder = io.StringIO(), Speaker(points=POINTS), Folder(tmp_path)
    run = Run(QUESTIONS, ELSEWHERE, 128, folder, opened(speaker), out, io.StringIO(), 3)
    with pytest.raises(Broken):
        await aspects(replace(run, opener=opened(Speaker(5))), 2)
    assert (await aspects(run, 2), out.getvalue()) == (1, "2 of 2 questions have no aspects or answers\n"), (
        "all say the same"
    )
    kept = (tmp_path / "records.jsonl").read_text().splitlines()
    asked = [(one["mode"], one["questions"]) for one in map(json.loads, kept)]
    assert sorted(asked) == sorted(
        (mode, [f"Why {n}?"]) for n in range(2) for mode in ("direct", "sot", "sampled 1", "sampled 2")
    )
    assert [
        (one.mode, one.sampling.temperature, one.seed, one.limits.max_new_tokens) for one in speaker.asked
    ] == [("sot", 0, None, 128), ("direct", 0.7, 1, 32), ("direct", 0.7, 2, 32)]


async def test_a_greeting_that_is_planned_went_the_wrong_way(tmp_path: Path) -> None:
    asked = [
        Prompt("routing", "1", "list", ("Why 0?",)),
        Prompt("routing", "2", "list", ("Why 2?",)),
        Prompt("routing", "3", "chit-chat", ("Why 1?",)),
    ]
    out = io.StringIO()
    speaker = Speaker(points=POINTS)
    run = Run(asked, ELSEWHERE, 128, Folder(tmp_path), opened(speaker), out, io.StringIO(), 2)
    assert await routing(run) == 0
    assert out.getvalue().endswith("list, not told: Why 2?\nchit-chat, not told: Why 1?\n")
    told = json.loads((tmp_path / "routing.json").read_text())
    assert [row["planned"] for row in told["rows"]] == [0.5, 1]


def test_routing_asks_forty_lists_and_sixty_others() -> None:
    asked = routing_prompts()
    assert [
        sum(one.category == name for one in asked) for name in ("list", "chit-chat", "maths", "code")
    ] == [40, 20, 20, 20]
    assert len({one.id for one in asked}) == 100


def opened(speaker: Speaker) -> Opener:
    async def opener(_: FleetOptions) -> FleetClient:
        return speaker

    return opener


def test_whole_trees_are_waited_for_however_busy_the_machine() -> None:
    usual = ring_of(FleetOptions()).draft_timeout
    assert ring_of(FleetOptions(drafting=DraftOptions(tuner="fixed"))).draft_timeout > 30 * usual
    assert ring_of(FleetOptions(tree="fixed")).draft_timeout > 30 * usual
