"""Flaws that a review found by reading, and that the harness finds: each is put back, and caught.

Plants name what mends the flaw; where that has another name by now, `plant` fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from specsot.params import Ask
from specsot.transport.heartbeat import BUSY_FACTOR
from specsot_master.engine.event_stream import LoopClock
from specsot_master.fleet import Fleet
from specsot_master.replicas import Replica, RequestRouter
from specsot_worker.worker import Worker
from tests.conftest import some
from tests.faults.campaign import ASKS, LONG, Campaign, Fault, judge
from tests.faults.clients import Habit
from tests.faults.parts import AT_GRAMMAR, AT_PROMPT, AT_STEP
from tests.faults.world import Shape

pytestmark = pytest.mark.slow

DIRECT, PLANNED = ASKS[0], ASKS[2]

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """rule: how a line of the verdict begins. plant: puts the flaw back."""

    name: str
    campaign: Campaign
    rule: str
    plant: Plant
    seed: int = 0


class Impatient:
    """The silence timer as it was: it compares wall clocks, also where its own loop stood still."""

    def __init__(
        self, silence: float, on_silence: Callable[[], None], busy: Callable[[], bool] = lambda: False
    ) -> None:
        if busy():
            silence *= BUSY_FACTOR
        self._loop = asyncio.get_running_loop()
        self._silence, self._on_silence, self._heard = silence, on_silence, self._loop.time()
        self._timer = self._loop.call_later(silence, self._check)

    def reset(self) -> None:
        self._heard = self._loop.time()

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        due = self._heard + self._silence
        if due <= self._loop.time():
            self._on_silence()
        else:
            self._timer = self._loop.call_at(due, self._check)


class Patient(Impatient):
    """A silence timer that never finds anybody silent."""

    def _check(self) -> None:
        self._timer = self._loop.call_later(self._silence, self._check)


def plant_patience(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("specsot_master.grpc_api.SilenceTimer", Patient)


def plant_impatience(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("specsot.transport.uplink.SilenceTimer", Impatient)
    patch.setattr("specsot_master.grpc_api.SilenceTimer", Impatient)


def plant_starving(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("specsot_worker.core.sequencer.Sequencer._reserved_for_prompts", lambda _: 0)


def plant_blame(patch: pytest.MonkeyPatch) -> None:
    """Everybody is in every ring, and whoever was in four that broke fails."""

    def broke(_: object, present: list[object]) -> object | None:
        for one in present:
            one.breaks += 1  # type: ignore[attr-defined]
        return next((one for one in reversed(present) if one.breaks > 3), None)  # type: ignore[attr-defined]

    def on_tokens(_: object, record: object, tokens: int) -> None:
        record.breaks = 0  # type: ignore[attr-defined]

    quarantine = "specsot_master.core.ring.quarantine.Quarantine"
    patch.setattr(f"{quarantine}.on_break", broke)
    patch.setattr(f"{quarantine}.on_tokens", on_tokens)
    patch.setattr(f"{quarantine}.admits", lambda *_: True)


def plant_contagion(patch: pytest.MonkeyPatch) -> None:
    """What goes wrong with one sequence's grammar leaves the judge."""
    patch.setattr("specsot.grammar.IsolatedGrammar._ask", lambda _, question, otherwise: question())


def plant_forgetting(patch: pytest.MonkeyPatch) -> None:
    """What came before the Configuration is thrown away with the epoch before."""
    disband = Worker.disband

    async def forget(self: Worker) -> None:
        await disband(self)
        self._future_epoch_messages = type(self._future_epoch_messages)()

    patch.setattr(Worker, "disband", forget)


def plant_names(patch: pytest.MonkeyPatch) -> None:
    """The end of a stream is that of whoever has the name now."""
    patch.setattr(Fleet, "knows", lambda self, name, _=None: self._table.get(name) is not None)


def plant_no_reservation(patch: pytest.MonkeyPatch) -> None:
    """Where an id lives is asked before the request is looked into, and never again."""

    @contextmanager
    def looked_up(self: RequestRouter, id: str | None, ask: Ask) -> Generator[Replica]:
        yield self.home(id) or self._choose(ask)

    patch.setattr(RequestRouter, "_reserved", looked_up)


def plant_repair_by_the_clock(patch: pytest.MonkeyPatch) -> None:
    """The seconds for which requests wait for a ring go on while the whole fleet stands still."""
    patch.setattr(LoopClock, "later_while_running", LoopClock.later)


def everybody(*asks: Ask) -> tuple[tuple[float, Ask, Habit], ...]:
    return tuple((0.1 * n, ask, Habit()) for n, ask in enumerate(asks))


def poisoned(seed: int, stages: int) -> Campaign:
    """Two who are being answered, and a third one of which a worker dies."""
    ask = replace(PLANNED if seed == AT_GRAMMAR else DIRECT, seed=seed)
    return Campaign(Shape(stages), (*everybody(DIRECT, PLANNED), (0.3, ask, Habit(once=True))), ())


FREEZE = Fault("freeze", "worker-1", 1.0, 25.0)
STALL = (Fault("stall", "master", 1.0, 2.5), Fault("kill", "worker-1", 1.1))
TWIN = ((0.0, LONG[0], Habit(twin=0.002, once=True)),)
FINDINGS = (
    Finding(
        "H2 silence is counted while one's own loop stands still",
        Campaign(Shape(2), everybody(DIRECT), (Fault("pause", "everybody", 1.0, 30.0),)),
        "8 worker-0 lost the master, which was there",
        plant_impatience,
    ),
    Finding(
        "H3 prompts starve behind trees",
        Campaign(Shape(1, rows=16, nodes=24), everybody(*ASKS[:4]), ()),
        "3 sequence",
        plant_starving,
    ),
    Finding("H6 the innocent fail", poisoned(AT_PROMPT, 1), "6 it failed with Unavailable", plant_blame),
    Finding("H6 poison is tried for ever", poisoned(AT_STEP, 1), "6 one request ended", plant_blame),
    Finding(
        "H6 one grammar ends everybody's epoch",
        poisoned(AT_GRAMMAR, 2),
        "8 an epoch ended for nothing",
        plant_contagion,
    ),
    Finding(
        "H7 a tap before its Configuration is lost",
        Campaign(Shape(2, taps=True, losses=0.3), everybody(DIRECT), ()),
        "13 the ring still waits for",
        plant_forgetting,
    ),
    Finding(
        "M1 the end of an old stream removes the new member",
        Campaign(Shape(2, drafter=False), everybody(DIRECT), STALL),
        "10 worker-1 has a stream, and is not in the roll",
        plant_names,
        seed=2,
    ),
    Finding(
        "M4 one id in two rings",
        Campaign(Shape(1, drafter=False, replicas=2), TWIN, ()),
        "7 request r0 is in rings (0, 1)",
        plant_no_reservation,
    ),
    Finding(
        "a frozen worker is not noticed",
        Campaign(Shape(2), everybody(DIRECT), (FREEZE,)),
        "9 nobody noticed worker-1",
        plant_patience,
    ),
    Finding(
        "a repair is given up although the whole fleet stood still",
        replace(poisoned(AT_PROMPT, 2), faults=(Fault("pause", "everybody", 0.8, 46.0),)),
        "6 it failed with Unavailable",
        plant_repair_by_the_clock,
    ),
)


@pytest.mark.parametrize("finding", some(FINDINGS, 0, 2, 5, 6, 7), ids=lambda one: one.name)
def test_it_is_found(finding: Finding, monkeypatch: pytest.MonkeyPatch) -> None:
    finding.plant(monkeypatch)
    found = judge(finding.campaign, finding.seed)
    assert any(line.startswith(finding.rule) for line in found), found


@pytest.mark.parametrize("finding", some(FINDINGS, 7), ids=lambda one: one.name)
def test_without_it_nothing_is_found(finding: Finding) -> None:
    assert judge(finding.campaign, finding.seed) == []


def test_who_is_frozen_again_has_been_noticed_already() -> None:
    twice = (FREEZE, replace(FREEZE, at=9.0))
    assert judge(Campaign(Shape(2), everybody(DIRECT, PLANNED), twice)) == []
