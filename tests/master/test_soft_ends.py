"""Soft ends on their way through the master: branches have one, answers and plans have none."""

from __future__ import annotations

import pytest

from specsot.core.skeleton import PlanRules
from specsot.core.soft_end import SoftEnd
from specsot.params import Ask, Form
from specsot_master.core.limits import soft_limit
from specsot_master.core.sequence import SequenceFactory
from tests.master.letters import SAYS, SOT, openings
from tests.master.stage import Stage

ASK = Ask(prompt="x", mode="sot")


@pytest.mark.parametrize(("limit", "soft"), [(1000, 850), (400, 340), (100, 60), (50, 25), (24, 12), (1, 0)])
def test_a_sentence_has_room_between_the_soft_and_the_hard_end(limit: int, soft: int) -> None:
    assert soft_limit(limit) == soft


def soft_end(ask: Ask = ASK, rules: PlanRules | None = None, soft: bool = True) -> SoftEnd | None:
    return SequenceFactory((2, 3)).writer(5, ask, 7, ordinal=1, limit=100, rules=rules, soft=soft).soft_end


def test_a_sequence_ends_softly_by_an_end_token_of_the_model() -> None:
    assert soft_end() == SoftEnd(60, 2)
    assert soft_end(soft=False) is None
    assert soft_end(rules=PlanRules()) is None
    assert soft_end(Ask(prompt="x", form=Form("regex", ("a",)))) is None
    assert soft_end(Ask(prompt="x", mode="sot", ignore_eos=True)) is None
    assert SequenceFactory(()).writer(5, ASK, 7, ordinal=1, limit=9, soft=True).soft_end is None


async def test_branches_end_softly_and_nothing_else_does() -> None:
    stage = Stage(SAYS)
    await stage.answer(SOT)
    decoding = [one for one in openings(stage) if one.decodes]
    assert len({one.ordinal for one in decoding}) > 2
    for one in decoding:
        assert (one.soft_end is not None) == (one.ordinal > 0)
        assert one.soft_end is None or one.soft_end.after == soft_limit(one.limit)
