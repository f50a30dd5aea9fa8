"""How long direct answers are, by class, and what is stored next to the model."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specsot.errors import InvalidRequest
from specsot.events import Finished, Numbered, Reason, Started, Statistics
from specsot.params import Ask
from specsot_app.fleet.opening import FleetClient
from specsot_app.fleet.options import FleetOptions
from specsot_lab.eval import lengths
from specsot_lab.eval.core.usual_lengths import (
    MIN_ANSWERS,
    MeasuredAnswer,
    count_near,
    lengths_of,
    rows_of,
    usual_length,
)
from specsot_master.core.plans.answer_forms import UsualLengths
from specsot_master.core.plans.router import decide_question
from specsot_master.core.plans.wording import ANSWER_TOKENS, language_of
from specsot_master.prompts import read_parts
from specsot_master.text import Text
from tests.lab.eval.speaker import Speaker
from tests.master.test_prompts import QWEN, with_template

QUESTIONS = tuple(f"What are the benefits of {thing}?" for thing in ("tea", "sport", "sleep", "bees", "rain"))
INTRODUCTION = "There are several benefits."
ITEM = "It is so, and it is so again, and again, as anyone can see who has a look at it for a while."
PLAIN = f"{INTRODUCTION}\n\n1. Health: {ITEM}\n2. Time: {ITEM}"
TITLED = f"{INTRODUCTION}\n\n1. **Health**: {ITEM}\n2. **Time**: {ITEM}"
SHORT = f"{INTRODUCTION} That is all."


@pytest.mark.parametrize("tokens", [[200, 210, 220, 900], [300], [100, 500, 510], [3], [640, 20, 30, 21]])
def test_the_usual_length_is_near_to_most_answers(tokens: list[int]) -> None:
    best = max(count_near(length, tokens) for length in range(10, 1200, 10))
    assert count_near(usual_length(tokens), tokens) == best


def english(form: str, count: int, tokens: int, kind: str = "list") -> list[MeasuredAnswer]:
    return [MeasuredAnswer("en", kind, form, tokens)] * count  # type: ignore[arg-type]


def test_a_class_with_few_answers_has_the_length_of_a_larger_class() -> None:
    answers = english("plain", 9, 200) + english("titled", 2, 900) + english("plain", 5, 400, "comparison")
    found = lengths_of(answers)["en"]
    assert abs(found["list"]["plain"] - 200) <= 40
    assert abs(found["comparison"]["plain"] - 400) <= 80
    assert (
        found["list"]["titled"] == found["comparison"]["titled"] == usual_length([a.tokens for a in answers])
    )


def test_a_language_with_few_answers_is_left_out() -> None:
    assert lengths_of(english("plain", MIN_ANSWERS - 1, 200)) == {}


def test_the_table_has_a_row_for_each_class_with_answers() -> None:
    answers = english("plain", 6, 200) + english("titled", 1, 900)
    rows = rows_of(answers, lengths_of(answers))
    assert [(row["form"], row["answers"], row["near"]) for row in rows] == [("plain", 6, 6), ("titled", 1, 0)]


def measured(text: Text, answer: str, reason: Reason = Reason.STOP) -> MeasuredAnswer | None:
    finished = Finished(reason, answer, text.encode(answer), Statistics())
    return lengths.measured_answer(QUESTIONS[0], finished, text, None)


def test_only_answers_that_a_planned_one_would_replace_are_counted(tmp_path: Path) -> None:
    text, _ = with_template(tmp_path, QWEN)
    tokens = len(text.encode(PLAIN))
    assert measured(text, PLAIN) == MeasuredAnswer("en", "list", "plain", tokens)
    titled = measured(text, TITLED)
    assert titled is not None
    assert titled.form == "titled"
    assert measured(text, SHORT) is None
    assert measured(text, f"1. Health: {ITEM}\n2. Time: {ITEM}") is None, "it has no introduction"
    assert measured(text, PLAIN, Reason.LENGTH) is None, "how long it would have been is unknown"


def test_what_was_measured_is_what_the_master_reads_and_other_keys_stay(tmp_path: Path) -> None:
    file = tmp_path / "specsot.json"
    file.write_text(
        json.dumps(
            {
                "plan_style": "list",
                "wording": {"form": "turns", "answer_tokens": {"de": {"list": {"plain": 77}}}},
            }
        )
    )
    answers = english("plain", 9, 200) + english("titled", 9, 400)
    lengths.store_lengths(file, answers)
    parts = read_parts(tmp_path)
    assert parts is not None
    assert (parts.plan_style, parts.wording.form) == ("list", "turns")
    found = lengths_of(answers)["en"]["list"]
    assert parts.wording.lengths_of(QUESTIONS[0]) == UsualLengths(found["plain"], found["titled"])
    assert parts.wording.lengths_of("Welche Vorteile hat Tee?").plain == 77
    assert parts.wording.lengths_of("喝茶有哪些好处？") == ANSWER_TOKENS["zh"]["list"]


class Answerer(Speaker):
    """Answers every question directly with the same text."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        self.text = text

    async def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        self.asked.append(ask)
        yield Numbered(0, Started("r", "demo", ask.mode, 1, 3))
        yield Numbered(1, Finished(Reason.STOP, PLAIN, self.text.encode(PLAIN), Statistics()))


@pytest.mark.parametrize("write", [False, True])
async def test_one_command_measures_the_lengths_and_writes_them_for_the_master(
    tmp_path: Path, demo_model: Path, write: bool
) -> None:
    speaker = Answerer(with_template(tmp_path, QWEN)[0])
    shutil.copy(demo_model / "base" / "config.json", tmp_path)

    async def opener(_: FleetOptions) -> FleetClient:
        return speaker

    file = tmp_path / "mine.jsonl"
    asked = (*QUESTIONS, "What is 2 + 2?")
    file.write_text("".join(json.dumps({"question": question}) + "\n" for question in asked))
    out = io.StringIO()
    options = FleetOptions(model=str(tmp_path))
    assert await lengths.evaluate(options, file, write, 2, opener, out, io.StringIO()) == 0
    assert [ask.mode for ask in speaker.asked] == ["direct"] * len(QUESTIONS), "only what is planned is asked"
    assert speaker.closed
    assert "0 of 5 answers are short" in out.getvalue()
    parts = read_parts(tmp_path)
    tokens = parts.wording.lengths_of(QUESTIONS[0]).plain if parts else None
    assert (tokens == usual_length([len(speaker.text.encode(PLAIN))])) == write


async def test_a_fleet_elsewhere_has_no_file_to_write_to() -> None:
    async def opener(_: FleetOptions) -> FleetClient:
        raise AssertionError

    given = FleetOptions(master="127.0.0.1:1")
    with pytest.raises(InvalidRequest, match="--master cannot be used"):
        await lengths.evaluate(given, None, False, 1, opener, io.StringIO(), io.StringIO())


def test_the_bundled_questions_are_planned_in_four_languages() -> None:
    bundled = lengths.read_questions(None)
    rows = [json.loads(line) for line in lengths_file().read_text().splitlines()]
    assert len(bundled) == len(rows) >= 100
    for row in rows:
        assert decide_question(row["question"]).mode == "sot", row
        assert language_of(row["question"]) == row["language"], row


def lengths_file() -> Path:
    return Path(lengths.__file__).parent / "data" / "lengths.jsonl"


def test_questions_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("{}")
    with pytest.raises(InvalidRequest, match="KeyError"):
        lengths.read_questions(file)
    file.write_text(json.dumps({"question": "What is 2 + 2?"}) + "\n")
    with pytest.raises(InvalidRequest, match="no question that is planned"):
        lengths.read_questions(file)
