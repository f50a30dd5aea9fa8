"""A member's life cycle: join the master, take part in epochs, leave. The same for worker and drafter."""

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

# Seconds between attempts to join: doubles from one to the other; not measured.
FIRST_RETRY_SECONDS = 0.25
MAX_RETRY_SECONDS = 5.0
# Seconds in which a master that is shutting down is not back: it ends, and reads its model; not measured.
MASTER_RESTART_SECONDS = 3.0
PROGRESS_SECONDS = 2.0  # seconds between reports of loading, far below the master's BARRIER_SECONDS


@dataclass(frozen=True, slots=True)
class _Farewell:
    """Time to leave."""


@runtime_checkable
class InboxWatcher(Protocol):
    """A member that wants to know, while it is at work, whether it is wanted for something else."""

    def watch(self, arrived: Callable[[], bool]) -> None:
        """arrived: whether anything waits to be taken; may be asked from any thread."""
        ...


class RingMember(Protocol):
    """A worker or drafter, as `run_membership` drives it."""

    async def registration(self) -> members.Registration:
        """Who it is. May load weights to measure itself; called once per attempt to join."""
        ...

    async def configure(self, configuration: members.Configuration, uplink: Link) -> None:
        """Get ready for an epoch: weights, pages, links. Raises SpecsotError if it cannot."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch it is configured for; 0 when for none."""
        ...

    async def prepare(self, order: members.StandBy | members.HandOver, uplink: Link) -> None:
        """Begin to load ahead: the order's layers, then report them; without any, whatever fits. Or begin to
        hand KV rows over, and to take them.
        """
        ...

    async def handle(self, arrival: Arrival) -> None:
        """Take one message of the ring or an order of the master."""
        ...

    async def settle(self) -> float | None:
        """Do what is due once everything that has arrived is taken.

        Returns how many seconds later it wants to be called again without an arrival; None: never.
        """
        ...

    async def disband(self) -> None:
        """Forget the epoch: pages, links, everything in flight. Safe to call at any time."""
        ...


async def run_membership(member: RingMember, inbox: Inbox, connect: Connect, leaving: asyncio.Event) -> None:
    """Join and serve, again and again, until `leaving` is set. Raises Refused when not wanted, Hung."""
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
    """Try until the master takes us; None when it is time to leave instead. newest: epoch we know of."""
    wait = FIRST_RETRY_SECONDS
    said = ""
    registration = replace(await member.registration(), epoch=newest)
    while not farewell.done():
        try:
            uplink = await connect(registration)
        except (Unavailable, Occupied) as error:
            if (reason := str(error)) != said:  # a place may be taken for days
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
    """Wake whoever waits for the next arrival when it is time to leave: cheaper than to wait for two."""
    await leaving.wait()
    inbox.put("", _Farewell())


async def _serve(member: RingMember, inbox: Inbox, uplink: Link, leaving: asyncio.Event) -> int:
    """Take what arrives, then let the member do what is due; until the master is lost or we leave.

    Returns the newest epoch.
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
    """The next arrival, or None when `wait` seconds have passed without one."""
    if (arrival := inbox.take()) is not None:
        return arrival
    if wait is not None and wait <= 0:
        await asyncio.sleep(0)  # links work on this loop: without a breath nothing would ever arrive
        return inbox.take()
    if wait is None:  # of every lap: a deadline takes as long as the rest
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
    """Tell the master meanwhile how far getting ready is: so much of `total`, and all of it in the end.

    fetched: bytes of the model's files that are here.
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
    """A bug of ours ends an epoch as anything else does that goes wrong, and not the process."""
    return error if isinstance(error, SpecsotError) else explain_failure("this member", error)


async def _break(member: RingMember, uplink: Link, error: SpecsotError) -> None:
    """An epoch that fails here ends everywhere: the master is told and forms the next one.

    What goes wrong outside of any epoch ends none. Raises Hung: who hangs will not take part again.
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
    """Tell the master; if it is gone, its loss arrives in the inbox anyway."""
    try:
        await uplink.send(message)
    except Unavailable:
        log.info("the master could not be told", message=type(message).__name__)
