"""The life cycle of a worker or drafter: join the master, take part in epochs, leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import structlog

from specsot import members
from specsot.errors import Hung, Occupied, SpecsotError, Unavailable
from specsot.service.compute import explain_failure
from specsot.tasks import FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, wait_until
from specsot.transport.links import Arrival, Inbox, Link, Lost

log = structlog.get_logger()

Connect = Callable[[members.Registration], Awaitable[Link]]

# Seconds. A master that shuts down needs at least this time to end, to start again and to read its model, so
# that members do not try to join earlier. Untuned.
MASTER_RESTART_SECONDS = 3.0
# Seconds between reports of progress, far below the master's BARRIER_SECONDS.
PROGRESS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _LeaveRequest:
    """The message that wakes the main loop when the member must leave."""


@runtime_checkable
class InboxWatcher(Protocol):
    """A member that checks during its work whether other messages are waiting."""

    def watch(self, arrived: Callable[[], bool]) -> None:
        """Remember a function that returns whether messages are waiting.

        arrived: returns whether a message waits. It may be called from any thread.
        """
        ...


class RingMember(Protocol):
    """The interface of a worker or drafter that `run_membership` calls."""

    async def registration(self) -> members.Registration:
        """Return the registration. May load weights to measure them.

        Called once each time the member begins to join, also after it has lost the master.
        """
        ...

    async def configure(self, configuration: members.Configuration, uplink: Link) -> None:
        """Prepare for an epoch: load weights, allocate pages, open links, and tell the master once the member
        is ready.

        configuration: the epoch that the master forms.
        uplink: the link to the master.

        Raises SpecsotError if that fails. Any other error counts as a failure too.
        """
        ...

    @property
    def epoch(self) -> int:
        """Number of the epoch for which the member is configured; 0 if there is none."""
        ...

    async def prepare(self, order: members.StandBy | members.HandOver, uplink: Link) -> None:
        """Start the work that a StandBy or HandOver order asks for.

        For StandBy, load the order's layers in advance and report them, or whatever fits if the order names
        no layers. For HandOver, start to send and to receive KV rows.

        order: the master's order.
        uplink: the link to the master, for reports of progress.
        """
        ...

    async def handle(self, arrival: Arrival) -> None:
        """Handle one message of another member, or one order of the master.

        arrival: the message with its sender.

        Raises SpecsotError if the epoch cannot continue.
        """
        ...

    async def run_due(self) -> float | None:
        """Do what is due after all waiting messages were handled.

        Returns after how many seconds to call this again if no message arrives. None means not at all.
        """
        ...

    async def disband(self) -> None:
        """Drop the state of the epoch: pages, links, frames in flight. May be called at any time."""
        ...


async def run_membership(member: RingMember, inbox: Inbox, connect: Connect, leaving: asyncio.Event) -> None:
    """Join the master and serve, again after each loss of the master, until `leaving` is set.

    member: the worker or drafter.
    inbox: the receiving end of all links to the member.
    connect: registers at the master and returns the link to it.
    leaving: set once the member must leave.

    Raises Refused if the master rejects the member, and Hung if the member's compute thread hangs.

    On return and on an error, the member's state of the epoch has been dropped. A member that can check for
    messages during its work gets `inbox.arrived` for that.
    """
    if isinstance(member, InboxWatcher):
        member.watch(inbox.arrived)
    leave_request = asyncio.ensure_future(_wake_on_leave(leaving, inbox))
    newest = 0
    try:
        while not leaving.is_set():
            uplink = await _join(member, connect, leave_request, newest)
            if uplink is not None:
                newest = max(newest, await _serve(member, inbox, uplink, leaving))
    finally:
        leave_request.cancel()
        await member.disband()


async def _join(
    member: RingMember, connect: Connect, leave_request: asyncio.Future[Any], newest_epoch: int
) -> Link | None:
    """Try to join until the master accepts the member. Return the link to the master, or None if the member
    must leave before that.

    member: the worker or drafter.
    connect: registers at the master and returns the link to it.
    leave_request: done once the member must leave.
    newest_epoch: number of the newest epoch that the member has received.

    Raises Refused if the master rejects the member.

    If the master is unavailable or its place is occupied, the next attempt follows after FIRST_RETRY_SECONDS,
    and after twice the last wait each time, at most MAX_RETRY_SECONDS. A reason is logged only if it differs
    from the last one.
    """
    wait = FIRST_RETRY_SECONDS
    logged_reason = ""
    registration = replace(await member.registration(), epoch=newest_epoch)
    while not leave_request.done():
        try:
            uplink = await connect(registration)
        except (Unavailable, Occupied) as error:
            # A place may be occupied for days, so the same reason is logged only once.
            if (reason := str(error)) != logged_reason:
                if isinstance(error, Occupied):
                    log.warning("not let in", reason=reason, again_in=wait)
                else:
                    log.info("waiting for the master", reason=reason, again_in=wait)
                logged_reason = reason
            await asyncio.wait([leave_request], timeout=wait)
            wait = min(wait * 2, MAX_RETRY_SECONDS)
        else:
            log.info("joined", name=registration.name, waiting_for="the ring to be complete")
            return uplink
    return None


async def _wake_on_leave(leaving: asyncio.Event, inbox: Inbox) -> None:
    """Put a message into the inbox once the member must leave.

    This wakes the main loop, and costs less than waiting for the inbox and for `leaving` at the same time.

    leaving: set once the member must leave.
    inbox: the member's inbox.
    """
    await leaving.wait()
    inbox.put("", _LeaveRequest())


async def _serve(member: RingMember, inbox: Inbox, uplink: Link, leaving: asyncio.Event) -> int:
    """Handle messages until the master is lost or `leaving` is set, and return the number of the newest
    epoch.

    After all waiting messages were handled, the member does what is due (`RingMember.run_due`). Returns the
    number of the newest epoch that was received; 0 if there was none.

    member: the worker or drafter.
    inbox: the member's inbox.
    uplink: the link to the master.
    leaving: set once the member must leave.

    If the master is lost, the state of the epoch is dropped before the return; after a loss that the master
    announced, the return is delayed by at most MASTER_RESTART_SECONDS, so that the master can restart. If
    `leaving` is set, the master is told so and the link is closed, but the state is not dropped.

    Raises Hung if the member's compute thread hangs.
    """
    wait: float | None = None
    newest_epoch = 0
    master_leaves = False
    while not leaving.is_set():
        arrival = await _next(inbox, wait)
        while arrival is not None:
            if arrival.sender == "master" and isinstance(arrival.message, Lost):
                if not master_leaves:
                    log.warning("lost the master", reason=arrival.message.reason)
                await member.disband()
                if master_leaves:
                    await wait_until(leaving, MASTER_RESTART_SECONDS)
                return newest_epoch
            if arrival.sender == "master" and isinstance(arrival.message, members.MemberLeaving):
                log.info("the master leaves", reason=arrival.message.reason)
                master_leaves = True
            if isinstance(arrival.message, members.Configuration):
                newest_epoch = max(newest_epoch, arrival.message.epoch)
            await _dispatch(member, arrival, uplink)
            arrival = inbox.pop()
        wait = await _run_due(member, uplink)
    await _send_to_master(uplink, members.MemberLeaving())
    await uplink.close()
    return newest_epoch


async def _next(inbox: Inbox, timeout_seconds: float | None) -> Arrival | None:
    """Return the next message, or None if no message arrives in time.

    inbox: the member's inbox.
    timeout_seconds: seconds to wait. None: no limit.

    With 0 or fewer seconds, the event loop runs once, and a message that is waiting then is returned.
    """
    if (arrival := inbox.pop()) is not None:
        return arrival
    if timeout_seconds is not None and timeout_seconds <= 0:
        # Links run on this event loop, so it must get a turn before the next message is handled.
        await asyncio.sleep(0)
        return inbox.pop()
    # Every step comes here, and a timeout would take as long as everything else.
    if timeout_seconds is None:
        return await inbox.get()
    try:
        async with asyncio.timeout(timeout_seconds):
            return await inbox.get()
    except TimeoutError:
        return None


async def _dispatch(member: RingMember, arrival: Arrival, uplink: Link) -> None:
    """Handle one message. A Configuration replaces the epoch, a Disband drops its state, and StandBy and
    HandOver make the member start preparing. The announcement that the master or this member leaves is
    ignored. Every other message is handled by the member.

    member: the worker or drafter.
    arrival: the message with its sender.
    uplink: the link to the master.

    Raises Hung if the member's compute thread hangs. Other errors of the member end the epoch and are not
    raised, except those of StandBy, HandOver and Disband, which are raised unchanged.
    """
    match arrival.message:
        case members.Configuration() as configuration:
            await _configure(member, configuration, uplink)
        case members.Disband(epoch, reason):
            log.info("the ring is formed again", epoch=epoch, reason=reason)
            await member.disband()
        case members.StandBy(epoch, layers) as order:
            if layers is None:
                log.info("stands by", epoch=epoch, until="a worker is lost, or specsot rebalance")
            await member.prepare(order, uplink)
        case members.HandOver() as order:
            await member.prepare(order, uplink)
        case _LeaveRequest() | members.MemberLeaving():
            pass
        case _:
            await _handle(member, arrival, uplink)


async def _configure(member: RingMember, configuration: members.Configuration, uplink: Link) -> None:
    """Drop the old epoch and prepare for a new one. If that fails, log it and report it to the master.

    member: the worker or drafter.
    configuration: the epoch that the master forms.
    uplink: the link to the master.

    No error is raised, whatever its type; cancellation is.
    """
    try:
        await member.disband()
        await member.configure(configuration, uplink)
    except Exception as error:
        reason = str(_explain(error))
        log.error("cannot take part", epoch=configuration.epoch, reason=reason)
        await _send_to_master(uplink, members.Broken(configuration.epoch, reason))


@asynccontextmanager
async def report_progress(
    uplink: Link, epoch: int, done: Callable[[], int], total: int, fetched: Callable[[], int] = lambda: 0
) -> AsyncGenerator[None]:
    """Return a context in which progress is reported to the master every PROGRESS_SECONDS, and completion at
    its end. It yields None.

    If an error is raised within, no completion is reported.

    uplink: the link to the master.
    epoch: number of the epoch that is being prepared.
    done: returns how many pieces of work are finished. At most total - 1 are reported before the end.
    total: number of all pieces of work.
    fetched: returns how many bytes of the model's files are present.

    Progress that has not changed since the last report is not sent again. The final report says `total` of
    `total`, without the bytes.
    """

    async def report() -> None:
        """Send the progress whenever it has changed, without end."""
        reported = None
        while True:
            if (progress := (min(done(), total - 1), total, fetched())) != reported:
                log.debug("getting ready", epoch=epoch, done=progress[0], total=total)
                await _send_to_master(uplink, members.Progress(epoch, *progress))
            reported = progress
            await asyncio.sleep(PROGRESS_SECONDS)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
    await _send_to_master(uplink, members.Progress(epoch, total, total))


async def _handle(member: RingMember, arrival: Arrival, uplink: Link) -> None:
    """Let the member handle a message. An error ends the epoch.

    member: the worker or drafter.
    arrival: the message with its sender.
    uplink: the link to the master.

    Raises Hung if the member's compute thread hangs.

    Other errors are logged and reported to the master, and are not raised.
    """
    try:
        await member.handle(arrival)
    except Exception as error:
        await _end_epoch(member, uplink, _explain(error))


async def _run_due(member: RingMember, uplink: Link) -> float | None:
    """Let the member do what is due, and return after how many seconds to call this again; None if it need
    not be called, and after an error, which ends the epoch.

    member: the worker or drafter.
    uplink: the link to the master.

    Raises Hung if the member's compute thread hangs.

    Seconds are counted from now. An error of the member is logged and reported to the master, and the state
    of the epoch is dropped.
    """
    try:
        return await member.run_due()
    except Exception as error:
        await _end_epoch(member, uplink, _explain(error))
        return None


def _explain(error: Exception) -> SpecsotError:
    """Return an error as SpecsotError, so that an unexpected error ends the epoch and not the process.

    error: what the member raised.
    """
    return error if isinstance(error, SpecsotError) else explain_failure("this member", error)


async def _end_epoch(member: RingMember, uplink: Link, error: SpecsotError) -> None:
    """End the epoch because of an error: drop its state, and report it to the master, which forms the next
    one.

    An error outside of an epoch is only logged. If the error is Hung, the link to the master is closed and
    the error is raised, because a member whose compute thread hangs cannot take part in another epoch.

    member: the worker or drafter.
    uplink: the link to the master.
    error: why the epoch cannot continue.

    The state is dropped in any case. Nothing is reported outside of an epoch.
    """
    epoch = member.epoch
    log.error("epoch failed here", epoch=epoch, reason=str(error))
    await member.disband()
    if epoch:
        await _send_to_master(uplink, members.Broken(epoch, str(error)))
    if isinstance(error, Hung):
        await uplink.close()
        raise error


async def _send_to_master(
    uplink: Link, message: members.Ready | members.Broken | members.MemberLeaving | members.Progress
) -> None:
    """Send a message to the master. If the link is lost, the loss also arrives in the inbox, so it is only
    logged here.

    uplink: the link to the master.
    message: the message.

    Only Unavailable is caught.
    """
    try:
        await uplink.send(message)
    except Unavailable:
        log.info("message to the master dropped", message=type(message).__name__)
