"""What the lab counts of branches, which form it names, and what it keeps beside the model."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.core.skeleton import Point
from specsot.errors import InvalidRequest
from specsot.events import Finished, Numbered, Planned, Reason, Started, Statistics
from specsot.params import Ask
from specsot_app.fleet.opening import FleetClient
from specsot_app.fleet.options import FleetOptions
from specsot_lab.eval import wording
from specsot_lab.eval.core.branch_faults import BranchFaults, WrittenPlan, choose_form, measure
from specsot_master.core.plans.router import decide_question
from specsot_master.core.plans.wording import FORMS, Form, Wording
from specsot_master.prompts import Prompts, read_parts
from tests.lab.eval.speaker import Speaker
from tests.master.stage import TEXT
from tests.master.test_prompts import QWEN, with_template

QUESTION = "How can I improve my sleep?"
TITLES = ("Regular schedule", "Less caffeine")
GOOD = (
    "A regular schedule sets the body's clock. Get up at seven every day.",
    "Less caffeine means a calmer evening. Stop drinking coffee at noon.",
)


def faults(*texts: str, question: str = QUESTION, titles: tuple[str, ...] = TITLES) -> BranchFaults:
    return measure([WrittenPlan(question, titles, texts)])


def test_branches_that_people_would_send_have_no_faults() -> None:
    found = faults(*GOOD)
    assert (found.branches, found.total) == (2, 0)
    assert found.words == 12.5


@pytest.mark.parametrize(
    ("fault", "texts", "share"),
    [
        ("shared_openings", (f"Sleep is a good thing. {GOOD[0]}", f"Sleep is a good thing. {GOOD[1]}"), 1.0),
        ("restated", (f"You can improve your sleep. {GOOD[0]}", GOOD[1]), 0.5),
        ("lists", (f"{GOOD[0]}\n1. Get up", GOOD[1]), 0.5),
        ("lists", (f"{GOOD[0]}\n- Get up", GOOD[1]), 0.5),
        ("other_points", (f"{GOOD[0]} So is less caffeine.", GOOD[1]), 0.5),
        ("own_form", (f"Here are two sentences. {GOOD[0]}", GOOD[1]), 0.5),
        ("own_form", (f"Erster Satz: {GOOD[0]}", f"**Primera frase:** {GOOD[1]}"), 1.0),
        ("own_form", (f'Heading: "Regular schedule". {GOOD[0]}', f"第一句：{GOOD[1]}"), 1.0),
        ("off_title", ("Buy a new bed. Open the window.", GOOD[1]), 0.5),
        ("short", ("A regular schedule helps.", GOOD[1]), 0.5),
        ("short", ("", GOOD[1]), 0.5),
    ],
)
def test_a_fault_is_the_share_of_branches_that_have_it(
    fault: str, texts: tuple[str, ...], share: float
) -> None:
    found = faults(*texts)
    assert getattr(found, fault) == share
    assert found.total > 0


def test_runs_of_four_words_are_looked_for_in_the_other_branches() -> None:
    found = faults("one two three four five", "zero one two three four", titles=("one", "two"))
    assert found.shared_grams == 0.5


def test_han_script_is_counted_by_its_characters() -> None:
    texts = ("规律作息很重要。每天七点起床。", "规律作息很好。少喝咖啡。")
    found = faults(*texts, question="如何改善睡眠？", titles=("规律作息", "少喝咖啡"))
    assert found.shared_openings == 1.0
    assert found.off_title == 0.0


def test_nothing_written_has_no_faults() -> None:
    assert measure([]).branches == 0
    assert measure([]).total == 0.0


def test_the_form_with_the_fewest_faults_is_named_and_the_default_wins_ties() -> None:
    none = faults(*GOOD)
    some = replace(none, total=0.5)
    forms: dict[Form, BranchFaults] = {"question": some, "outline": some, "turns": some, "article": some}
    assert choose_form(forms) == "article"
    assert choose_form({**forms, "turns": none}) == "turns"
    assert choose_form({**forms, "question": none}) == "question"


def test_what_was_measured_is_what_the_master_reads_and_other_keys_stay(tmp_path: Path) -> None:
    file = tmp_path / "specsot.json"
    measured = {"turns": faults(*GOOD)}
    wording.store_form(file, "turns", measured)
    parts = read_parts(tmp_path)
    assert parts is not None
    assert parts.wording == Wording("turns")
    file.write_text(
        json.dumps({"plan_style": "list", "wording": {"sentences": {"de": {"at_most": "{count}"}}}})
    )
    wording.store_form(file, "question", measured)
    parts = read_parts(tmp_path)
    assert parts is not None
    assert (parts.plan_style, parts.wording.form) == ("list", "question")
    assert parts.wording.sentences["de"].at_most == "{count}"


def test_the_bundled_questions_are_planned_and_no_fewer_than_thirty(tmp_path: Path) -> None:
    bundled = wording.read_questions(None)
    assert len(bundled) >= 30
    assert all(decide_question(question).mode == "sot" for question in bundled)
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"question": "Why?"}) + "\n")
    with pytest.raises(InvalidRequest, match="has 1 questions; at least 30"):
        wording.read_questions(file)
    file.write_text("{}")
    with pytest.raises(InvalidRequest, match="KeyError"):
        wording.read_questions(file)


class Writer(Speaker):
    """Plans two points for every question, and writes each of them well in one form of words only."""

    async def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        self.asked.append(ask)
        yield Numbered(0, Started("r", "demo", ask.mode, 1, 3))
        if ask.mode == "sot":
            yield Numbered(1, Planned(tuple(Point(id, 1, title) for id, title in enumerate(TITLES, 1))))
            return
        prompt = TEXT.decode(ask.tokens)
        text = GOOD[TITLES[1] in prompt.rpartition("Point ")[2]] if "Now write" in prompt else "1. No."
        yield Numbered(1, Finished(Reason.STOP, text, (1,), Statistics()))


def test_a_run_names_the_form_that_a_model_writes_best_in_and_goes_on_where_it_was(tmp_path: Path) -> None:
    text, _ = with_template(tmp_path, QWEN)
    speaker = Writer()
    answers = wording.Answers(speaker, tmp_path / "answers.jsonl", 4)
    run = wording.Measurement(Prompts(tmp_path, text), text, answers)
    questions = [f"{QUESTION} Number {n}." for n in range(3)]
    found = asyncio.run(wording._measure_forms(run, questions, io.StringIO()))
    out = io.StringIO()
    assert wording.print_best_form(found, out) == "turns"
    assert "the form with the fewest faults is turns" in out.getvalue()
    assert found["turns"].branches == 6
    asked = len(speaker.asked)
    assert asked == 3 + 3 * 2 * len(FORMS)
    again = wording.Measurement(
        Prompts(tmp_path, text), text, wording.Answers(speaker, tmp_path / "answers.jsonl", 4)
    )
    assert asyncio.run(wording._measure_forms(again, questions, io.StringIO())) == found
    assert len(speaker.asked) == asked


async def test_a_fleet_elsewhere_has_no_file_to_write_to(tmp_path: Path) -> None:
    async def opener(_: FleetOptions) -> FleetClient:
        raise AssertionError

    given = FleetOptions(master="127.0.0.1:1")
    with pytest.raises(InvalidRequest, match="--master cannot be used"):
        await wording.evaluate(given, None, tmp_path, False, 1, opener, io.StringIO(), io.StringIO())
