"""The life cycle of a worker or drafter: join the master, take part in epochs, leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import structlog

from specsot import members
from specsot.errors import Hung, Occupied, SpecsotError, Unavailable
from specsot.service.compute import explain_failure
from specsot.transport.links import Arrival, Inbox, Link, Lost

log = structlog.get_logger()

Connect = Callable[[members.Registration], Awaitable[Link]]

# Seconds between attempts to join the master. The interval doubles from the first to the second value.
# Untuned.
FIRST_RETRY_SECONDS = 0.25
MAX_RETRY_SECONDS = 5.0
# Seconds. A master that shuts down needs at least this time to end, to start again and to read its model, so
# that members do not try to join earlier. Untuned.
MASTER_RESTART_SECONDS = 3.0
# Seconds between reports of progress, far below the master's BARRIER_SECONDS.
PROGRESS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Farewell:
    """The message that wakes the main loop when the member must leave."""


@runtime_checkable
class InboxWatcher(Protocol):
    """A member that checks during its work whether other messages are waiting."""

    def watch(self, arrived: Callable[[], bool]) -> None:
        """Remember `arrived`, which returns whether a message waits. It may be called from any thread."""
        ...


class RingMember(Protocol):
    """The interface of a worker or drafter that `run_membership` calls."""

    async def registration(self) -> members.Registration:
        """Return the registration. May load weights to measure them.

        Called once each time the member begins to join, also after it has lost the master.
        """
        ...

    async def configure(self, configuration: members.Configuration, uplink: Link) -> None:
        """Prepare for an epoch: load weights, allocate pages, open links. Raises SpecsotError if that
        fails.
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
        """
        ...

    async def handle(self, arrival: Arrival) -> None:
        """Handle one message of another member, or one order of the master."""
        ...

    async def settle(self) -> float | None:
        """Do what is due after all waiting messages were handled.

        Returns after how many seconds to call this again if no message arrives. None means not at all.
        """
        ...

    async def disband(self) -> None:
        """Drop the state of the epoch: pages, links, frames in flight. May be called at any time."""
        ...


async def run_membership(member: RingMember, inbox: Inbox, connect: Connect, leaving: asyncio.Event) -> None:
    """Join the master and serve, again after each loss of the master, until `leaving` is set.

    Raises Refused if the master rejects the member, and Hung if the member's compute thread hangs.
    """
    if isinstance(member, InboxWatcher):
        member.watch(inbox.arrived)
    farewell = asyncio.ensure_future(_call(leaving, inbox))
    newest = 0
    try:
        while not leaving.is_set():
            uplink = await _join(member, connect, farewell, newest)
            if uplink is not None:
                newest = max(newest, await _serve(member, inbox, uplink, leaving))
    finally:
        farewell.cancel()
        await member.disband()


async def _join(
    member: RingMember, connect: Connect, farewell: asyncio.Future[Any], newest: int
) -> Link | None:
    """Try to join until the master accepts the member. Return the link, or None if the member must leave.

    newest: number of the newest epoch that the member has received.
    """
    wait = FIRST_RETRY_SECONDS
    said = ""
    registration = replace(await member.registration(), epoch=newest)
    while not farewell.done():
        try:
            uplink = await connect(registration)
        except (Unavailable, Occupied) as error:
            # A place may be occupied for days, so the same reason is logged only once.
            if (reason := str(error)) != said:
                if isinstance(error, Occupied):
                    log.warning("not let in", reason=reason, again_in=wait)
                else:
                    log.info("waiting for the master", reason=reason, again_in=wait)
                said = reason
            await asyncio.wait([farewell], timeout=wait)
            wait = min(wait * 2, MAX_RETRY_SECONDS)
        else:
            log.info("joined", name=registration.name, waiting_for="the ring to be complete")
            return uplink
    return None


async def _call(leaving: asyncio.Event, inbox: Inbox) -> None:
    """Put a message into the inbox once the member must leave.

    This wakes the main loop, and costs less than waiting for the inbox and for `leaving` at the same time.
    """
    await leaving.wait()
    inbox.put("", _Farewell())


async def _serve(member: RingMember, inbox: Inbox, uplink: Link, leaving: asyncio.Event) -> int:
    """Handle messages until the master is lost or `leaving` is set.

    After all waiting messages were handled, the member does what is due (`RingMember.settle`). Returns the
    number of the newest epoch that was received.
    """
    wait: float | None = None
    newest = 0
    told = False
    while not leaving.is_set():
        arrival = await _next(inbox, wait)
        while arrival is not None:
            if arrival.sender == "master" and isinstance(arrival.message, Lost):
                if not told:
                    log.warning("lost the master", reason=arrival.message.reason)
                await member.disband()
                if told:
                    await _wait(leaving, MASTER_RESTART_SECONDS)
                return newest
            if arrival.sender == "master" and isinstance(arrival.message, members.MemberLeaving):
                log.info("the master leaves", reason=arrival.message.reason)
                told = True
            if isinstance(arrival.message, members.Configuration):
                newest = max(newest, arrival.message.epoch)
            await _take(member, arrival, uplink)
            arrival = inbox.take()
        wait = await _settle(member, uplink)
    await _say(uplink, members.MemberLeaving())
    await uplink.close()
    return newest


async def _wait(leaving: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await leaving.wait()


async def _next(inbox: Inbox, wait: float | None) -> Arrival | None:
    """Return the next message, or None if no message arrives within `wait` seconds. None: no limit."""
    if (arrival := inbox.take()) is not None:
        return arrival
    if wait is not None and wait <= 0:
        # Links run on this event loop, so it must get a turn before the next message is handled.
        await asyncio.sleep(0)
        return inbox.take()
    # Every step comes here, and a timeout would take as long as everything else.
    if wait is None:
        return await inbox.get()
    try:
        async with asyncio.timeout(wait):
            return await inbox.get()
    except TimeoutError:
        return None


async def _take(member: RingMember, arrival: Arrival, uplink: Link) -> None:
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
        case _Farewell() | members.MemberLeaving():
            pass
        case _:
            await _handle(member, arrival, uplink)


async def _configure(member: RingMember, configuration: members.Configuration, uplink: Link) -> None:
    try:
        await member.disband()
        await member.configure(configuration, uplink)
    except Exception as error:
        reason = str(_explain(error))
        log.error("cannot take part", epoch=configuration.epoch, reason=reason)
        await _say(uplink, members.Broken(configuration.epoch, reason))


@asynccontextmanager
async def report_progress(
    uplink: Link, epoch: int, done: Callable[[], int], total: int, fetched: Callable[[], int] = lambda: 0
) -> AsyncGenerator[None]:
    """Report progress to the master while the context is entered, and completion when it is left.

    done: returns how many pieces of work are finished. At most total - 1 are reported before the end.
    total: number of all pieces of work.
    fetched: returns how many bytes of the model's files are present.
    """

    async def tell() -> None:
        before = None
        while True:
            if (now := (min(done(), total - 1), total, fetched())) != before:
                log.debug("getting ready", epoch=epoch, done=now[0], total=total)
                await _say(uplink, members.Progress(epoch, *now))
            before = now
            await asyncio.sleep(PROGRESS_SECONDS)

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
    await _say(uplink, members.Progress(epoch, total, total))


async def _handle(member: RingMember, arrival: Arrival, uplink: Link) -> None:
    try:
        await member.handle(arrival)
    except Exception as error:
        await _break(member, uplink, _explain(error))


async def _settle(member: RingMember, uplink: Link) -> float | None:
    try:
        return await member.settle()
    except Exception as error:
        await _break(member, uplink, _explain(error))
        return None


def _explain(error: Exception) -> SpecsotError:
    """Return an error as SpecsotError, so that an unexpected error ends the epoch and not the process."""
    return error if isinstance(error, SpecsotError) else explain_failure("this member", error)


async def _break(member: RingMember, uplink: Link, error: SpecsotError) -> None:
    """End the epoch because of an error: drop its state, and report it to the master, which forms the next
    one.

    An error outside of an epoch is only logged. If the error is Hung, it is raised, because a member whose
    compute thread hangs cannot take part in another epoch.
    """
    epoch = member.epoch
    log.error("the epoch broke here", epoch=epoch, reason=str(error))
    await member.disband()
    if epoch:
        await _say(uplink, members.Broken(epoch, str(error)))
    if isinstance(error, Hung):
        await uplink.close()
        raise error


async def _say(
    uplink: Link, message: members.Ready | members.Broken | members.MemberLeaving | members.Progress
) -> None:
    """Send a message to the master. If the link is lost, the loss also arrives in the inbox, so it is
    ignored.
    """
    try:
        await uplink.send(message)
    except Unavailable:
        log.info("the master could not be told", message=type(message).__name__)
