"""A form on its way through the master: tried before anything else happens, then part of the opening."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsot.errors import InvalidRequest
from specsot.params import Ask, Form
from specsot_master.core.sequence import SequenceFactory
from specsot_master.engine import Caller, Engine
from specsot_master.engine.grammar_sandbox import GrammarSandbox
from specsot_master.prompts import Prompts
from tests.master.letters import DIRECT, SAYS
from tests.master.stage import BASE, Stage, flushed

pytestmark = pytest.mark.slow

YES_NO = Form("choice", ("yes", "no"))


def open_answer(ask: Ask):
    return SequenceFactory((2, 3)).decoding_opening(5, ask, 7, ordinal=0, limit=9)


def test_an_answers_opening_carries_form_and_ends() -> None:
    opening = open_answer(Ask(prompt="x", form=YES_NO))
    assert (opening.form, opening.plan, opening.stop_ids) == (YES_NO, None, (2, 3))
    assert open_answer(Ask(prompt="x", mode="direct")).form is None
    assert open_answer(Ask(prompt="x", form=YES_NO, ignore_eos=True)).stop_ids == ()


def test_a_form_makes_auto_direct_and_refuses_a_plan() -> None:
    assert Ask(prompt="x", form=YES_NO).mode == "direct"
    assert Ask(tokens=(1, 2), form=YES_NO).mode == "direct"
    with pytest.raises(InvalidRequest, match="choice holds one answer, not a plan") as refused:
        Ask(prompt="x", mode="sot", form=YES_NO)
    assert refused.value.field == "constraint"


async def test_a_form_that_does_not_pass_its_trial_opens_nothing() -> None:
    stage = Stage(SAYS)
    forms = GrammarSandbox(lambda form: "constraint: choice is not to our liking")
    master = Engine(stage.ring, stage.text, Prompts(BASE, stage.text), stage.config, stage.time, forms)
    with pytest.raises(InvalidRequest, match="not to our liking"):
        await master.open(Ask(prompt="Hi", form=YES_NO), Caller())
    assert stage.ring.orders == []
    assert master.idle


async def test_a_form_that_passed_is_opened_at_stage_0() -> None:
    stage = Stage(SAYS)
    forms = GrammarSandbox(lambda form: "")
    master = Engine(stage.ring, stage.text, Prompts(BASE, stage.text), stage.config, stage.time, forms)
    events = await master.open(replace(DIRECT, form=YES_NO), Caller())
    await anext(events)
    await flushed(master)
    (order,) = stage.ring.orders
    assert order.opening.form == YES_NO
    await events.aclose()
