"""The members and the epoch: takes joins, sends configurations, counts the barrier, hears of losses.

Refuses to know tensors, text and transports (a member is a Registration and a downlink).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from specsot.errors import Refused, SpecsotError, Unavailable
from specsot.frames import Order, Result
from specsot.info import MemberInfo
from specsot.links import Link
from specsot.members import Broken, Configuration, Disband, Leaving, Ready, Registration
from specsot.params import DrafterName
from specsot_master.fleet.formation import Wishes, check, form, missing

log = structlog.get_logger()

FIRST_RETRY, LONGEST_RETRY = 1.0, 30.0  # seconds before a broken ring is tried again


@dataclass(slots=True)
class _Member:
    registration: Registration
    downlink: Link
    ready: bool = False


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
        after: int = 0,
    ) -> None:
        """after: the newest epoch that masters before this one may have begun."""
        self._wishes, self._idle = wishes, idle
        self._on_result, self._on_ready, self._on_end = on_result, on_ready, on_end
        self._retry = FIRST_RETRY
        self._members: dict[str, _Member] = {}
        self._epoch = after
        self._plan: dict[str, Configuration] = {}
        self._complaint: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        """Every member of this epoch has said so."""
        return bool(self._plan) and all(self._members[name].ready for name in self._plan)

    @property
    def ring(self) -> Configuration | None:
        """What every member of the running epoch was told; None while there is none."""
        return next(iter(self._plan.values())) if self.ready else None

    @property
    def complaint(self) -> str | None:
        """Why the last attempt at an epoch failed; None once one has succeeded."""
        return self._complaint

    @property
    def max_positions(self) -> int:
        return min((m.registration.max_positions for m in self._members.values()), default=0)

    @property
    def drafters(self) -> tuple[DrafterName, ...]:
        """The ways to draft of the running epoch's drafter."""
        names = [name for name in self._plan if self._members[name].registration.kind == "drafter"]
        return self._members[names[0]].registration.drafters if names else ()

    def waiting_for(self) -> str:
        """What keeps the ring from running, in words; empty when it runs."""
        if self.ready:
            return ""
        lacking = missing([member.registration for member in self._members.values()], self._wishes)
        if lacking:
            return lacking
        slow = [name for name in self._plan if not self._members[name].ready]
        return self._complaint or f"{', '.join(slow)} to get ready"

    @property
    def epoch(self) -> int:
        """The newest epoch's number, running or not."""
        return self._epoch

    def members(self) -> tuple[MemberInfo, ...]:
        """Everybody who has joined, with the layers each runs now or was started with."""
        ring = next(iter(self._plan.values()), None)
        running = {stage.name: stage.layers for stage in ring.stages} if ring else {}
        return tuple(
            MemberInfo(one.kind, one.name, one.address, one.fingerprint, running.get(one.name, one.layers))
            for one in (member.registration for member in self._members.values())
        )

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Take a member. Raises Refused, naming both values, when it does not belong here."""
        check(registration, [member.registration for member in self._members.values()], self._wishes)
        self._members[registration.name] = _Member(registration, downlink)
        log.info("member joined", kind=registration.kind, name=registration.name, at=registration.address)
        self.reform()

    def heard(self, name: str, message: object) -> None:
        """Take a member's message."""
        member = self._members.get(name)
        if member is None:
            return
        match message:
            case Result() if message.epoch == self._epoch:
                self._on_result(message)
            case Ready(epoch) if epoch == self._epoch:
                member.ready = True
                self._announce_if_ready()
            case Broken(epoch, reason) if epoch in (0, self._epoch):
                self._complaint = f"{name}: {reason}"
                self._break(self._complaint, name)
                self._retry_later()
            case Leaving(reason):
                self.lost(name, reason)
            case _:
                pass

    def lost(self, name: str, reason: str) -> None:
        """A member is gone. A lost stage ends the epoch; a lost drafter is done without."""
        running = self.ready
        member = self._members.pop(name, None)
        if member is None:
            return
        log.warning("member lost", name=name, reason=reason)
        if name not in self._plan:
            return
        if member.registration.kind == "drafter" and running:
            del self._plan[name]
            self._plan = {one: replace(plan, drafter=None) for one, plan in self._plan.items()}
            return
        self._break(f"{name} is gone: {reason}", name)
        self.reform()

    def reform(self) -> None:
        """Begin a new epoch if the ring is complete and nothing runs that it would disturb."""
        registrations = [member.registration for member in self._members.values()]
        waiting = missing(registrations, self._wishes)
        if waiting:
            log.info("waiting for the ring", missing=waiting)
        elif not self._plan:
            self._begin(registrations)
        elif self._improvable and (self._idle() or not self.ready):
            self._break("the ring is formed anew", None)
            self._begin(registrations)

    async def tend(self, every: float) -> None:
        """Take a drafter in that came late, as soon as nobody would be disturbed. Runs until cancelled."""
        while True:
            await asyncio.sleep(every)
            if self._improvable:
                self.reform()

    @property
    def _improvable(self) -> bool:
        """A drafter has joined that the running epoch does not use."""
        drafters = {n for n, m in self._members.items() if m.registration.kind == "drafter"}
        return self._wishes.drafter and not drafters <= self._plan.keys()

    async def order(self, order: Order) -> None:
        """Pass an order to stage 0. Raises Unavailable when there is no ring."""
        ring = self.ring
        if ring is None:
            raise Unavailable(f"the ring is not complete: waiting for {self.waiting_for()}")
        await self._members[ring.stages[0].name].downlink.send(order)

    def _begin(self, registrations: list[Registration]) -> None:
        self._epoch += 1
        try:
            self._plan = form(self._epoch, registrations, self._wishes)
        except Refused as error:
            self._plan, self._complaint = {}, str(error)
            log.error("no ring", reason=str(error))
            return
        for name, configuration in self._plan.items():
            self._members[name].ready = False
            self._tell(name, configuration)

    def _retry_later(self) -> None:
        asyncio.get_running_loop().call_later(self._retry, self.reform)
        self._retry = min(self._retry * 2, LONGEST_RETRY)

    def _announce_if_ready(self) -> None:
        if self.ready:
            self._complaint, self._retry = None, FIRST_RETRY
            ring = next(iter(self._plan.values()))
            ranges = " ".join(f"{stage.name}={stage.layers}" for stage in ring.stages)
            log.info(
                "ring complete", epoch=self._epoch, stages=ranges, drafter=ring.drafter, pages=ring.pages
            )
            self._on_ready()

    def _break(self, reason: str, culprit: str | None) -> None:
        """End the epoch: everybody but the culprit is told, requests hear why."""
        told, self._plan = [name for name in self._plan if name != culprit], {}
        for name in told:
            if name in self._members:
                self._tell(name, Disband(self._epoch, reason))
        self._on_end(reason)

    def _tell(self, name: str, message: Configuration | Disband) -> None:
        task = asyncio.get_running_loop().create_task(self._send(name, message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, name: str, message: Configuration | Disband) -> None:
        member = self._members.get(name)
        if member is None:
            return
        try:
            await member.downlink.send(message)
        except SpecsotError as error:
            self.lost(name, str(error))
