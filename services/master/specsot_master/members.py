"""The members of a fleet: their links, messages to them, and the grace time of lost ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from specsot.errors import Refused, SpecsotError
from specsot.members import Configuration, Disband, DrafterLost, HandOver, Registration, Rejoined, StandBy
from specsot.tasks import Failed, start
from specsot.transport.links import Link
from specsot_master.core.inputs import RingEvent
from specsot_master.core.ring.ring_state import RingState

log = structlog.get_logger()

# Seconds. A refused member asks again every 5 s; after this time without asking, it is no longer listed.
ASKS_AGAIN_SECONDS = 15.0
# Members. How many refused members are listed and logged. Untuned.
MAX_REFUSED_MEMBERS = 16

# What the master sends to members, apart from orders to stage 0.
MemberMessage = Configuration | Disband | StandBy | HandOver | Rejoined | DrafterLost


class Membership(Protocol):
    """Admits members and receives their messages: one fleet, or the router over several fleets."""

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Admit a member, and start an epoch with it if that is possible now.

        registration: what the member says of itself: kind, name, address, model fingerprint, layers.
        downlink: the master's link to this member, on which it receives its configurations.

        Raises Refused if the member does not belong here.
        """

    def on_message(self, name: str, message: object, downlink: Link | None = None) -> None:
        """Handle one message of a member. Messages of unknown members, and of other epochs, are ignored.

        name: the sender's name.
        message: a decoded message: Result, Ready, Progress, Broken or MemberLeaving.
        downlink: the master's link to the sender. The message is ignored if a newer process has joined under
            the same name, so that its link is another one. None accepts any process of this name.
        """

    def on_disconnect(self, name: str, reason: str, downlink: Link | None = None) -> None:
        """Handle the loss of a member. Nothing happens if the member is unknown.

        name: the lost member's name.
        reason: why it is lost, in words.
        downlink: the master's link to the lost member; nothing happens if a newer process has its name. None
            accepts any process of this name.
        """


class RingUser(Protocol):
    """The engine, as a fleet sees it. Called on the event loop, so its methods must be quick."""

    @property
    def at_work(self) -> int:
        """Number of requests that a new epoch would interrupt; 0 if there are none."""

    def fitting(self, ring: RingState, /) -> int:
        """Return how many of the known requests would fit a ring like this one.

        ring: the sizes and limits of a ring that need not run.
        """

    def final_rows(self) -> Mapping[int, int]:
        """Return, by sequence id, how many of its first tokens have final KV on every stage, so that the KV
        can be copied while requests continue. Sequences without final KV are left out.
        """

    def handle(self, event: RingEvent, /) -> None:
        """Handle a result, or a change of the ring's state.

        event: a result of the ring, or that the ring became ready or was lost.
        """


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a fleet that has joined, with its link.

    registration: What the member reported about itself when it joined.
    downlink: The master's link to the member.
    """

    registration: Registration
    downlink: Link


class MemberTable(dict[str, Member]):
    """The members of one fleet by name, in the order in which they joined; sends them messages in the
    background.
    """

    def __init__(self, on_lost: Callable[[str, str], None]) -> None:
        """Create a table without members.

        on_lost: called with the member's name and a reason in words if a message cannot be delivered.
        """
        super().__init__()
        self._on_lost = on_lost
        self._tasks = set[asyncio.Task[object]]()

    @property
    def registrations(self) -> list[Registration]:
        """The registrations of all members, in the order in which they joined; empty without members."""
        return [member.registration for member in list(self.values())]

    def send(self, name: str, message: MemberMessage) -> None:
        """Send a message in the background. Nothing happens if no member has this name; if the message cannot
        be delivered, `on_lost` is called.

        name: the receiver's name.
        message: the message, not encoded yet.
        """
        self._run_in_background(
            self._deliver(name, message),
            lambda error: self._on_lost(name, f"{type(error).__name__} on the way"),
        )

    def send_all(self, messages: Mapping[str, MemberMessage]) -> None:
        """Send each member its own message in the background, as `send` does; send nothing for an empty
        mapping.

        messages: the message for each receiver, by the receiver's name.
        """
        for name, message in messages.items():
            self.send(name, message)

    def disconnect(self, member: Member) -> None:
        """Close the link of a process that was replaced; what the link still delivers is ignored.

        member: the process, which need not be in the table any more.
        """
        self._run_in_background(member.downlink.close())

    def drop(self, name: str, reason: str) -> None:
        """Disconnect a member that does not do its part, and report it as lost through `on_lost`. The member
        may join again. An unknown name is ignored.

        name: the member's name.
        reason: why it is dropped, in words.
        """
        if member := self.get(name):
            self.disconnect(member)
            self._on_lost(name, reason)

    async def _deliver(self, name: str, message: MemberMessage) -> None:
        """Send a message over the member's link. If the link fails, report the member as lost, unless another
        process has taken its name meanwhile. An unknown name is ignored. Only a SpecsotError counts as a
        failed link here; other errors are raised.

        name: the receiver's name.
        message: the message, not encoded yet.
        """
        member = self.get(name)
        if member is None:
            return
        try:
            await member.downlink.send(message)
        except SpecsotError as error:
            if self.get(name) is member:
                self._on_lost(name, str(error))

    def _run_in_background(
        self, coroutine: Coroutine[Any, Any, object], on_error: Failed | None = None
    ) -> None:
        """Run a coroutine as a task, and hold a reference to the task until it ends.

        coroutine: what is run.
        on_error: called with the exception if the coroutine raises one; None to log the exception only.
        """
        task = start(coroutine, on_error)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RefusedMembers:
    """Members that were refused and may ask again, so that the master's status shows an operator why."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty list.

        clock: returns monotonic seconds.
        """
        self._clock = clock
        # By address of the member: the time of its last attempt, and the refusal in words.
        self._asked: dict[str, tuple[float, str]] = {}

    def note(self, registration: Registration, refusal: Refused) -> None:
        """Remember a refusal, and log it if the same refusal is not listed yet. If MAX_REFUSED_MEMBERS
        members are listed already, a further one is neither remembered nor logged. A listed refusal of the
        same member is renewed, so that it stays listed.

        registration: what the refused member reported about itself.
        refusal: the error that it received.
        """
        line = f"{registration.kind} {registration.name} at {registration.address} is not let in: {refusal}"
        known = line in self.lines()
        if not known and len(self._asked) < MAX_REFUSED_MEMBERS:
            log.warning(
                "member not let in",
                kind=registration.kind,
                name=registration.name,
                at=registration.address,
                reason=str(refusal),
            )
        if known or len(self._asked) < MAX_REFUSED_MEMBERS:
            self._asked[registration.address] = self._clock(), line

    def forget(self, registration: Registration) -> None:
        """Remove a member from the list, because it has joined now. Nothing happens if it is not listed.

        registration: what the member reported about itself; its address identifies it.
        """
        self._asked.pop(registration.address, None)

    def lines(self) -> tuple[str, ...]:
        """Return one line in words per member that was refused within the last ASKS_AGAIN_SECONDS; empty if
        there is none. Older refusals are forgotten. Lines come in the order of the first refusals.
        """
        since = self._clock() - ASKS_AGAIN_SECONDS
        self._asked = {address: one for address, one in self._asked.items() if one[0] > since}
        return tuple(line for _, line in self._asked.values())


class RejoinGrace:
    """A timer during which the fleet waits for lost members before others take over their layers."""

    def __init__(self, on_timeout: Callable[[], None]) -> None:
        """Create a timer that does not run.

        on_timeout: called without arguments when the time has run out, but not when the timer is stopped.
        """
        self._over = on_timeout
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        """True while the timer is running."""
        return self._alarm is not None

    def begin(self, seconds: float) -> None:
        """Start the timer anew, whether or not it is running already.

        seconds: how long it runs.
        """
        self.end()
        self._alarm = asyncio.get_running_loop().call_later(seconds, self._run_out)

    def end(self) -> None:
        """Stop the timer without calling `on_timeout`. Nothing happens if it is not running."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None

    def _run_out(self) -> None:
        """Call `on_timeout`, as the time has run out."""
        self._alarm = None
        self._over()


class DrafterGrace(RejoinGrace):
    """The time during which the first ring, once it has its workers, waits for a drafter.

    Without this wait, a drafter that joins a moment later would cause the ring to be formed a second time.
    """

    def __init__(self, on_timeout: Callable[[], None], seconds: float) -> None:
        """Create a timer that does not run.

        on_timeout: called without arguments when the time has run out.
        seconds: how long to wait for a drafter; 0 for not at all.
        """
        super().__init__(on_timeout)
        self._seconds = seconds
        self._was_asked = False

    def waits(self, members: Iterable[Registration]) -> bool:
        """Return True if no drafter has joined yet and time is left; False once a drafter has joined or the
        time has run out. The first call starts the timer, unless a drafter is present or the time is 0; a
        drafter that joins stops it. The timer is started once only.

        members: the registrations of all members.
        """
        if any(one.kind == "drafter" for one in members):
            self.end()
        elif not self._was_asked and self._seconds:
            self.begin(self._seconds)
        self._was_asked = True
        return self.active
