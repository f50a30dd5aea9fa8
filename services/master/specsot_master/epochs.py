"""Forms the ring of one fleet: sends every member its configuration, waits until all are ready, and forms
the next epoch when a stage is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from specsot.core.info import Rebalanced
from specsot.errors import Refused, SpecsotError, Unavailable
from specsot.members import Configuration, Disband, Progress, Registration, Rejoined, StandBy
from specsot.tasks import Failed, start
from specsot.transport.heartbeat import SilenceTimer
from specsot.transport.links import Link
from specsot_master.core.epoch import Epoch
from specsot_master.core.placement import (
    RingConfig,
    Stages,
    better_stages,
    expected_throughput,
    next_stages,
    rebalanced_stages,
)

MemberMessage = Configuration | Disband | StandBy | Rejoined


@dataclass(frozen=True, slots=True)
class Member:
    registration: Registration
    downlink: Link


class MemberTable:
    """Members by name, in the order they joined. on_lost(name, reason): a message did not go through."""

    def __init__(self, on_lost: Callable[[str, str], None]) -> None:
        self._on_lost = on_lost
        self._members: dict[str, Member] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @property
    def registrations(self) -> list[Registration]:
        return [member.registration for member in list(self._members.values())]

    def add(self, registration: Registration, downlink: Link) -> None:
        self._members[registration.name] = Member(registration, downlink)

    def find(self, name: str) -> Member | None:
        return self._members.get(name)

    def remove(self, name: str) -> Member | None:
        return self._members.pop(name, None)

    def send(self, name: str, word: MemberMessage) -> None:
        """Soon, and in the order of the calls."""
        self._soon(
            self._deliver(name, word), lambda error: self._on_lost(name, f"{type(error).__name__} on the way")
        )

    def send_all(self, words: Mapping[str, MemberMessage]) -> None:
        """To each by name its own."""
        for name, word in words.items():
            self.send(name, word)

    def disconnect(self, member: Member) -> None:
        """Another one took its place: what its link still says, and its end, is nobody's any more."""
        self._soon(member.downlink.close())

    def drop(self, name: str, reason: str) -> None:
        """It does not do what it must; once it does again, it may join again."""
        if member := self._members.get(name):
            self.disconnect(member)
            self._on_lost(name, reason)

    async def _deliver(self, name: str, word: MemberMessage) -> None:
        member = self._members.get(name)
        if member is None:
            return
        try:
            await member.downlink.send(word)
        except SpecsotError as error:
            if self._members.get(name) is member:
                self._on_lost(name, str(error))

    def _soon(self, work: Coroutine[Any, Any, None], failed: Failed | None = None) -> None:
        task = start(work, failed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RejoinGrace:
    """`over` is called once it has run out."""

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        return self._alarm is not None

    def begin(self, seconds: float) -> None:
        """From now on, however long it was to last before."""
        self.end()
        self._alarm = asyncio.get_running_loop().call_later(seconds, self._run_out)

    def end(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None

    def _run_out(self) -> None:
        self._alarm = None
        self._over()


log = structlog.get_logger()

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0  # seconds before a broken ring is tried again
BARRIER_SECONDS = (
    180.0  # seconds in which somebody of those who get ready gets further: loads a layer, or is ready
)


class EpochNumbers:
    """Of epochs to come: each is larger than all before, and than any that a member has heard of."""

    def __init__(self, after: int = 0) -> None:
        self._newest = after

    def __next__(self) -> int:
        self._newest += 1
        return self._newest

    def pass_over(self, epoch: int) -> None:
        """A member has heard of this one: of a master whose clock was ahead of ours."""
        self._newest = max(self._newest, epoch)


class Epochs:
    """newest: running or not. complaint: why the last attempt failed; None once one has succeeded.

    on_ready(), on_end(reason) and idle() are the fleet's.
    """

    def __init__(
        self,
        table: MemberTable,
        wishes: RingConfig,
        numbers: EpochNumbers,
        on_ready: Callable[[], None],
        on_end: Callable[[str], None],
        idle: Callable[[], bool],
    ) -> None:
        self._table, self._wishes, self._numbers = table, wishes, numbers
        self._on_ready, self._on_end, self._idle = on_ready, on_end, idle
        self.newest = Epoch()
        self.complaint: str | None = None
        self._missing = ""  # as it was said last
        self._retry = FIRST_RETRY_SECONDS
        self._patience = RejoinGrace(self.reform)
        self._barrier: SilenceTimer | None = None  # while somebody is not ready

    def waiting_for(self) -> str:
        """What keeps the ring from running, in words; empty when it runs."""
        if self.newest.ring:
            return ""
        if self.newest.formed:
            return self.complaint or f"{', '.join(self.newest.not_ready)} to get ready"
        drawn = self._draw_up()
        return drawn if isinstance(drawn, str) else self.complaint or "the next attempt"

    def in_words(self, stages: Stages) -> str:
        """Who runs what, and the pace that is expected."""
        return str(expected_throughput(stages, {one.name: one for one in self._table.registrations}))

    def start_grace(self, seconds: float) -> None:
        """Those whom a ring lost may come back so long."""
        if self.newest.stages and not self.newest.formed:
            self._patience.begin(seconds)

    def reform(self) -> None:
        """Begin a new epoch if the ring is complete and nothing runs that it would disturb."""
        epoch, members = self.newest, self._table.registrations
        self._table.send_all(epoch.rejoin_drafter(members, self._wishes))
        if not epoch.formed:
            self._form()
            return
        better = better_stages(members, self._wishes, epoch.stages, epoch.busy)
        if better and (self._idle() or not epoch.ring):
            self._begin_anew(better, "the ring is formed anew")

    def rebalance(self) -> Rebalanced:
        """Share the layers out anew. Raises Unavailable while there is no ring, Refused for want of room."""
        if not self.newest.formed:
            raise Unavailable(f"the ring is not complete: waiting for {self.waiting_for()}")
        stages = rebalanced_stages(self._table.registrations, self._wishes)
        changed = stages != self.newest.stages
        if changed:
            self._begin_anew(stages, "the ring is rebalanced")
        return Rebalanced(changed, self.newest.number, self.in_words(stages))

    def on_progress(self, name: str, progress: Progress) -> None:
        """It gets ready, and is so far."""
        if self.newest.record_progress(name, progress) and self._barrier:
            self._barrier.reset()

    def on_ready(self, name: str) -> None:
        """One more is ready: of those whom the ring waits for, or a drafter that comes back."""
        if self._barrier:
            self._barrier.reset()
        told = self.newest.mark_ready(name)
        if told:
            self._table.send_all(told)
            log.info("the drafter is back", epoch=self.newest.number, name=name)
            self._on_ready()  # somebody may wait for it
        elif name in self.newest:
            self._announce_if_ready()

    def on_broken(self, name: str, reason: str) -> None:
        """Without its drafter an epoch goes on; this one is not asked again before the next."""
        epoch = self.newest
        if epoch.remove_drafter(name):
            epoch.failed.add(name)
            log.warning("nobody drafts", name=name, reason=reason)
        elif name in epoch:
            if name in epoch.not_ready:
                epoch.failed.add(name)
            self.complaint = f"{name}: {reason}"
            self._break(self.complaint, name)
            self._try_again()

    def on_leave(self, name: str, reason: str) -> None:
        """A member is gone. A lost stage ends the epoch, a lost drafter does not."""
        self.newest.remove_drafter(name)
        self.newest.failed.discard(name)
        if name in self.newest:
            self._break(f"{name} is gone: {reason}", name)

    def _draw_up(self) -> Stages | str:
        """The next epoch's stages, or what is missing."""
        before, failed = self.newest.stages, self.newest.failed
        try:
            return next_stages(self._table.registrations, self._wishes, before, self._patience.active, failed)
        except Refused as error:
            self.complaint = str(error)
            return self.complaint

    def _form(self) -> None:
        stages = self._draw_up()
        if not isinstance(stages, str):
            self._begin(stages)
            return
        if stages != self._missing:  # said once, however often it is tried
            log.info("waiting for the ring", missing=stages)
        self._missing = stages

    def _begin(self, stages: Stages) -> None:
        self._missing = ""
        try:
            told = self.newest.begin(next(self._numbers), self._table.registrations, stages, self._wishes)
        except Refused as error:
            self.complaint = str(error)
            log.error("no ring", reason=str(error))
            return
        self._patience.end()
        log.info("plan", epoch=self.newest.number, stages=self.in_words(stages))
        self._barrier = SilenceTimer(BARRIER_SECONDS, self._give_up)
        self._table.send_all(told)

    def _give_up(self) -> None:
        """Nobody gets any further. Whoever has not done its part is lost; if all have, something that one of
        them waits for is.
        """
        behind, standing = self.newest.unfinished, self.newest.progress_text
        reason = f"no progress for {BARRIER_SECONDS:g} s in getting ready: {standing}"
        log.error("the ring does not get ready", epoch=self.newest.number, standing=standing, lost=behind)
        self.complaint = reason
        self._break(reason, None)
        for name in behind:
            self._table.drop(name, reason)
        self._try_again()

    def _begin_anew(self, stages: Stages, reason: str) -> None:
        self._break(reason, None)
        self._begin(stages)

    def _announce_if_ready(self) -> None:
        if ring := self.newest.ring:
            self._stop_watching()
            self.complaint, self._retry = None, FIRST_RETRY_SECONDS
            self.newest.failed.clear()
            ranges = " ".join(f"{stage.name}={stage.layers}" for stage in ring.stages)
            log.info("ring complete", epoch=ring.epoch, stages=ranges, drafter=ring.drafter, pages=ring.pages)
            self._on_ready()

    def _break(self, reason: str, culprit: str | None) -> None:
        """End the epoch: everybody but the culprit is told, requests hear why."""
        self._stop_watching()
        told = [name for name in self.newest.end() if name != culprit]
        self._table.send_all(dict.fromkeys(told, Disband(self.newest.number, reason)))
        self._on_end(reason)

    def _stop_watching(self) -> None:
        if self._barrier:
            self._barrier.stop()
        self._barrier = None

    def _try_again(self) -> None:
        asyncio.get_running_loop().call_later(self._retry, self.reform)
        self._retry = min(self._retry * 2, MAX_RETRY_SECONDS)
