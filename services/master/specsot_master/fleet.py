"""Manages the members of one ring: admits them, forms epochs of them, ends an epoch if a stage is lost."""

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
from specsot_master.kv_copies import share_one_cpu
from specsot_master.members import DrafterGrace, Member, MemberTable, RejoinGrace, RingUser

log = structlog.get_logger()

# Seconds. After a member has announced that it leaves, the remaining workers take over its layers no earlier
# than this. If a whole fleet is stopped, the others leave meanwhile too, and no layers are loaded in vain.
# Untuned.
LEAVE_TOGETHER_SECONDS = 0.2
# Seconds before a broken ring is formed again, doubled from the first value up to the second. Untuned.
FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
# Seconds within which at least one member must make progress (load a further layer, or become ready) while an
# epoch starts. Untuned.
BARRIER_SECONDS = 180.0


class Fleet:
    """Forms an epoch whenever enough members have joined, and ends it whenever a stage is lost.

    An epoch is one formation of the ring: which member runs which layers. Messages of members carry the
    epoch's number, and those of another epoch are ignored. The engine that uses the ring must be set as
    `user` before the first member joins. The attribute `complaint` says why the last attempt at an epoch
    failed; it is None once a ring is complete.
    """

    # The engine that uses the ring; set before the first member joins.
    user: RingUser

    def __init__(
        self, config: RingConfig, changed: Callable[[], None], numbers: EpochNumbers | None = None
    ) -> None:
        """Create a fleet without members.

        changed: called whenever the ring becomes complete or breaks, or what it waits for changes.
        numbers: the source of epoch numbers, which several fleets of one master share; None for a source of
            this fleet's own.
        config: the options of the ring, with its model's fingerprint and number of layers.
        """
        self._config = config
        self._changed = changed
        self._numbers = numbers or EpochNumbers()
        self._table = MemberTable(self.on_disconnect)
        self._epoch = Epoch()
        self.complaint: str | None = None
        # What the ring lacked when this was logged last.
        self._missing = ""
        # The drafting methods of the newest drafter. They outlast its loss, because it may come back.
        self._drafters: tuple[DrafterName, ...] = ()
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._grace = RejoinGrace(self.reform)
        self._drafter_grace = DrafterGrace(self.reform, config.drafter_grace)
        # Ends the epoch if no member makes progress; set while some member of the epoch is not ready.
        self._barrier: SilenceTimer | None = None
        # By worker: the layers that it was ordered to load for a later epoch, those that it has loaded, and
        # those for which it has no memory in addition to the layers that it runs.
        self._loading_ahead: dict[str, Range] = {}
        self._loaded_ahead: dict[str, Range] = {}
        self._without_room: dict[str, Range] = {}
        self._handover = KvHandover(self._table, self.reform, config.hop_dtype)
        # True after a loss, until the ring has generated a token: another change before would delay requests
        # once more.
        self._must_run = False
        # The stages of the next epoch, to which KV is being migrated; empty if no change is under way.
        self._planned_stages: Stages = ()
        # Set while `rebalance` waits for these stages. The result says why they were given up, or is empty.
        self._rebalancing: asyncio.Future[str] | None = None

    @property
    def ready(self) -> bool:
        """True if the ring is complete: every member of the epoch has reported that it is ready."""
        return self.ring is not None

    @property
    def ring(self) -> Configuration | None:
        """The configuration of the running epoch, as stage 0 and all others received it; None while an epoch
        starts or there is none.
        """
        return self._epoch.ring

    def state(self) -> RingState | None:
        """Return the running ring's sizes and limits for the engine, or None while no ring is complete."""
        return self._state_of(self.ring) if self.ring else None

    def _state_of(self, configuration: Configuration) -> RingState:
        """Return the sizes and limits of a ring with this configuration; no ring needs to run with it. The
        positions are those of the member with the fewest.

        configuration: the configuration of any one member; those of all members hold the same sizes.
        """
        stages = {stage.name for stage in configuration.stages}
        return RingState(
            epoch=configuration.epoch,
            pages=configuration.pages,
            page_rows=configuration.page_rows,
            slots=configuration.reserved_slots,
            rows=configuration.rows,
            max_positions=min(one.max_positions for one in self.registrations),
            has_drafter=configuration.drafted,
            drafters=self._drafters,
            curve=configuration.curve,
            on_gpus=all(one.gpus for one in self.registrations if one.name in stages),
            kept=self._handover.migrated_rows(configuration.epoch),
            replays=self._handover.replays(configuration.epoch),
        )

    @property
    def registrations(self) -> list[Registration]:
        """The registrations of all members, in the order in which they joined; empty without members."""
        return self._table.registrations

    @property
    def formed(self) -> bool:
        """True if an epoch has started and not ended; its members need not be ready."""
        return self._epoch.formed

    @property
    def lacks_workers(self) -> bool:
        """True if the fleet has no epoch, or fewer workers (running or idle) than the ring should have."""
        return not self.formed or len(self._epoch.stages) + len(self.idle_workers) < self._config.workers

    @property
    def idle_workers(self) -> list[Registration]:
        """Registrations of the workers that run no layers in the present epoch; empty if every worker runs
        some.
        """
        return [one for one in self.registrations if one.kind == "worker" and one.name not in self._epoch]

    def has_run(self, name: str) -> bool:
        """Return True if this member is or was a stage of the newest epoch, which may have ended; False for
        an unknown name.

        name: the member's name.
        """
        return any(stage.name == name for stage in self._epoch.stages)

    def accepts(self, registration: Registration) -> bool:
        """Return True if `join` would admit this member now, so that a router can choose among several
        fleets.

        Nothing is logged or changed if the result is False.

        registration: what the member says of itself: kind, name, address, model fingerprint, layers.
        """
        return may_join(registration, self.registrations, self._config)

    @property
    def lacks_members(self) -> bool:
        """True if there is no epoch, and the members cannot form one of full size."""
        return not self.formed and not self._could_form()

    def completed_by(self, extra_workers: Sequence[Registration]) -> bool:
        """Return True if the fleet cannot form a ring by itself, but could with these additional workers;
        False if it needs none. Without an epoch, a fleet whose members failed in the last attempt also counts
        as unable.

        extra_workers: registrations of idle workers of other fleets, which could be moved to this one.
        """
        return (self.lacks_members or bool(self._epoch.failed and not self.formed)) and self._could_form(
            extra_workers
        )

    def waiting_for(self) -> str:
        """Return in words what keeps the ring from running; empty if the ring is complete. While an epoch
        starts, the last complaint is returned, or else the members that are not ready. Without an epoch it is
        what is missing, or else the last complaint or "the next attempt".
        """
        if self._epoch.ring:
            return ""
        if self._epoch.formed:
            return self.complaint or f"{self._epoch.waiting_text} to get ready"
        drawn = self._stages_or_missing()
        return drawn if isinstance(drawn, str) else self.complaint or "the next attempt"

    @property
    def epoch(self) -> int:
        """The newest epoch's number, running or not; 0 before the first epoch."""
        return self._epoch.number

    @property
    def plan(self) -> str:
        """The present epoch's layer ranges and expected throughput in words; empty without an epoch."""
        return self._in_words(self._epoch.stages) if self.formed else ""

    def members(self) -> tuple[MemberInfo, ...]:
        """Return all members, each with the layers that it runs now or was started with, for status pages;
        empty without members.
        """
        spare = [one.name for one in self.registrations if one.name not in self._epoch] if self.formed else []
        return member_infos(self.registrations, self._epoch.running, spare)

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Admit a member, and start a new epoch if that is possible now; see `add`.

        registration: what the member says of itself: kind, name, address, model fingerprint, layers.
        downlink: the master's link to this member, on which it receives its configurations.

        Raises Refused if its model, protocol or layers do not match; the error names both values.
        """
        self.add(registration, downlink)

    def add(self, registration: Registration, downlink: Link) -> None:
        """Admit a member, and start a new epoch if that is possible now. If another process has joined under
        the same name, and its link is not known to be lost yet, that process is removed first. A worker that
        joins while an epoch runs stands by. The drafters that clients may name become those of a new drafter.
        A member that could use several GPUs gets one.

        registration: what the member says of itself: kind, name, address, model fingerprint, layers.
        downlink: the master's link to this member, on which it receives its configurations.

        Raises Refused if the member does not belong to this ring; see `check_joining`.
        """
        check_joining(registration, self.registrations, self._config)
        self._numbers.pass_over(registration.epoch)
        if older := self._table.get(registration.name):
            self._remove(registration.name, "another process took its place")
            self._table.disconnect(older)
        registration = with_one_gpu(registration, self.registrations)
        self._table[registration.name] = Member(registration, downlink)
        self._drafters = registration.drafters or self._drafters
        log.info("member joined", kind=registration.kind, name=registration.name, at=registration.address)
        # If one lost member comes back, others may follow, so the wait for them starts anew.
        self._start_grace(self._config.take_over_after)
        if self.formed and registration.kind == "worker":
            self._table.send(registration.name, StandBy(self.epoch))
        self.reform()

    def release(self, name: str) -> Member:
        """Remove a worker that runs no layers here, and return it, so that another fleet can use it. A change
        of the ring that had planned with this worker is given up. The epoch continues, and the link stays
        open.

        name: the worker's name.

        Raises KeyError if no member has this name.
        """
        self._epoch.forget(name)
        if any(stage.name == name for stage in self._planned_stages):
            self._drop_planned_stages(f"{name} is needed elsewhere")
        return self._table.pop(name)

    def knows(self, name: str, downlink: Link | None = None) -> bool:
        """Return True if a member of this name has joined, and is still the process that the caller means;
        False for an unknown name.

        name: the member's name.
        downlink: the link by which the caller knows the member. The result is False if a newer process has
            joined under the same name, so that its link is another one. None accepts any process of this
            name.
        """
        member = self._table.get(name)
        return member is not None and (downlink is None or downlink is member.downlink)

    def on_message(self, name: str, message: object, downlink: Link | None = None) -> None:
        """Handle one message of a member. Messages of unknown members, and of other epochs, are ignored. A
        Progress with layers reports layers that were loaded ahead, or for which there is no memory; one with
        `migrated` confirms KV; any other one tells how far the member is in getting ready.

        name: the sender's name.
        message: a decoded message: Result, Ready, Progress, Broken or MemberLeaving. Messages of any other
            type are ignored.
        downlink: the master's link to the sender; the message is ignored if a newer process has the sender's
            name. None accepts it in any case.
        """
        if not self.knows(name, downlink):
            return
        match message:
            case Result() if message.epoch == self.epoch and self.formed:
                self._receive_result(name, message)
            case Ready(epoch) if epoch == self.epoch:
                self._mark_ready(name)
            case Progress(epoch, done, total, layers=Range() as layers) if epoch == self.epoch:
                (self._without_room if done < total else self._loaded_ahead)[name] = layers
                self.reform()
            case Progress(epoch, migrated=int(number), over=over) if epoch == self.epoch and number:
                self._handover.record_confirmation(name, number, over)
                self.reform()
            case Progress(epoch) if epoch == self.epoch:
                self._on_progress(name, message)
            case Broken(epoch, reason) if epoch == self.epoch:
                self._on_broken(name, reason)
            case MemberLeaving(reason):
                self.on_disconnect(
                    name, reason, downlink, min(LEAVE_TOGETHER_SECONDS, self._config.take_over_after)
                )
            case _:
                pass

    def on_disconnect(
        self, name: str, reason: str, downlink: Link | None = None, grace_seconds: float | None = None
    ) -> None:
        """Handle the loss of a member. A lost stage ends the epoch; without a lost drafter the epoch
        continues. Nothing happens if the member is unknown. A new epoch is formed if that is possible now.

        name: the lost member's name.
        reason: why it is lost, in words, for the log and for the requests that this interrupts.
        downlink: the master's link to the lost member; nothing happens if a newer process has its name. None
            accepts any process of this name.
        grace_seconds: seconds to wait for the lost member before the remaining workers take over its layers,
            if no spare worker can. None for the configured time (`--take-over-after`).
        """
        if self.knows(name, downlink):
            self._remove(name, reason)
            self._start_grace(self._config.take_over_after if grace_seconds is None else grace_seconds)
            self.reform()

    def reform(self) -> None:
        """Start a new epoch if that is possible and useful now. Called after every change of the members.
        Nothing changes if that is not possible or not useful.

        Without an epoch, one is formed as soon as the members suffice. If better stages are possible and no
        request would be disturbed, the epoch is replaced at once. If requests are running, the change is
        prepared alongside (`_prepare_change`). After a loss, that begins once the ring has generated a token:
        a worker that comes back while others take over its layers waits until then. A drafter may join a
        running epoch without interrupting it.
        """
        epoch = self._epoch
        members = self._table.registrations
        self._table.send_all(epoch.rejoin_drafter(members, self._config))
        if not epoch.formed:
            self._form()
            return
        better = better_stages(members, self._config, epoch.stages, epoch.settled_names)
        holds = self._count_fitting(better, members) if better else None
        waits = bool(self.user.at_work) and self._must_run
        if better and holds is not None and not (waits or (self.user.at_work and epoch.ring)):
            self._begin_anew(better, "the drafter joined" if better == epoch.stages else "a worker joined")
        elif epoch.ring and not waits:
            self._prepare_change(members, better if holds and holds > self.user.at_work else None)

    def _members_for(self, stages: Stages) -> Sequence[Registration]:
        """Return the members for an epoch with these stages: all that have joined, but for some drafters. If
        a drafter's memory is too small, the drafters with the fewest positions are left out first, and then
        more, until the ring can form or no drafter is left.

        Drafters that failed are left out if another drafter can draft. If a ring has run before, drafters
        whose memory is too small for a ring of these stages are left out too, so that the ring can form
        without them.

        stages: the layer ranges of the planned epoch, with the worker of each.
        """
        members = without_failed_drafters(self.registrations, self._epoch.failed)
        if self._epoch.stages:
            while count_drafters(members) and self._count_fitting(stages, members) is None:
                members = without_smallest_drafter(members)
        return members

    def _count_fitting(self, stages: Stages, members: Sequence[Registration]) -> int | None:
        """Return how many of the engine's requests fit a ring of these stages; None if it cannot form. A ring
        cannot form if there is too little KV memory for it.

        stages: the layer ranges of the ring in question, which need not run.
        members: the members that would take part in it.
        """
        try:
            configurations = configurations_of(self.epoch, members, stages, self._config)
        except Refused:
            return None
        return self.user.fitting(self._state_of(next(iter(configurations.values()))))

    def _prepare_change(self, members: Sequence[Registration], larger_stages: Stages | None) -> None:
        """Prepare a change of the stages while requests are running, and switch once everything is prepared.
        Each call carries the preparation one step further; the fleet calls it again when a member reports
        progress. Workers are told once which layers to load.

        The new stages are those of a change under way, else `larger_stages`, else any that make the running
        requests faster; all running requests must fit, unless the change is a requested rebalancing. Members
        first load the layers that they lack, next to those that they run; then KV is migrated; then the new
        epoch begins. If no such stages exist, nothing happens.

        members: the registrations of all members.
        larger_stages: stages of a ring that holds requests which wait for a larger ring, or None. For such a
            ring, or for a requested rebalancing, members that report no memory for loading ahead load after
            the switch instead.
        """
        epoch = self._epoch
        new_stages = (
            self._planned_stages
            or larger_stages
            or faster_stages(members, self._config, epoch.stages, epoch.busy_names, self.user.at_work)
        )
        holds = self._count_fitting(new_stages, members) if new_stages else None
        if new_stages is None or holds is None or (holds < self.user.at_work and not self._rebalancing):
            return
        missing = to_load(new_stages, epoch.stages, self._loaded_ahead)
        # Members without memory for loading ahead load after the switch, if the change is needed anyway.
        load_after_switch = (self._rebalancing or larger_stages) and all(
            self._without_room.get(name) == layers for name, layers in missing.items()
        )
        if not missing or load_after_switch:
            # From here on this change is carried through, even if still better stages become possible.
            self._planned_stages = new_stages
            if self._handover.continue_migration(epoch, new_stages, self.user.final_rows):
                self._begin_anew(
                    new_stages, "the ring is rebalanced" if self._rebalancing else "a worker joined"
                )
                self._handover.finish_migration(epoch.number)
            return
        for name, layers in missing.items():
            if self._loading_ahead.get(name) != layers:
                self._loading_ahead[name] = layers
                self._table.send(name, StandBy(epoch.number, layers))

    async def rebalance(self) -> Rebalanced:
        """Split the layers anew over the workers, and return when the next epoch has started. If the ring is
        idle the next epoch starts at once; its members need not be ready when this returns. A call while
        another one waits takes part in the same change.

        If requests are running, members first load their new layers, as far as they have memory for them next
        to the running ones, and KV is migrated. If the split is the same as before, the epoch continues. The
        returned value says whether the split changed, the newest epoch's number, and the layer ranges in
        words.

        Raises Unavailable if there is no ring or if the ring breaks meanwhile, and Refused if KV memory is
        too small.
        """
        if not self._epoch.formed:
            raise Unavailable(f"the ring is not complete: waiting for {self.waiting_for()}")
        stages = rebalanced_stages(self._table.registrations, self._config)
        changed = stages != self._epoch.stages
        # Raises Refused if KV memory is too small for these stages.
        configurations_of(self.epoch, self.registrations, stages, self._config)
        if changed and self.ready and self.user.at_work:
            dropped = self._rebalancing = self._rebalancing or asyncio.get_running_loop().create_future()
            self._planned_stages = stages
            self.reform()
            if reason := await asyncio.shield(dropped):
                raise Unavailable(f"the ring is not rebalanced: {reason}")
        elif changed:
            self._begin_anew(stages, "the ring is rebalanced")
        return Rebalanced(changed, self._epoch.number, self._in_words(stages))

    async def reform_regularly(self, interval: float) -> None:
        """Call `reform` regularly, so that late members join an epoch once its ring is idle; and keep copies
        of KV (`--copy-kv`). Runs until cancelled. Nothing is done while no epoch is formed.

        interval: seconds between two calls.
        """
        while True:
            await asyncio.sleep(interval)
            if self.formed:
                self.reform()
            self.copy_kv()

    def copy_kv(self) -> None:
        """Bring the copies that stages keep of each other's KV up to date. Nothing happens unless `--copy-kv`
        asks for copies, and while no ring is complete or a change of its stages is under way.
        """
        workers = [one for one in self.registrations if one.kind == "worker"]
        chosen = self._config.copy_kv
        if chosen == "off" or (chosen == "auto" and not share_one_cpu(workers)):
            return
        if self.ring and not self._planned_stages:
            self._handover.continue_copies(self._epoch, self.user.final_rows)

    async def order(self, order: Order) -> None:
        """Send an order to stage 0 of the running ring.

        order: an instruction for the sequencer, such as opening or closing a sequence.

        Raises Unavailable if no ring is complete, KeyError if stage 0 has just left, and what `Link.send`
        raises.
        """
        if (ring := self.ring) is None:
            raise Unavailable(f"the ring is not complete: waiting for {self.waiting_for()}")
        await self._table[ring.stages[0].name].downlink.send(order)

    def _receive_result(self, name: str, result: Result) -> None:
        """Pass a result to the engine, if it comes from a stage that may report it; else log a warning. A
        result of another member is dropped.

        The last stage reports all results; results that belong to no step have the number 0. Stage 0 may only
        report that sequences could not begin: number 0, and no tokens.

        name: the member that sent the result.
        result: the outcomes of one step of the current epoch.
        """
        first, last = self._epoch.stages[0].name, self._epoch.stages[-1].name
        rejects = result.number == 0 and not any(one.tokens for one in result.outcomes)
        if name == last or (name == first and rejects):
            self._must_run = self._must_run and rejects
            self.user.handle(result)
        else:
            log.warning("result ignored", name=name, epoch=result.epoch)

    def _remove(self, name: str, reason: str) -> None:
        """Forget a member and what it has loaded; end the epoch if the member was one of its stages. The link
        is not closed. The last stage is told of a lost drafter.

        A planned change to stages that include this member is given up. Without a lost drafter the epoch
        continues.

        name: the member's name.
        reason: why the member is removed, in words.

        Raises KeyError if no member has this name.
        """
        log.warning("member lost", name=name, reason=reason)
        self._table.pop(name)
        self._table.send_all(self._epoch.remove_drafter(name) or {})
        self._epoch.failed.discard(name)
        self._epoch.forget(name)
        for layers in (self._loading_ahead, self._loaded_ahead, self._without_room):
            layers.pop(name, None)
        if any(stage.name == name for stage in self._planned_stages):
            self._drop_planned_stages(f"{name} is gone: {reason}")
        if name in self._epoch:
            self._break(f"{name} is gone: {reason}", name)

    def _could_form(self, extra_members: Sequence[Registration] = ()) -> bool:
        """Return True if the members, together with these additional ones, could form a ring of full size.

        extra_members: registrations of members that have not joined this fleet; empty to ask for the present
            members alone.
        """
        return could_form(
            [*self.registrations, *extra_members], self._config, self._epoch.stages, self._epoch.failed
        )

    # --- epochs ---

    def _in_words(self, stages: Stages) -> str:
        """Return the layer ranges of these stages and their expected throughput in words, as
        `Throughput.__str__` writes them.

        stages: stages on workers that have joined; empty for no layer ranges.

        Raises KeyError if a stage is on a worker that has not joined.
        """
        return str(expected_throughput(stages, {one.name: one for one in self._table.registrations}))

    def _start_grace(self, seconds: float) -> None:
        """Wait so many seconds for lost members of a broken ring before others take over their layers.
        Without a broken ring (before the first epoch, or while one runs), nothing happens.

        seconds: how long to wait; a wait that is under way starts anew.
        """
        if self._epoch.stages and not self._epoch.formed:
            self._grace.begin(seconds)

    def _on_progress(self, name: str, progress: Progress) -> None:
        """Note how far a member is in getting ready; any change restarts the barrier's timeout.

        name: the member's name.
        progress: how many of its layers the member has loaded.
        """
        if self._epoch.record_progress(name, progress) and self._barrier:
            self._barrier.reset()

    def _mark_ready(self, name: str) -> None:
        """Note that a member of a starting epoch, or a drafter that joins a running ring, is ready. A member
        outside of the epoch only restarts the barrier's timeout. If all members are ready, the ring is
        announced.

        name: the member that has sent Ready.
        """
        if self._barrier:
            self._barrier.reset()
        messages = self._epoch.mark_ready(name)
        if messages:
            self._table.send_all(messages)
            log.info("drafter joined the running ring", epoch=self._epoch.number, name=name)
            # A caller may be waiting for a ring that drafts.
            self._announce()
        elif name in self._epoch:
            self._announce_if_ready()

    def _on_broken(self, name: str, reason: str) -> None:
        """Handle a member's report that it cannot continue in this epoch. A report of a member that is not
        part of the epoch is ignored. A stage that was not ready yet counts as failed, so that the next
        attempt avoids it if it can. `complaint` then says what went wrong.

        A drafter is removed, and the epoch continues without it; it is not asked again before the next epoch.
        A stage ends the epoch, and the next attempt follows after a delay.

        name: the member that sent the report.
        reason: what went wrong there, in words.
        """
        epoch = self._epoch
        if (messages := epoch.remove_drafter(name)) is not None:
            self._table.send_all(messages)
            epoch.failed.add(name)
            log.warning("drafter left the ring", name=name, reason=reason)
        elif name in epoch:
            if name in epoch.not_ready:
                epoch.failed.add(name)
            self.complaint = f"{name}: {reason}"
            self._break(self.complaint, name)
            self._retry_later()

    def _stages_or_missing(self) -> Stages | str:
        """Return the stages of the next epoch; or, as a string, what is still missing before one can begin.
        If the workers have no room for the model, the string says so, and `complaint` is set to it. Before
        the first epoch this is "the drafter" while the ring still waits for one.
        """
        before = self._epoch.stages
        failed = self._epoch.failed
        try:
            stages = next_stages(self._table.registrations, self._config, before, self._grace.active, failed)
        except Refused as error:
            self.complaint = stages = str(error)
        first = not before and not isinstance(stages, str)
        return "the drafter" if first and self._drafter_grace.waits(self.registrations) else stages

    def _form(self) -> None:
        """Begin an epoch if the members suffice; else log what is missing, once for each different reason.
        The master is told of a new reason. After a loss, the epoch begins once the stages that are left have
        kept what the next ring can reuse, see `KvHandover.continue_repair`.
        """
        stages = self._stages_or_missing()
        if not isinstance(stages, str):
            if self._handover.continue_repair(stages):
                self._begin(stages)
                if self._epoch.formed:
                    self._handover.finish_migration(self._epoch.number)
            return
        if stages != self._missing:
            log.info("waiting for the ring", missing=stages)
            self._missing = stages
            self._changed()

    def _begin(self, stages: Stages) -> None:
        """Begin the next epoch with these stages: send every member its configuration, and start the barrier.
        Ranges that were loaded ahead, and the wait for lost members, are forgotten.

        If KV memory is too small, no epoch begins, and `complaint` says why.

        stages: the layer ranges of the new epoch, with the worker of each. The previous epoch must have
            ended.
        """
        self._missing = ""
        members = self._members_for(stages)
        try:
            messages = self._epoch.begin(next(self._numbers), members, stages, self._config)
        except Refused as error:
            self.complaint = str(error)
            log.error("ring not formed", reason=str(error))
            # Callers that wait for a ring read the complaint.
            self._changed()
            return
        self._grace.end()
        self._loading_ahead = {}
        self._loaded_ahead = {}
        self._without_room = {}
        log.info("plan", epoch=self._epoch.number, stages=self._in_words(stages))
        self._barrier = SilenceTimer(BARRIER_SECONDS, self._give_up)
        self._table.send_all(messages)

    def _give_up(self) -> None:
        """End an epoch whose members have made no progress for BARRIER_SECONDS, and try again after a delay.
        The epoch's end is reported to the engine as a loss, with the progress of the members.

        Members that have not finished their own part are removed. If all have finished and wait for something
        else, no member is removed.
        """
        unfinished = self._epoch.unfinished
        progress_text = self._epoch.progress_text
        reason = f"no progress for {BARRIER_SECONDS:g} s in getting ready: {progress_text}"
        log.error(
            "ring not ready in time",
            epoch=self._epoch.number,
            progress_text=progress_text,
            lost=unfinished,
        )
        self.complaint = reason
        self._break(reason, None)
        for name in unfinished:
            self._table.drop(name, reason)
        self._retry_later()

    def _begin_anew(self, stages: Stages, reason: str) -> None:
        """Replace the present epoch by one with these stages; requests continue from their token logs. If
        these are the planned stages, a waiting `rebalance` returns.

        stages: the layer ranges of the new epoch, with the worker of each.
        reason: why the epoch is replaced, in words, for the log of the members.
        """
        if stages == self._planned_stages:
            # The planned change happens now, so `rebalance` returns without an error.
            self._drop_planned_stages("")
        self._break(reason, None, is_planned=True)
        self._begin(stages)

    def _announce_if_ready(self) -> None:
        """Announce the ring once all members are ready, and reset the record of failures; do nothing while a
        member is not ready. The timeout of the barrier is stopped, and the delay between attempts starts
        anew.
        """
        if ring := self._epoch.ring:
            self._stop_watching()
            self.complaint = None
            self._retry_seconds = FIRST_RETRY_SECONDS
            self._epoch.failed.clear()
            ranges = " ".join(f"{stage.name}={stage.layers}" for stage in ring.stages)
            drafter = ",".join(place.address for place in ring.drafters) or None
            log.info("ring complete", epoch=ring.epoch, stages=ranges, drafter=drafter, pages=ring.pages)
            self._announce()

    def _announce(self) -> None:
        """Tell the engine and the master that the ring is complete, or has a drafter again."""
        self.user.handle(RingReady())
        self._changed()

    def _break(self, reason: str, culprit: str | None, is_planned: bool = False) -> None:
        """End the epoch: tell all its members but the culprit to disband, and tell the engine the reason. A
        planned change is dropped, the barrier's timeout is stopped, and the master is told of the change.

        reason: why the epoch ends, in words.
        culprit: the name of the member that failed or is lost, which is not notified; None if no single
            member is to blame.
        is_planned: True if the master ends the epoch for a better one; then no request is suspected of having
            broken the ring.
        """
        self._drop_planned_stages(reason)
        self._stop_watching()
        if not is_planned:
            self._must_run = True
            self._handover.remember_broken(self._epoch, self.user.final_rows)
        remaining = [name for name in self._epoch.end() if name != culprit]
        self._table.send_all(dict.fromkeys(remaining, Disband(self._epoch.number, reason)))
        self.user.handle(RingLost(reason, is_planned))
        self._changed()

    def _drop_planned_stages(self, reason: str) -> None:
        """Forget the stages of the planned change, if there is one, and end a `rebalance` that waits for
        them. A migration that has begun is not used.

        reason: why the change is given up, in words: `rebalance` raises it. An empty reason means that the
            change happens now, so `rebalance` returns without an error.
        """
        dropped = self._rebalancing
        self._planned_stages = ()
        self._rebalancing = None
        if dropped:
            dropped.set_result(reason)

    def _stop_watching(self) -> None:
        """Stop the barrier's timeout, if one runs."""
        if self._barrier:
            self._barrier.cancel()
        self._barrier = None

    def _retry_later(self) -> None:
        """Call `reform` after a delay that doubles with every failure, up to MAX_RETRY_SECONDS."""
        asyncio.get_running_loop().call_later(self._retry_seconds, self.reform)
        self._retry_seconds = min(self._retry_seconds * 2, MAX_RETRY_SECONDS)
