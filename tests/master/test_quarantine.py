"""Requests that break rings: only they fail, soon, and their neighbours' answers stay whole."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

import pytest

from specsot.errors import Unavailable
from specsot.params import Ask
from specsot_master.core.ring.quarantine import (
    MAX_BREAKS,
    MAX_BREAKS_ALONE,
    MAX_PROOF_TOKENS,
    BreakHistory,
    Quarantine,
)
from tests.conftest import seeds
from tests.master.letters import ANSWER, COUNT, DIRECT, SAYS, SOT, finished
from tests.master.stage import Stage
from tests.master.test_repair import break_and_form

INNOCENT = {SOT: ANSWER, COUNT: SAYS["Count"]}


class Rings:
    """Rings in which requests write until they are done, or a poisonous one has written its dose."""

    def __init__(self, count: int, doses: dict[int, int], length: int = 400) -> None:
        """doses: tokens after which a request breaks the ring, by its number."""
        self.records = [BreakHistory() for _ in range(count)]
        self.left = dict.fromkeys(range(count), length)
        self.doses, self.given_up, self.broken = doses, list[int](), 0
        self.quarantine = Quarantine()

    def run(self, chance: random.Random | None = None) -> None:
        """Until nobody is left. chance: of other breaks, a tenth of all rings."""
        while self.left:
            assert self.broken < 200, "rings break for ever"
            self._ring(chance.randrange(300) if chance and chance.random() < 0.1 else math.inf)

    def _ring(self, lasts: float) -> None:
        inside, step = dict[int, int](), 0
        while self.left:
            for number in self.left:
                if self.quarantine.admits(self.records[number]):
                    inside.setdefault(number, 0)
            assert inside, "nobody may enter"
            poison = any(inside[number] >= self.doses.get(number, 10**9) for number in inside)
            if poison or step >= lasts:
                self._break(list(inside))
                return
            step += 1
            for number in list(inside):
                inside[number] += 1
                self.left[number] -= 1
                self.quarantine.on_tokens(self.records[number], 1)
                if not self.left[number]:
                    self._leave(number)
                    del inside[number]

    def _break(self, inside: list[int]) -> None:
        self.broken += 1
        culprit = self.quarantine.on_break([self.records[number] for number in reversed(inside)])
        for number in inside:
            if self.records[number] is culprit:
                self.given_up.append(number)
                self._leave(number)

    def _leave(self, number: int) -> None:
        del self.left[number]
        self.quarantine.remove(self.records[number])


@pytest.mark.parametrize("count", [1, 2, 3, 8, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dose", [0, 1, 4, 8])
def test_the_culprit_is_found_by_halving(count: int, dose: int) -> None:
    for culprit in {0, count // 2, count - 1}:
        rings = Rings(count, {culprit: dose})
        rings.run()
        assert rings.given_up == [culprit]
        assert rings.broken <= 2 + math.ceil(math.log2(count)) + (2 if dose < 6 else 3)


@pytest.mark.slow
@pytest.mark.parametrize("dose", [12, 30, 70, 100, 200])
def test_one_that_writes_a_while_in_every_ring_is_given_up_too(dose: int) -> None:
    rings = Rings(4, {2: dose}, length=20_000)
    rings.run()
    assert rings.given_up == [2]
    assert rings.broken <= 2 * (MAX_BREAKS + MAX_BREAKS_ALONE)


def test_one_that_outwrites_every_trial_costs_a_ring_for_each() -> None:
    """It breaks no more rings than its length allows: every one of them brings it on."""
    rings = Rings(2, {1: MAX_PROOF_TOKENS + 1}, length=5_000)
    rings.run()
    assert rings.given_up in ([], [1])
    assert rings.broken <= 5_000 // MAX_PROOF_TOKENS + 1


def test_several_culprits_are_found_one_after_another() -> None:
    rings = Rings(16, {3: 0, 9: 2, 10: 0})
    rings.run()
    assert sorted(rings.given_up) == [3, 9, 10]
    assert rings.broken <= 3 * (2 + 4 + 2)


@pytest.mark.parametrize("seed", seeds(40, quick=10))
def test_rings_that_break_for_other_reasons_as_well(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 20)
    culprit, dose = chance.randrange(count), chance.randrange(20)
    rings = Rings(count, {culprit: dose})
    rings.run(chance)
    assert rings.given_up == [culprit]


def test_no_request_waits_for_a_suspect_that_left() -> None:
    quarantine, records = Quarantine(), [BreakHistory() for _ in range(3)]
    for _ in range(2):
        assert quarantine.on_break(records) is None
    held = [one for one in records if not quarantine.admits(one)]
    assert held
    for one in records:
        if one not in held:
            quarantine.remove(one)
    assert quarantine.has_changed()
    assert all(quarantine.admits(one) for one in held)


def test_one_failure_quarantines_no_request() -> None:
    quarantine, records = Quarantine(), [BreakHistory() for _ in range(3)]
    quarantine.on_break(records)
    for one in records:
        quarantine.on_tokens(one, 100)
    quarantine.on_break(records)
    assert all(quarantine.admits(one) for one in (*records, BreakHistory()))


async def outlast(stage: Stage, poison: asyncio.Task[object], ask: Ask, written: int) -> int:
    """Rings, each of which breaks once the poisonous request has written so much in it; their number."""
    epoch = 1
    while not poison.done():
        assert epoch < 20, "rings break for ever"
        for _ in range(60):
            players = [one for one in stage.ring.live.values() if one.opening.seed == ask.seed]
            deadly = [one for one in players if one.opening.decodes]
            if any(len(one.written) - one.opening.generated >= written for one in deadly):
                epoch += 1
                await break_and_form(stage, epoch)
                await stage.settle()
                break
            await stage.step()
    return epoch


@pytest.mark.parametrize("written", [0, 1, 5])
async def test_only_the_poisonous_request_fails(written: int) -> None:
    """Whether its prompt kills stage 0, or what it writes does, in every ring."""
    stage = Stage(SAYS)
    innocent = {ask: stage.listen(ask) for ask in INNOCENT}
    for _ in range(6):
        await stage.step()
    ask = replace(COUNT, seed=666)
    poison = stage.listen(ask)
    await stage.settle()
    assert await outlast(stage, poison, ask, written) <= 8
    with pytest.raises(Unavailable, match=r"rings broke while this request ran, [23] of them with it alone"):
        await poison
    await stage.play(*innocent.values())
    for asked, text in INNOCENT.items():
        assert finished(innocent[asked].result()).text == text
    stage.assert_clean()


async def test_newcomers_wait_until_the_culprit_is_found() -> None:
    stage = Stage(SAYS)
    first, second = stage.listen(COUNT), stage.listen(replace(COUNT, seed=6))
    await stage.settle()
    for epoch in (2, 3):
        await break_and_form(stage, epoch)
        await stage.settle()
    newcomer = stage.listen(DIRECT)
    await stage.settle()
    assert sum(one.opening.decodes for one in stage.ring.live.values()) == 1
    await stage.play(first, second, newcomer)
    stage.assert_clean()
