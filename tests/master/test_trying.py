"""Strangers' forms: each is tried once, apart, and neither a crash nor a long computation gets out."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.errors import InvalidRequest, Overloaded, TimedOut, Unavailable
from specsot.params import MAX_FORM_BYTES, Form
from specsot_master.engine import EngineConfig
from specsot_master.engine.grammar_sandbox import (
    MAX_CACHED_CHECKS,
    MAX_WAITING_FORMS,
    GrammarSandbox,
    compile_in_subprocess,
)
from tests.conftest import some
from tests.master.letters import ANSWER, DIRECT, SAYS, SOT, finished
from tests.master.stage import Gate, Stage


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


async def refused(forms: GrammarSandbox, form: Form) -> InvalidRequest:
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

    forms = GrammarSandbox(trial)
    good, bad = Form("regex", ("good",)), Form("regex", ("bad",))
    await asyncio.gather(*(forms.check(good) for _ in range(5)))
    for _ in range(3):
        assert str(await refused(forms, bad)) == "constraint: bad"
    assert tried == [good, bad]


async def test_old_check_results_are_evicted() -> None:
    tried: list[Form] = []
    forms = GrammarSandbox(lambda form: tried.append(form) or "")
    for number in range(MAX_CACHED_CHECKS + 1):
        await forms.check(Form("regex", (str(number),)))
    await forms.check(Form("regex", (str(MAX_CACHED_CHECKS),)))
    assert len(tried) == MAX_CACHED_CHECKS + 1
    await forms.check(Form("regex", ("0",)))
    assert len(tried) == MAX_CACHED_CHECKS + 2


class Held(Gate):
    """A trial that takes until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: list[Form] = []

    def __call__(self, form: Form) -> str:
        self.tried.append(form)
        self.stop()
        return ""


def regex(number: int) -> Form:
    return Form("regex", (str(number),))


async def test_a_check_that_arrives_when_too_many_wait_is_refused_with_a_retry() -> None:
    forms = GrammarSandbox(lambda form: "")
    checks = [asyncio.create_task(forms.check(regex(n), f"c{n % 3}")) for n in range(MAX_WAITING_FORMS + 3)]
    results = await asyncio.gather(*checks, return_exceptions=True)
    assert sum(isinstance(one, Overloaded) for one in results) == 3
    await forms.check(regex(1000))


async def test_one_client_cannot_take_every_place() -> None:
    held = Held()
    forms = GrammarSandbox(held)
    greedy = [asyncio.create_task(forms.check(regex(n), "greedy")) for n in range(MAX_WAITING_FORMS)]
    await held.begun()
    modest = asyncio.create_task(forms.check(regex(1000), "modest"))
    held.release()
    results = await asyncio.gather(*greedy, return_exceptions=True)
    assert sum(isinstance(one, Overloaded) for one in results) == MAX_WAITING_FORMS // 2
    await modest


async def test_any_number_may_wait_for_the_same_form() -> None:
    tried: list[Form] = []
    forms = GrammarSandbox(lambda form: tried.append(form) or "")
    await asyncio.gather(*(forms.check(regex(1), "one") for _ in range(5 * MAX_WAITING_FORMS)))
    assert tried == [regex(1)]


async def test_a_cancelled_trial_keeps_its_turn() -> None:
    """A trial cannot be stopped; otherwise a client that connects and leaves would start several at once."""
    held = Held()
    forms = GrammarSandbox(held)
    gone = asyncio.create_task(forms.check(regex(0)))
    await held.begun()
    gone.cancel()
    await asyncio.wait([gone])
    checks = [asyncio.create_task(forms.check(regex(n))) for n in (1, 0)]
    await asyncio.sleep(0)
    assert held.tried == [regex(0)]
    held.release()
    await asyncio.gather(*checks)
    assert held.tried == [regex(0), regex(1)], "its verdict is known, too"


async def test_a_trial_that_cannot_be_made_says_so() -> None:
    def broken(form: Form) -> str:
        raise Unavailable("constraints cannot be tried")

    forms = GrammarSandbox(broken)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await forms.check(regex(1))


ANY = Form("regex", ("(?s).*",))
HELD = replace(DIRECT, form=ANY)


async def test_others_go_on_while_a_form_is_tried() -> None:
    """The trial blocks a thread; steps, other answers and other refusals do not wait for it."""
    held = Held()
    stage = Stage(SAYS, forms=GrammarSandbox(held))
    waits = stage.listen(HELD)
    await held.begun()
    assert finished(await stage.answer(SOT)).text == ANSWER
    assert not waits.done()
    held.release()
    assert finished((await stage.play_whenever(waits))[0]).text == SAYS["What is"]
    stage.assert_clean()


async def test_a_deadline_that_passes_while_a_form_is_tried() -> None:
    held = Held()
    stage = Stage(SAYS, forms=GrammarSandbox(held))
    with pytest.raises(TimedOut, match="the deadline passed while the request was looked into"):
        await stage.listen(HELD, timeout=0.01)
    held.release()
    stage.assert_clean()


async def test_time_spent_on_a_form_counts() -> None:
    """The clock goes a second at every look: one is over when the request comes to wait."""
    stage = Stage(SAYS, forms=GrammarSandbox(lambda form: ""))
    with pytest.raises(TimedOut, match="had passed when the request came"):
        await stage.listen(HELD, timeout=1.0)
    stage.assert_clean()


async def test_who_would_be_refused_anyway_is_refused_before() -> None:
    tried: list[Form] = []
    config = EngineConfig(model="demo", live=1, queue=1)
    stage = Stage(SAYS, config=config, forms=GrammarSandbox(lambda form: tried.append(form) or ""))
    others = [stage.listen(DIRECT) for _ in range(2)]
    await stage.settle()
    with pytest.raises(Overloaded):
        await stage.listen(HELD)
    assert tried == []
    await stage.play(*others)
    stage.assert_clean()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("form", "reason"),
    some([
        (chain(1600), "json_schema is nested too deeply"),
        (schema({"type": "integer", "multipleOf": 999_983}), "json_schema takes too long"),
        (schema({"type": "objct"}), "there is no type"),
        (Form("json_schema", ("{",)), "json_schema is not JSON"),
        (Form("regex", ("(",)), "unclosed group"),
        (Form("regex", ("()",)), "regex allows no text"),
        (Form("json_schema", ('{"$ref": "#"}',)), "json_schema allows no text"),
        (schema({"anyOf": [{"maxLength": n, "type": "string"} for n in range(1000, 2400)]}), "too"),
    ], 0, 1, 6),
)  # fmt: skip
def test_what_cannot_work_is_refused_in_good_time(form: Form, reason: str) -> None:
    assert reason in compile_in_subprocess(form)


@pytest.mark.processes
@pytest.mark.parametrize(
    "form",
    some([
        Form("json_object"),
        wide(),
        chain(60),
        Form("choice", tuple(f"choice number {n}" for n in range(1024))),
        Form("regex", ("(((a{1000}){1000}){1000})",)),
        Form("regex", ("(.*a){20}b|(x+x+)+y",)),
        Form("regex", (".*[ab].{200}c",)),
    ], 1),
    ids=["object", "wide", "chain", "choices", "nested counts", "backtracking", "many states"],
)  # fmt: skip
def test_what_looks_dangerous_and_is_not_passes(form: Form) -> None:
    assert compile_in_subprocess(form) == ""


@pytest.mark.processes
def test_a_trial_knows_no_token_and_no_module_of_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever lies there under the name of a module that the trial imports."""
    (tmp_path / "specsot").mkdir()
    (tmp_path / "specsot" / "__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECSOT_TOKEN", "secret")
    seen: list[dict[str, str]] = []
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: (seen.append(k["env"]), real(*a, **k))[1])
    assert compile_in_subprocess(Form("regex", ("[ab]+",))) == ""
    assert "SPECSOT_TOKEN" not in seen[0]
