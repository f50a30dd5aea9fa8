"""Answers with a form, by the demo model: they have it whoever drafts, and wrong forms are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specsot import SpecSoT
from specsot.errors import InvalidRequest
from specsot.events import Reason
from specsot.params import MAX_FORM_BYTES, Form
from specsot_app.cli import main
from specsot_app.core.ask import ask_of
from tests.conftest import some
from tests.constraint.forms import PATTERN, PERSON, TREE, has_form, schema

pytestmark = [pytest.mark.torch, pytest.mark.processes]

QUESTION = "Describe one stage of sleep."
SCHEMAS: dict[str, Any] = {"person": PERSON, "tree": TREE, "pattern": PATTERN}
WIDE = {
    "type": "object",
    "properties": {f"p{n:05d}": {"type": "string", "maxLength": n % 40 + 1} for n in range(1350)},
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    with SpecSoT.from_pretrained(demo="small", dtype="fp32") as model:
        yield model


def ask(model: SpecSoT, limit: int = 80, **options: Any) -> Any:
    return model.generate_sync(QUESTION, max_new_tokens=limit, seed=11, **options)


@pytest.mark.parametrize(
    ("options", "form"),
    some([
        ({"json_object": True}, Form("json_object")),
        *(({"json_schema": one}, schema(one)) for one in SCHEMAS.values()),
        ({"json_schema": json.dumps(PERSON)}, schema(PERSON)),
        (
            {"regex": "(Stage|Phase) [1-4]: [a-zé ]{3,30}(😴|!)"},
            Form("regex", ("(Stage|Phase) [1-4]: [a-zé ]{3,30}(😴|!)",)),
        ),
        ({"choice": ["light sleep", "REM 😴"]}, Form("choice", ("light sleep", "REM 😴"))),
    ], 2, 5),
)  # fmt: skip
def test_the_answer_has_its_form_with_every_drafter(
    model: SpecSoT, options: dict[str, Any], form: Form
) -> None:
    answer = ask(model, temperature=1, **options)
    assert answer.reason is Reason.STOP
    assert answer.statistics.mode == "direct"
    assert has_form(form, answer.text), answer.text
    alone = ask(model, temperature=1, drafter="none", **options)
    assert alone.tokens == answer.tokens


@pytest.mark.parametrize("limit", some([12, 20, 33, 64], 0, 2))
def test_json_is_ended_in_time(model: SpecSoT, limit: int) -> None:
    answer = ask(model, limit, json_object=True, temperature=1)
    assert has_form(Form("json_object"), answer.text)
    assert len(answer.tokens) <= limit


def test_what_cannot_be_ended_in_time_says_so(model: SpecSoT) -> None:
    answer = ask(model, 5, regex="[a-z ]{200}")
    assert answer.reason is Reason.LENGTH


@pytest.mark.full  # tests/master/test_trying.py tries one, tests/constraint/test_answers.py follows some
def test_a_schema_as_large_as_allowed_is_followed(model: SpecSoT) -> None:
    assert 0.9 * MAX_FORM_BYTES < len(json.dumps(WIDE)) <= MAX_FORM_BYTES
    assert has_form(schema(WIDE), ask(model, json_schema=WIDE).text)


def test_a_form_makes_an_automatic_mode_direct(model: SpecSoT) -> None:
    answer = ask(model, choice=["yes", "no"], mode="auto")
    assert answer.text in ("yes", "no")
    assert answer.branches == ()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"regex": "("}, "unclosed group"),
        pytest.param({"json_schema": "{"}, "not JSON", marks=pytest.mark.full),
        pytest.param({"json_schema": {"type": "objct"}}, "Invalid type: objct", marks=pytest.mark.full),
        ({"json_schema": {1, 2}}, "not JSON"),
        ({"choice": []}, "choice cannot have 0 texts"),
        ({"choice": ["yes", ""]}, "choice must not be empty"),
        ({"regex": ""}, "regex must not be empty"),
        ({"regex": "x" * (MAX_FORM_BYTES + 1)}, "65537 bytes"),
        ({"regex": "\ud800"}, "half a character"),
        ({"regex": 5}, "must be text"),
        ({"choice": 5}, "must be text"),
        ({"choice": ["yes", 5]}, "must be text"),
        ({"regex": "x", "choice": ["y"]}, "regex and choice are given"),
        ({"regex": "x", "mode": "sot"}, "not a plan"),
    ],
)
def test_wrong_forms_are_refused_on_one_line(model: SpecSoT, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask(model, **options)
    assert refused.value.field == "constraint"
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert ask(model, choice=["still here"]).text == "still here"


def test_keywords_become_one_form() -> None:
    assert ask_of("x").form is None
    assert ask_of("x", json_object=False).form is None
    assert ask_of("x", json_object=True).form == Form("json_object")
    assert ask_of("x", json_schema={"type": "null"}).form == schema({"type": "null"})
    assert ask_of("x", choice="yes").form == Form("choice", ("yes",))
    assert ask_of("x", choice=("yes", "no")).mode == "direct"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--regex", "("], "constraint: regex: a pattern cannot be used"),
        (["--json-schema", "no/such/file"], "neither a schema nor a file to read"),
        pytest.param(["--json-schema", "{"], "json_schema is not JSON", marks=pytest.mark.full),
        (["--choice", ""], "constraint: choice must not be empty"),
        (["--json-object", "--regex", "x"], "json_object and regex are given"),
        (["--json-object", "--mode", "sot"], "mode must be direct or auto"),
    ],
)
def test_the_command_line_refuses_on_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", "Why?", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_the_command_line_reads_a_schema_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "person.json"
    file.write_text(json.dumps(PERSON))
    assert main(["infer", QUESTION, "--json-schema", str(file), "--max-new-tokens", "120", "--json"]) == 0
    *_, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["event"] == "finished"
    assert has_form(schema(PERSON), last["text"])
