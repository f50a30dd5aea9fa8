"""The members and the epoch: takes joins, sends configurations, counts the barrier, hears of losses.

Refuses to know tensors, text and transports (a member is a Registration and a downlink), and who should run
which layers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import structlog

from specsot.errors import Refused, Unavailable
from specsot.frames import Order, Result
from specsot.info import MemberInfo, Rebalanced
from specsot.links import Link
from specsot.members import (
    Broken,
    Configuration,
    Disband,
    Leaving,
    Ready,
    Registration,
    Rejoined,
    StandBy,
)
from specsot.params import DrafterName
from specsot_master.fleet.formation import back_in, belongs, check, form, with_gpu
from specsot_master.fleet.pace import pace_of
from specsot_master.fleet.patience import Patience
from specsot_master.fleet.roll import Member, Roll
from specsot_master.fleet.succession import Stages, could_form, draw_anew, draw_up
from specsot_master.fleet.telling import tell
from specsot_master.fleet.wishes import Wishes

log = structlog.get_logger()

FIRST_RETRY, LONGEST_RETRY = 1.0, 30.0  # seconds before a broken ring is tried again
COMPANY = 0.2  # seconds in which others leave too where a whole fleet is told to: no reason to load anything


class Fleet:
    """Forms an epoch whenever the ring is complete; ends it whenever a stage is lost.

    on_result(result), on_ready(), on_end(reason) are called from the event loop, and must be quick.
    idle() says whether a new epoch would disturb nobody.
    """

    def __init__(
        self,
        wishes: Wishes,
        on_result: Callable[[Result], None],
        on_ready: Callable[[], None],
        on_end: Callable[[str], None],
        idle: Callable[[], bool],
        epochs: Iterator[int] | None = None,
    ) -> None:
        """epochs: numbers of epochs to come, each larger than any that a member may have heard of."""
        self._wishes, self._idle = wishes, idle
        self._on_result, self._on_ready, self._on_end = on_result, on_ready, on_end
        self._retry = FIRST_RETRY
        self._roll = Roll(self.lost)
        self._epochs = epochs or itertools.count(1)
        self._epoch = 0
        self._plan: dict[str, Configuration] = {}
        self._stages: Stages = ()  # of the newest epoch
        self._failed: set[str] = set()  # could not take part in it
        self._returning: tuple[str, Configuration] | None = None  # the drafter, into a running epoch
        self._patience = Patience(self.reform)
        self._complaint: str | None = None
        self._missing = ""  # as it was said last

    @property
    def ready(self) -> bool:
        """Every member of this epoch has said so."""
        return bool(self._plan) and all(self._roll[name].ready for name in self._plan)

    @property
    def ring(self) -> Configuration | None:
        """What every member of the running epoch was told; None while there is none."""
        return next(iter(self._plan.values())) if self.ready else None

    @property
    def complaint(self) -> str | None:
        """Why the last attempt at an epoch failed; None once one has succeeded."""
        return self._complaint

    @property
    def registrations(self) -> list[Registration]:
        """Of everybody who has joined, in that order."""
        return self._roll.registrations

    @property
    def max_positions(self) -> int:
        return min((one.max_positions for one in self._roll.registrations), default=0)

    @property
    def drafters(self) -> tuple[DrafterName, ...]:
        """The ways to draft of the running epoch's drafter."""
        names = [name for name in self._roll.names("drafter") if name in self._plan]
        return self._roll[names[0]].registration.drafters if names else ()

    @property
    def formed(self) -> bool:
        """Everybody of an epoch is known, ready or not."""
        return bool(self._plan)

    @property
    def short(self) -> bool:
        """One more worker would do good at once."""
        return not self._plan or len(self._stages) + len(self._spare) < self._wishes.workers

    @property
    def idle_workers(self) -> list[Registration]:
        """Those who run nothing now."""
        return [
            one for one in self._roll.registrations if one.kind == "worker" and one.name not in self._plan
        ]

    def ran(self, name: str) -> bool:
        """It was a stage of the newest epoch."""
        return any(stage.name == name for stage in self._stages)

    def accepts(self, registration: Registration) -> bool:
        """Whether it may join."""
        return belongs(registration, self._roll.registrations, self._wishes)

    @property
    def lacking(self) -> bool:
        """It has no ring, and cannot form one of the members it has."""
        return not self._plan and not self._could_form()

    def completed_by(self, more: Sequence[Registration]) -> bool:
        """Whether it has no ring, is not likely to form one by itself, and could with these."""
        return (self.lacking or bool(self._failed and not self._plan)) and self._could_form(more)

    def waiting_for(self) -> str:
        """What keeps the ring from running, in words; empty when it runs."""
        if self.ready:
            return ""
        slow = [name for name in self._plan if not self._roll[name].ready]
        if slow:
            return self._complaint or f"{', '.join(slow)} to get ready"
        drawn = self._draw_up()
        return drawn if isinstance(drawn, str) else self._complaint or "the next attempt"

    @property
    def epoch(self) -> int:
        """The newest epoch's number, running or not."""
        return self._epoch

    @property
    def plan(self) -> str:
        """Who runs what in the present epoch, and the pace that is expected; empty while there is none."""
        return self._words(self._stages) if self._plan else ""

    def members(self) -> tuple[MemberInfo, ...]:
        """Everybody who has joined, with the layers each runs now or was started with."""
        running = {stage.name: stage.layers for stage in self._stages} if self._plan else {}
        return tell(self._roll.registrations, running, self._spare)

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Raises Refused, naming both values, when it does not belong here."""
        self.take(registration, downlink)

    def take(self, registration: Registration, downlink: Link) -> None:
        """One more member, or one that is back before its old link was known to be lost. Raises Refused."""
        check(registration, self._roll.registrations, self._wishes)
        if older := self._roll.find(registration.name):
            self._do_without(registration.name, older, "another process took its place")
            self._roll.hang_up(older)
        registration = with_gpu(registration, self._roll.registrations)
        self._roll.add(registration, downlink)
        log.info("member joined", kind=registration.kind, name=registration.name, at=registration.address)
        self._be_patient(self._wishes.take_over_after)  # where one comes back, others may
        if registration.name in self._spare:
            self._roll.tell(registration.name, StandBy(self._epoch))
        self.reform()

    def release(self, name: str) -> Member:
        """Let a worker that runs nothing here go elsewhere; nothing is lost by it."""
        member = self._roll[name]
        self._roll.remove(name)
        return member

    def heard(self, name: str, message: object) -> None:
        """Take a member's message."""
        member = self._roll.find(name)
        if member is None:
            return
        match message:
            case Result() if message.epoch == self._epoch:
                self._on_result(message)
            case Ready(epoch) if epoch == self._epoch:
                member.ready = True
                if self._returning and self._returning[0] == name:
                    self._welcome(*self._returning)
                elif name in self._plan:
                    self._announce_if_ready()
            case Broken(epoch, reason) if epoch == self._epoch:
                self._fail(name, member, reason)
            case Leaving(reason):
                self.lost(name, reason, min(COMPANY, self._wishes.take_over_after))
            case _:
                pass

    def lost(self, name: str, reason: str, patience: float | None = None) -> None:
        """A member is gone. A lost stage ends the epoch; a lost drafter is done without.

        patience: seconds before the others take over, if nobody else can; None: as was wished.
        """
        member = self._roll.find(name)
        if member is None:
            return
        self._do_without(name, member, reason)
        self._be_patient(self._wishes.take_over_after if patience is None else patience)
        self.reform()

    def reform(self) -> None:
        """Begin a new epoch if the ring is complete and nothing runs that it would disturb."""
        self._take_back()
        stages = self._improved() if self._plan else self._draw_up()
        if isinstance(stages, str):
            self._wait_for(stages)
        elif stages and not self._plan:
            self._begin(stages)
        elif stages and (self._idle() or not self.ready):
            self._begin_anew(stages, "the ring is formed anew")

    def rebalance(self) -> Rebalanced:
        """Share the layers out anew over all workers that help, whatever runs meanwhile.

        Raises Unavailable while there is no ring, Refused where the workers have no room.
        """
        if not self._plan:
            raise Unavailable(f"the ring is not complete: waiting for {self.waiting_for()}")
        stages = draw_anew(self._roll.registrations, self._wishes)
        changed = stages != self._stages
        if changed:
            self._begin_anew(stages, "the ring is rebalanced")
        return Rebalanced(changed, self._epoch, self._words(stages))

    async def tend(self, every: float) -> None:
        """Take in who came late, as soon as nobody would be disturbed. Runs until cancelled."""
        while True:
            await asyncio.sleep(every)
            if self._plan:
                self.reform()

    async def order(self, order: Order) -> None:
        """Pass an order to stage 0. Raises Unavailable when there is no ring."""
        ring = self.ring
        if ring is None:
            raise Unavailable(f"the ring is not complete: waiting for {self.waiting_for()}")
        await self._roll.order(ring.stages[0].name, order)

    # --- what is to be formed ---

    @property
    def _spare(self) -> list[str]:
        """Workers that the present epoch runs without."""
        return [name for name in self._roll.names("worker") if name not in self._plan] if self._plan else []

    def _draw_up(self) -> Stages | str:
        """The next epoch's stages, or what is missing."""
        try:
            patient = self._patience.lasts
            return draw_up(self._roll.registrations, self._wishes, self._stages, patient, self._failed)
        except Refused as error:
            self._complaint = str(error)
            return self._complaint

    def _could_form(self, more: Sequence[Registration] = ()) -> bool:
        """A ring of full size, with those besides the members."""
        return could_form([*self._roll.registrations, *more], self._wishes, self._stages, self._failed)

    def _improved(self) -> Stages | None:
        """Stages of a better epoch than the present one: with a drafter that came late, or with as many
        workers as were wished for, where it had to be formed of fewer.
        """
        here = self._plan.keys() | ({self._returning[0]} if self._returning else set())
        if self._wishes.drafter and not set(self._roll.names("drafter")) <= here:
            return self._stages
        if len(self._stages) < self._wishes.workers and self._spare:
            more = draw_up(self._roll.registrations, self._wishes)
            return None if isinstance(more, str) else more
        return None

    # --- epochs ---

    def _wait_for(self, missing: str) -> None:
        """Say it once, however often it is tried."""
        if missing != self._missing:
            log.info("waiting for the ring", missing=missing)
        self._missing = missing

    def _begin(self, stages: Stages) -> None:
        self._epoch = next(self._epochs)
        self._missing = ""
        try:
            self._plan = form(self._epoch, self._roll.registrations, stages, self._wishes)
        except Refused as error:
            self._complaint = str(error)
            log.error("no ring", reason=str(error))
            return
        self._stages = stages
        self._patience.end()
        log.info("plan", epoch=self._epoch, stages=self.plan)
        for name, configuration in self._plan.items():
            self._roll[name].ready = False
            self._roll.tell(name, configuration)
        for name in self._spare:
            self._roll.tell(name, StandBy(self._epoch))

    def _begin_anew(self, stages: Stages, reason: str) -> None:
        self._break(reason, None)
        self._begin(stages)

    def _do_without(self, name: str, member: Member, reason: str) -> None:
        """A member is gone. A lost stage ends the epoch, a lost drafter does not."""
        log.warning("member lost", name=name, reason=reason)
        drafted = self._draft_no_more(name, member)
        self._roll.remove(name)
        self._failed.discard(name)
        if name in self._plan and not drafted:
            self._break(f"{name} is gone: {reason}", name)

    def _draft_no_more(self, name: str, member: Member) -> bool:
        """Whether it was the drafter of a running epoch, which goes on without."""
        if self._returning and self._returning[0] == name:
            self._returning = None
            return True
        if not (self.ready and name in self._plan and member.registration.kind == "drafter"):
            return False
        del self._plan[name]
        self._plan = {one: replace(plan, drafter=None) for one, plan in self._plan.items()}
        return True

    def _take_back(self) -> None:
        """A drafter may come back into a running epoch, which it disturbs no more than its loss did."""
        for name in self._roll.names("drafter"):
            if self.ring and not (self._returning or name in self._plan or name in self._failed):
                told = back_in(self.ring, name, self._roll.registrations, self._wishes)
                if told:
                    self._returning = name, told
                    self._roll[name].ready = False
                    self._roll.tell(name, replace(told, head=None))  # the stages have their taps

    def _welcome(self, name: str, told: Configuration) -> None:
        """It is ready; whoever has its features tells it what it missed."""
        self._returning = None
        rest = {one: replace(plan, drafter=told.drafter) for one, plan in self._plan.items()}
        self._plan = {**rest, name: told}
        assert told.drafter is not None
        self._roll.tell(told.stages[-1].name, Rejoined(self._epoch, told.drafter))
        log.info("the drafter is back", epoch=self._epoch, name=name)
        self._on_ready()  # somebody may wait for it

    def _fail(self, name: str, member: Member, reason: str) -> None:
        """Without its drafter an epoch goes on; this one is not asked again before the next."""
        if self._draft_no_more(name, member):
            self._failed.add(name)
            log.warning("nobody drafts", name=name, reason=reason)
            return
        if name not in self._plan:
            return
        if not member.ready:
            self._failed.add(name)
        self._complaint = f"{name}: {reason}"
        self._break(self._complaint, name)
        asyncio.get_running_loop().call_later(self._retry, self.reform)
        self._retry = min(self._retry * 2, LONGEST_RETRY)

    def _be_patient(self, seconds: float) -> None:
        if self._stages and not self._plan:
            self._patience.begin(seconds)

    def _announce_if_ready(self) -> None:
        if self.ready:
            self._complaint, self._retry = None, FIRST_RETRY
            self._failed.clear()
            ring = next(iter(self._plan.values()))
            ranges = " ".join(f"{stage.name}={stage.layers}" for stage in ring.stages)
            log.info(
                "ring complete", epoch=self._epoch, stages=ranges, drafter=ring.drafter, pages=ring.pages
            )
            self._on_ready()

    def _break(self, reason: str, culprit: str | None) -> None:
        """End the epoch: everybody but the culprit is told, requests hear why."""
        told, self._plan, self._returning = [name for name in self._plan if name != culprit], {}, None
        for name in told:
            if name in self._roll:
                self._roll.tell(name, Disband(self._epoch, reason))
        self._on_end(reason)

    def _words(self, stages: Stages) -> str:
        return str(pace_of(stages, {one.name: one for one in self._roll.registrations}))
