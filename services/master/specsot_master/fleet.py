"""The members of one ring: joins, their messages, their losses; and the ring as the engine sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from specsot.core.frames import Order, Result
from specsot.core.info import MemberInfo, Rebalanced
from specsot.errors import Unavailable
from specsot.members import Broken, Configuration, Leaving, Progress, Ready, Registration, StandBy
from specsot.params import DrafterName
from specsot.transport.links import Link
from specsot_master.core.epoch import check_joining, may_join, member_infos, with_one_gpu
from specsot_master.core.placement import PlacementMode, RingConfig, could_form
from specsot_master.core.ring import RingState
from specsot_master.epochs import EpochNumbers, Epochs, Member, MemberTable

__all__ = ["Fleet", "PlacementMode", "RingConfig"]


log = structlog.get_logger()

LEAVE_TOGETHER_SECONDS = (
    0.2  # seconds in which others leave too where a whole fleet is told to: no reason to load anything
)


class Membership(Protocol):
    """A fleet, or what deals members out to several."""

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Raises Refused."""
        ...

    def on_message(self, name: str, message: object, by: Link | None = None) -> None:
        """by: its downlink. What comes by another one than the newest of this name is nobody's."""
        ...

    def on_disconnect(self, name: str, reason: str, by: Link | None = None) -> None: ...


class Fleet:
    """Forms an epoch whenever the ring is complete; ends it whenever a stage is lost.

    on_result(result), on_ready(), on_end(reason) are called from the event loop, and must be quick.
    idle() says whether a new epoch would disturb nobody.
    """

    def __init__(
        self,
        wishes: RingConfig,
        on_result: Callable[[Result], None],
        on_ready: Callable[[], None],
        on_end: Callable[[str], None],
        idle: Callable[[], bool],
        numbers: EpochNumbers | None = None,
    ) -> None:
        """numbers: of epochs to come."""
        self._numbers = numbers or EpochNumbers()
        self._wishes, self._on_result = wishes, on_result
        self._table = MemberTable(self.on_disconnect)
        self._epochs = Epochs(self._table, wishes, self._numbers, on_ready, on_end, idle)
        self._epoch = self._epochs.newest

    @property
    def ready(self) -> bool:
        """Every member of this epoch has said so."""
        return self.ring is not None

    @property
    def ring(self) -> Configuration | None:
        """What every member of the running epoch was told; None while there is none."""
        return self._epoch.ring

    def state(self) -> RingState | None:
        """What requests need to know of the running ring; None while there is none."""
        ring = self.ring
        if ring is None:
            return None
        return RingState(
            epoch=ring.epoch,
            pages=ring.pages,
            page_rows=ring.page_rows,
            slots=ring.slots,
            rows=ring.rows,
            max_positions=self.max_positions,
            has_drafter=ring.drafted,
            drafters=self.drafters,
        )

    @property
    def complaint(self) -> str | None:
        """Why the last attempt at an epoch failed; None once one has succeeded."""
        return self._epochs.complaint

    @property
    def registrations(self) -> list[Registration]:
        """Of everybody who has joined, in that order."""
        return self._table.registrations

    @property
    def max_positions(self) -> int:
        return min((one.max_positions for one in self.registrations), default=0)

    @property
    def drafters(self) -> tuple[DrafterName, ...]:
        """The ways to draft of the running epoch's drafter."""
        drafting = (one for one in self.registrations if one.kind == "drafter" and one.name in self._epoch)
        return next((one.drafters for one in drafting), ())

    @property
    def formed(self) -> bool:
        """Everybody of an epoch is known, ready or not."""
        return self._epoch.formed

    @property
    def short(self) -> bool:
        """One more worker would do good at once."""
        return not self.formed or len(self._epoch.stages) + len(self.idle_workers) < self._wishes.workers

    @property
    def idle_workers(self) -> list[Registration]:
        """Those who run nothing now."""
        return [one for one in self.registrations if one.kind == "worker" and one.name not in self._epoch]

    def ran(self, name: str) -> bool:
        """It was a stage of the newest epoch."""
        return any(stage.name == name for stage in self._epoch.stages)

    def accepts(self, registration: Registration) -> bool:
        """Whether it may join."""
        return may_join(registration, self.registrations, self._wishes)

    @property
    def lacking(self) -> bool:
        """It has no ring, and cannot form one of the members it has."""
        return not self.formed and not self._could_form()

    def completed_by(self, more: Sequence[Registration]) -> bool:
        """Whether it has no ring, is not likely to form one by itself, and could with these."""
        return (self.lacking or bool(self._epoch.failed and not self.formed)) and self._could_form(more)

    def waiting_for(self) -> str:
        """What keeps the ring from running, in words; empty when it runs."""
        return self._epochs.waiting_for()

    @property
    def epoch(self) -> int:
        """The newest epoch's number, running or not."""
        return self._epoch.number

    @property
    def plan(self) -> str:
        """Who runs what in the present epoch, and the pace that is expected; empty while there is none."""
        return self._epochs.in_words(self._epoch.stages) if self.formed else ""

    def members(self) -> tuple[MemberInfo, ...]:
        """Everybody who has joined, with the layers each runs now or was started with."""
        spare = [one.name for one in self.idle_workers] if self.formed else []
        return member_infos(self.registrations, self._epoch.running, spare)

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Raises Refused, naming both values, when it does not belong here."""
        self.add(registration, downlink)

    def add(self, registration: Registration, downlink: Link) -> None:
        """One more member, or one that is back before its old link was known to be lost. Raises Refused."""
        check_joining(registration, self.registrations, self._wishes)
        self._numbers.pass_over(registration.epoch)
        if older := self._table.find(registration.name):
            self._remove(registration.name, "another process took its place")
            self._table.disconnect(older)
        registration = with_one_gpu(registration, self.registrations)
        self._table.add(registration, downlink)
        log.info("member joined", kind=registration.kind, name=registration.name, at=registration.address)
        self._epochs.start_grace(self._wishes.take_over_after)  # where one comes back, others may
        if self.formed and registration.kind == "worker":
            self._table.send(registration.name, StandBy(self.epoch))
        self.reform()

    def release(self, name: str) -> Member:
        """Let a worker that runs nothing here go elsewhere; nothing is lost by it."""
        member = self._table[name]
        self._table.remove(name)
        return member

    def knows(self, name: str, by: Link | None = None) -> bool:
        """It is a member. by: the downlink of whoever is meant: another one may have its name by now."""
        member = self._table.find(name)
        return member is not None and (by is None or by is member.downlink)

    def on_message(self, name: str, message: object, by: Link | None = None) -> None:
        """Take a member's message. by: see `knows`."""
        if not self.knows(name, by):
            return
        match message:
            case Result() if message.epoch == self.epoch and self.formed:
                self._take(name, message)
            case Ready(epoch) if epoch == self.epoch:
                self._epochs.on_ready(name)
            case Progress(epoch) if epoch == self.epoch:
                self._epochs.on_progress(name, message)
            case Broken(epoch, reason) if epoch == self.epoch:
                self._epochs.on_broken(name, reason)
            case Leaving(reason):
                self.on_disconnect(
                    name, reason, by, min(LEAVE_TOGETHER_SECONDS, self._wishes.take_over_after)
                )
            case _:
                pass

    def on_disconnect(
        self, name: str, reason: str, by: Link | None = None, patience: float | None = None
    ) -> None:
        """A member is gone. A lost stage ends the epoch; a lost drafter is done without.

        by: see `knows`. patience: seconds before the others take over, if nobody else can; None: as wished.
        """
        if self.knows(name, by):
            self._remove(name, reason)
            self._epochs.start_grace(self._wishes.take_over_after if patience is None else patience)
            self.reform()

    def reform(self) -> None:
        """Begin a new epoch if the ring is complete and nothing runs that it would disturb."""
        self._epochs.reform()

    def rebalance(self) -> Rebalanced:
        """Share the layers out anew over all workers that help, whatever runs meanwhile.

        Raises Unavailable while there is no ring, Refused where the workers have no room.
        """
        return self._epochs.rebalance()

    async def tend(self, every: float) -> None:
        """Take in who came late, as soon as nobody would be disturbed. Runs until cancelled."""
        while True:
            await asyncio.sleep(every)
            if self.formed:
                self.reform()

    async def order(self, order: Order) -> None:
        """Pass an order to stage 0. Raises Unavailable when there is no ring."""
        ring = self.ring
        if ring is None:
            raise Unavailable(f"the ring is not complete: waiting for {self.waiting_for()}")
        await self._table[ring.stages[0].name].downlink.send(order)

    def _take(self, name: str, result: Result) -> None:
        """The last stage's word (late: of no lap, number 0), or the first one's on what could not begin."""
        first, last = self._epoch.stages[0].name, self._epoch.stages[-1].name
        rejects = result.number == 0 and not any(one.tokens for one in result.outcomes)
        if name == last or (name == first and rejects):
            self._on_result(result)
        else:
            log.warning("a result by one that cannot have any", name=name, epoch=result.epoch)

    def _remove(self, name: str, reason: str) -> None:
        log.warning("member lost", name=name, reason=reason)
        self._table.remove(name)
        self._epochs.on_leave(name, reason)

    def _could_form(self, more: Sequence[Registration] = ()) -> bool:
        """A ring of full size, with those besides the members."""
        return could_form([*self.registrations, *more], self._wishes, self._epoch.stages, self._epoch.failed)
