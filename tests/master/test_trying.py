"""Strangers' forms: each is tried once, apart, and neither a crash nor a long computation gets out."""

from __future__ import annotations

import asyncio
import json

import pytest

from specsot.errors import InvalidRequest, Overloaded
from specsot.forms import MAX_FORM_BYTES, Form
from specsot_master.conductor.trying import KNOWN, QUEUE, Forms, try_apart


def chain(length: int) -> Form:
    """A schema of references to references."""
    links = {f"a{n}": {"items": {"$ref": f"#/a{n + 1}"}} for n in range(length)}
    schema = {"$ref": "#/a0", **links, f"a{length}": {"type": "integer"}}
    return Form("json_schema", (json.dumps(schema, separators=(",", ":")),))


def schema(value: object) -> Form:
    return Form("json_schema", (json.dumps(value),))


def wide() -> Form:
    """An honest schema of nearly 64 KiB."""
    fields = {f"property_{n:04d}": {"type": "string", "maxLength": n % 50 + 1} for n in range(1100)}
    form = schema({"type": "object", "properties": fields})
    assert 0.9 * MAX_FORM_BYTES < len(form.texts[0]) <= MAX_FORM_BYTES
    return form


async def refused(forms: Forms, form: Form) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        await forms.check(form)
    assert error.value.field == "constraint"
    assert "\n" not in str(error.value)
    return error.value


async def test_every_form_is_tried_once() -> None:
    tried: list[Form] = []

    def trial(form: Form) -> str:
        tried.append(form)
        return "constraint: bad" if form.texts == ("bad",) else ""

    forms = Forms(trial)
    good, bad = Form("regex", ("good",)), Form("regex", ("bad",))
    await asyncio.gather(*(forms.check(good) for _ in range(5)))
    for _ in range(3):
        assert str(await refused(forms, bad)) == "constraint: bad"
    assert tried == [good, bad]


async def test_old_verdicts_are_forgotten() -> None:
    tried: list[Form] = []
    forms = Forms(lambda form: tried.append(form) or "")
    for number in range(KNOWN + 1):
        await forms.check(Form("regex", (str(number),)))
    await forms.check(Form("regex", (str(KNOWN),)))
    assert len(tried) == KNOWN + 1
    await forms.check(Form("regex", ("0",)))
    assert len(tried) == KNOWN + 2


async def test_who_comes_when_too_many_wait_is_told_to_come_again() -> None:
    forms = Forms(lambda form: "")
    checks = [asyncio.create_task(forms.check(Form("regex", (str(n),)))) for n in range(QUEUE + 3)]
    results = await asyncio.gather(*checks, return_exceptions=True)
    assert sum(isinstance(one, Overloaded) for one in results) == 3
    await forms.check(Form("regex", ("after",)))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (chain(1600), "json_schema is nested too deeply"),
        (schema({"type": "integer", "multipleOf": 999_983}), "json_schema takes too long"),
        (schema({"type": "objct"}), "Invalid type: objct"),
        (Form("json_schema", ("{",)), "json_schema is not JSON"),
        (Form("regex", ("(",)), "unclosed group"),
        (Form("regex", ("()",)), "regex allows no text"),
        (schema({"anyOf": [{"maxLength": n, "type": "string"} for n in range(1000, 2400)]}), "too"),
    ],
)
def test_what_cannot_work_is_refused_in_good_time(form: Form, reason: str) -> None:
    assert reason in try_apart(form)


@pytest.mark.processes
@pytest.mark.parametrize(
    "form",
    [
        Form("json_object"),
        wide(),
        chain(60),
        Form("choice", tuple(f"choice number {n}" for n in range(1024))),
        Form("regex", ("(((a{1000}){1000}){1000})",)),
        Form("regex", ("(.*a){20}b|(x+x+)+y",)),
        Form("regex", (".*[ab].{200}c",)),
    ],
    ids=["object", "wide", "chain", "choices", "nested counts", "backtracking", "many states"],
)
def test_what_looks_dangerous_and_is_not_passes(form: Form) -> None:
    assert try_apart(form) == ""
