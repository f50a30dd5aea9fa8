"""The fleet of one ring: members that join and are lost, and the epochs formed of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from specsot.core.frames import Order, Result
from specsot.core.info import MemberInfo, Rebalanced
from specsot.errors import Refused, Unavailable
from specsot.members import (
    Broken,
    Configuration,
    Disband,
    MemberLeaving,
    Progress,
    Range,
    Ready,
    Registration,
    StandBy,
)
from specsot.params import DrafterName
from specsot.transport.heartbeat import SilenceTimer
from specsot.transport.links import Link
from specsot_master.core.inputs import RingLost, RingReady
from specsot_master.core.ring.epoch import (
    Epoch,
    EpochNumbers,
    check_joining,
    configurations_of,
    count_drafters,
    may_join,
    member_infos,
    with_one_gpu,
    without_failed_drafters,
    without_smallest_drafter,
)
from specsot_master.core.ring.placement import (
    Stages,
    better_stages,
    could_form,
    expected_throughput,
    faster_stages,
    next_stages,
    rebalanced_stages,
    to_load,
)
from specsot_master.core.ring.ring_state import RingConfig, RingState
from specsot_master.handover import KvHandover
from specsot_master.members import DrafterGrace, Member, MemberTable, RejoinGrace, RingUser

log = structlog.get_logger()

# Seconds in which others leave, too, where a whole fleet is stopped: nothing is loaded; not measured.
LEAVE_TOGETHER_SECONDS = 0.2
# Seconds before a broken ring is tried again: doubles from one to the other; not measured.
FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
BARRIER_SECONDS = 180.0  # seconds in which some member must load a layer more, or be ready; not measured


class Fleet:
    """Forms an epoch whenever the ring is complete; ends it whenever a stage is lost.

    changed: the ring is complete, or broke. numbers: of epochs to come. user: to be set before anybody joins.
    complaint: why the last attempt at an epoch failed; None once one has succeeded.
    """

    user: RingUser

    def __init__(
        self, config: RingConfig, changed: Callable[[], None], numbers: EpochNumbers | None = None
    ) -> None:
        self._config = config
        self._changed = changed
        self._numbers = numbers or EpochNumbers()
        self._table = MemberTable(self.on_disconnect)
        self._epoch = Epoch()
        self.complaint: str | None = None
        self._missing = ""  # as it was said last
        self._drafters: tuple[DrafterName, ...] = ()  # of the newest drafter, which may come back
        self._retry = FIRST_RETRY_SECONDS
        self._grace = RejoinGrace(self.reform)
        self._drafter_grace = DrafterGrace(self.reform, config.drafter_grace)
        self._barrier: SilenceTimer | None = None  # while somebody is not ready
        self._ahead: dict[str, Range] = {}  # layers that workers were told to load for a later epoch
        self._loaded: dict[str, Range] = {}  # and those that they have
        self._roomless: dict[str, Range] = {}  # and those for which they have no room beside what runs
        self._handover = KvHandover(self._table, self.reform)
        self._coming: Stages = ()  # which the next epoch gets: rows are handed over to them
        self._rebalancing: asyncio.Future[str] | None = None  # to those; why it is not done, or nothing

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
        return self._state_of(self.ring) if self.ring else None

    def _state_of(self, ring: Configuration) -> RingState:
        return RingState(
            epoch=ring.epoch,
            pages=ring.pages,
            page_rows=ring.page_rows,
            slots=ring.slots,
            rows=ring.rows,
            max_positions=min(one.max_positions for one in self.registrations),
            has_drafter=ring.drafted,
            drafters=self._drafters,
            curve=ring.curve,
            kept=self._handover.kept(ring.epoch),
        )

    @property
    def registrations(self) -> list[Registration]:
        return self._table.registrations

    @property
    def formed(self) -> bool:
        """Everybody of an epoch is known, ready or not."""
        return self._epoch.formed

    @property
    def short(self) -> bool:
        """One more worker would do good at once."""
        return not self.formed or len(self._epoch.stages) + len(self.idle_workers) < self._config.workers

    @property
    def idle_workers(self) -> list[Registration]:
        return [one for one in self.registrations if one.kind == "worker" and one.name not in self._epoch]

    def ran(self, name: str) -> bool:
        """It was a stage of the newest epoch."""
        return any(stage.name == name for stage in self._epoch.stages)

    def accepts(self, registration: Registration) -> bool:
        return may_join(registration, self.registrations, self._config)

    @property
    def lacking(self) -> bool:
        """It has no ring, and cannot form one of the members it has."""
        return not self.formed and not self._could_form()

    def completed_by(self, more: Sequence[Registration]) -> bool:
        """Whether it has no ring, is not likely to form one by itself, and could with these."""
        return (self.lacking or bool(self._epoch.failed and not self.formed)) and self._could_form(more)

    def waiting_for(self) -> str:
        """What keeps the ring from running, in words; empty when it runs."""
        if self._epoch.ring:
            return ""
        if self._epoch.formed:
            return self.complaint or f"{self._epoch.waiting_text} to get ready"
        drawn = self._draw_up()
        return drawn if isinstance(drawn, str) else self.complaint or "the next attempt"

    @property
    def epoch(self) -> int:
        """The newest epoch's number, running or not."""
        return self._epoch.number

    @property
    def plan(self) -> str:
        """Who runs what in the present epoch, and the pace that is expected; empty while there is none."""
        return self._in_words(self._epoch.stages) if self.formed else ""

    def members(self) -> tuple[MemberInfo, ...]:
        """Everybody who has joined, with the layers each runs now or was started with."""
        spare = [one.name for one in self.registrations if one.name not in self._epoch] if self.formed else []
        return member_infos(self.registrations, self._epoch.running, spare)

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Raises Refused, naming both values, when it does not belong here."""
        self.add(registration, downlink)

    def add(self, registration: Registration, downlink: Link) -> None:
        """One more member, or one that is back before its old link was known to be lost. Raises Refused."""
        check_joining(registration, self.registrations, self._config)
        self._numbers.pass_over(registration.epoch)
        if older := self._table.find(registration.name):
            self._remove(registration.name, "another process took its place")
            self._table.disconnect(older)
        registration = with_one_gpu(registration, self.registrations)
        self._table.add(registration, downlink)
        self._drafters = registration.drafters or self._drafters
        log.info("member joined", kind=registration.kind, name=registration.name, at=registration.address)
        self._start_grace(self._config.take_over_after)  # where one comes back, others may
        if self.formed and registration.kind == "worker":
            self._table.send(registration.name, StandBy(self.epoch))
        self.reform()

    def release(self, name: str) -> Member:
        """Let a worker that runs nothing here go elsewhere; nothing is lost by it."""
        self._epoch.forget(name)
        if any(stage.name == name for stage in self._coming):
            self._drop_coming(f"{name} is needed elsewhere")
        return self._table.remove(name)

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
                self._mark_ready(name)
            case Progress(epoch, done, total, layers=Range() as layers) if epoch == self.epoch:
                (self._roomless if done < total else self._loaded)[name] = layers
                self.reform()
            case Progress(epoch, handed=int(number), over=over) if epoch == self.epoch and number:
                self._handover.note(name, number, over)
                self.reform()
            case Progress(epoch) if epoch == self.epoch:
                self._on_progress(name, message)
            case Broken(epoch, reason) if epoch == self.epoch:
                self._on_broken(name, reason)
            case MemberLeaving(reason):
                self.on_disconnect(
                    name, reason, by, min(LEAVE_TOGETHER_SECONDS, self._config.take_over_after)
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
            self._start_grace(self._config.take_over_after if patience is None else patience)
            self.reform()

    def reform(self) -> None:
        """Begin a new epoch if the ring is complete, and nothing runs that it would disturb, or all goes on
        faster afterwards.
        """
        epoch = self._epoch
        members = self._table.registrations
        self._table.send_all(epoch.rejoin_drafter(members, self._config))
        if not epoch.formed:
            self._form()
            return
        better = better_stages(members, self._config, epoch.stages, epoch.settled)
        holds = self._count_fitting(better, members) if better else None
        if better and holds is not None and not (self.user.at_work and epoch.ring):
            self._begin_anew(better, "the drafter joined" if better == epoch.stages else "a worker joined")
        elif epoch.ring:
            self._take_in(members, better if holds and holds > self.user.at_work else None)

    def _takers(self, stages: Stages) -> Sequence[Registration]:
        """Who is in a ring of these stages: where there was one before, no drafter that has no room."""
        members = without_failed_drafters(self.registrations, self._epoch.failed)
        if self._epoch.stages:
            while count_drafters(members) and self._count_fitting(stages, members) is None:
                members = without_smallest_drafter(members)
        return members

    def _count_fitting(self, stages: Stages, members: Sequence[Registration]) -> int | None:
        """Requests that a ring of these stages could hold; None where it could not be."""
        try:
            told = configurations_of(self.epoch, members, stages, self._config)
        except Refused:
            return None
        return self.user.fitting(self._state_of(next(iter(told.values()))))

    def _take_in(self, members: Sequence[Registration], larger: Stages | None) -> None:
        """Workers that make what runs faster, and still hold it, or the ring larger where that is waited for;
        once everybody has the layers that it then runs: until then nothing is interrupted.
        """
        epoch = self._epoch
        wanted = (
            self._coming
            or larger
            or faster_stages(members, self._config, epoch.stages, epoch.busy, self.user.at_work)
        )
        holds = self._count_fitting(wanted, members) if wanted else None
        if wanted is None or holds is None or (holds < self.user.at_work and not self._rebalancing):
            return
        missing = to_load(wanted, epoch.stages, self._loaded)
        needed = self._rebalancing or larger
        if all(needed and self._roomless.get(name) == missing[name] for name in missing):
            self._coming = wanted  # what else would be better once they have their rows comes later
            if self._handover.done(epoch, wanted, self.user.final_rows):
                self._begin_anew(wanted, "the ring is rebalanced" if self._rebalancing else "a worker joined")
                self._handover.serve(epoch.number)
            return
        for name, layers in missing.items():
            if self._ahead.get(name) != layers:
                self._ahead[name] = layers
                self._table.send(name, StandBy(epoch.number, layers))

    async def rebalance(self) -> Rebalanced:
        """Share the layers out anew. Returns when the next epoch has begun: where requests run, once layers
        are loaded, if there is room for them beside those that run, and rows are handed over. Raises
        Unavailable while there is no ring, or where it breaks before that, Refused for want of room.
        """
        if not self._epoch.formed:
            raise Unavailable(f"the ring is not complete: waiting for {self.waiting_for()}")
        stages = rebalanced_stages(self._table.registrations, self._config)
        changed = stages != self._epoch.stages
        configurations_of(self.epoch, self.registrations, stages, self._config)  # there is KV memory for it
        if changed and self.ready and self.user.at_work:
            dropped = self._rebalancing = self._rebalancing or asyncio.get_running_loop().create_future()
            self._coming = stages
            self.reform()
            if reason := await asyncio.shield(dropped):
                raise Unavailable(f"the ring is not rebalanced: {reason}")
        elif changed:
            self._begin_anew(stages, "the ring is rebalanced")
        return Rebalanced(changed, self._epoch.number, self._in_words(stages))

    async def tend(self, every: float) -> None:
        """Take in who came late, as soon as nobody would be disturbed. Runs until cancelled."""
        while True:
            await asyncio.sleep(every)
            if self.formed:
                self.reform()

    async def order(self, order: Order) -> None:
        """Pass an order to stage 0. Raises Unavailable when there is no ring."""
        if (ring := self.ring) is None:
            raise Unavailable(f"the ring is not complete: waiting for {self.waiting_for()}")
        await self._table[ring.stages[0].name].downlink.send(order)

    def _take(self, name: str, result: Result) -> None:
        """The last stage's word (late: of no lap, number 0), or the first one's on what could not begin."""
        first, last = self._epoch.stages[0].name, self._epoch.stages[-1].name
        rejects = result.number == 0 and not any(one.tokens for one in result.outcomes)
        if name == last or (name == first and rejects):
            self.user.handle(result)
        else:
            log.warning("a result by one that cannot have any", name=name, epoch=result.epoch)

    def _remove(self, name: str, reason: str) -> None:
        """A lost stage ends the epoch, a lost drafter does not."""
        log.warning("member lost", name=name, reason=reason)
        self._table.remove(name)
        self._table.send_all(self._epoch.remove_drafter(name) or {})
        self._epoch.failed.discard(name)
        self._epoch.forget(name)
        for layers in (self._ahead, self._loaded, self._roomless):
            layers.pop(name, None)
        if any(stage.name == name for stage in self._coming):
            self._drop_coming(f"{name} is gone: {reason}")
        if name in self._epoch:
            self._break(f"{name} is gone: {reason}", name)

    def _could_form(self, more: Sequence[Registration] = ()) -> bool:
        """A ring of full size, with those besides the members."""
        return could_form([*self.registrations, *more], self._config, self._epoch.stages, self._epoch.failed)

    # --- epochs ---

    def _in_words(self, stages: Stages) -> str:
        return str(expected_throughput(stages, {one.name: one for one in self._table.registrations}))

    def _start_grace(self, seconds: float) -> None:
        """Those whom a ring lost may come back so long."""
        if self._epoch.stages and not self._epoch.formed:
            self._grace.begin(seconds)

    def _on_progress(self, name: str, progress: Progress) -> None:
        """It gets ready, and is so far."""
        if self._epoch.record_progress(name, progress) and self._barrier:
            self._barrier.reset()

    def _mark_ready(self, name: str) -> None:
        """One more is ready: of those whom the ring waits for, or a drafter that comes back."""
        if self._barrier:
            self._barrier.reset()
        told = self._epoch.mark_ready(name)
        if told:
            self._table.send_all(told)
            log.info("a drafter joined the running ring", epoch=self._epoch.number, name=name)
            self._announce()  # somebody may wait for it
        elif name in self._epoch:
            self._announce_if_ready()

    def _on_broken(self, name: str, reason: str) -> None:
        """Without its drafter an epoch goes on; this one is not asked again before the next."""
        epoch = self._epoch
        if (told := epoch.remove_drafter(name)) is not None:
            self._table.send_all(told)
            epoch.failed.add(name)
            log.warning("a drafter left the ring", name=name, reason=reason)
        elif name in epoch:
            if name in epoch.not_ready:
                epoch.failed.add(name)
            self.complaint = f"{name}: {reason}"
            self._break(self.complaint, name)
            self._try_again()

    def _draw_up(self) -> Stages | str:
        """The next epoch's stages, or what is missing."""
        before = self._epoch.stages
        failed = self._epoch.failed
        try:
            stages = next_stages(self._table.registrations, self._config, before, self._grace.active, failed)
        except Refused as error:
            self.complaint = stages = str(error)
        first = not before and not isinstance(stages, str)
        return "the drafter" if first and self._drafter_grace.waits(self.registrations) else stages

    def _form(self) -> None:
        stages = self._draw_up()
        if not isinstance(stages, str):
            self._begin(stages)
            return
        if stages != self._missing:  # said once, however often it is tried
            log.info("waiting for the ring", missing=stages)
            self._missing = stages
            self._changed()

    def _begin(self, stages: Stages) -> None:
        self._missing = ""
        members = self._takers(stages)
        try:
            told = self._epoch.begin(next(self._numbers), members, stages, self._config)
        except Refused as error:
            self.complaint = str(error)
            log.error("no ring", reason=str(error))
            self._changed()  # somebody may wait for one
            return
        self._grace.end()
        self._ahead = {}
        self._loaded = {}
        self._roomless = {}
        log.info("plan", epoch=self._epoch.number, stages=self._in_words(stages))
        self._barrier = SilenceTimer(BARRIER_SECONDS, self._give_up)
        self._table.send_all(told)

    def _give_up(self) -> None:
        """Nobody gets any further. Whoever has not done its part is lost; if all have, something that one of
        them waits for is.
        """
        behind = self._epoch.unfinished
        standing = self._epoch.progress_text
        reason = f"no progress for {BARRIER_SECONDS:g} s in getting ready: {standing}"
        log.error("the ring does not get ready", epoch=self._epoch.number, standing=standing, lost=behind)
        self.complaint = reason
        self._break(reason, None)
        for name in behind:
            self._table.drop(name, reason)
        self._try_again()

    def _begin_anew(self, stages: Stages, reason: str) -> None:
        if stages == self._coming:
            self._drop_coming("")  # it has come
        self._break(reason, None, planned=True)
        self._begin(stages)

    def _announce_if_ready(self) -> None:
        if ring := self._epoch.ring:
            self._stop_watching()
            self.complaint = None
            self._retry = FIRST_RETRY_SECONDS
            self._epoch.failed.clear()
            ranges = " ".join(f"{stage.name}={stage.layers}" for stage in ring.stages)
            drafter = ",".join(place.address for place in ring.drafters) or None
            log.info("ring complete", epoch=ring.epoch, stages=ranges, drafter=drafter, pages=ring.pages)
            self._announce()

    def _announce(self) -> None:
        self.user.handle(RingReady())
        self._changed()

    def _break(self, reason: str, culprit: str | None, planned: bool = False) -> None:
        """End the epoch: everybody but the culprit is told, requests hear why."""
        self._drop_coming(reason)
        self._stop_watching()
        told = [name for name in self._epoch.end() if name != culprit]
        self._table.send_all(dict.fromkeys(told, Disband(self._epoch.number, reason)))
        self.user.handle(RingLost(reason, planned))
        self._changed()

    def _drop_coming(self, reason: str) -> None:
        dropped = self._rebalancing
        self._coming = ()
        self._rebalancing = None
        if dropped:
            dropped.set_result(reason)

    def _stop_watching(self) -> None:
        if self._barrier:
            self._barrier.stop()
        self._barrier = None

    def _try_again(self) -> None:
        asyncio.get_running_loop().call_later(self._retry, self.reform)
        self._retry = min(self._retry * 2, MAX_RETRY_SECONDS)
