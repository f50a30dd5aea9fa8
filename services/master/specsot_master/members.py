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

MemberMessage = Configuration | Disband | StandBy | HandOver | Rejoined | DrafterLost


class Membership(Protocol):
    """Admits members and receives their messages: one fleet, or the router over several fleets."""

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Admit a member, to which `downlink` leads. Raises Refused if the member does not belong here."""
        ...

    def on_message(self, name: str, message: object, by: Link | None = None) -> None:
        """Handle a member's message.

        by: the downlink of the sender. A message is ignored if a newer process has the same name, so that its
            downlink is another one.
        """
        ...

    def on_disconnect(self, name: str, reason: str, by: Link | None = None) -> None:
        """Handle the loss of a member. by: as for `on_message`."""
        ...


class RingUser(Protocol):
    """The engine, as a fleet sees it. Called on the event loop, so its methods must be quick."""

    @property
    def at_work(self) -> int:
        """Number of requests that a new epoch would interrupt."""
        ...

    def fitting(self, ring: RingState, /) -> int:
        """Return how many of the known requests would fit a ring like this one."""
        ...

    def final_rows(self) -> Mapping[int, int]:
        """Return, by sequence id, for how many leading tokens the KV on every stage is final."""
        ...

    def handle(self, event: RingEvent, /) -> None:
        """Handle a result, or a change of the ring's state."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A member that has joined.

    registration: What the member said of itself when it joined.
    downlink: The master's link to the member.
    """

    registration: Registration
    downlink: Link


class MemberTable:
    """Members by name, in the order in which they joined; sends them messages.

    The argument `on_lost(name, reason)` is called if a message cannot be delivered.
    """

    def __init__(self, on_lost: Callable[[str, str], None]) -> None:
        self._on_lost = on_lost
        self._members: dict[str, Member] = {}
        self._tasks = set[asyncio.Task[object]]()

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @property
    def registrations(self) -> list[Registration]:
        """The registrations of all members, in the order in which they joined."""
        return [member.registration for member in list(self._members.values())]

    def add(self, registration: Registration, downlink: Link) -> None:
        """Add a member; a member of the same name is replaced."""
        self._members[registration.name] = Member(registration, downlink)

    def find(self, name: str) -> Member | None:
        """Return the member of this name, or None."""
        return self._members.get(name)

    def remove(self, name: str) -> Member:
        """Remove and return a member. Raises KeyError for an unknown name."""
        return self._members.pop(name)

    def send(self, name: str, word: MemberMessage) -> None:
        """Send a message in the background; unknown names are ignored, and a failure calls `on_lost`."""
        self._soon(
            self._deliver(name, word), lambda error: self._on_lost(name, f"{type(error).__name__} on the way")
        )

    def send_all(self, words: Mapping[str, MemberMessage]) -> None:
        """Send each member, by name, its message in the background."""
        for name, word in words.items():
            self.send(name, word)

    def disconnect(self, member: Member) -> None:
        """Close the link of a process that was replaced; what the link still delivers is ignored."""
        self._soon(member.downlink.close())

    def drop(self, name: str, reason: str) -> None:
        """Disconnect a member that does not do its part, and report it as lost. The member may join again."""
        if member := self._members.get(name):
            self.disconnect(member)
            self._on_lost(name, reason)

    async def _deliver(self, name: str, word: MemberMessage) -> None:
        """Send a message over the member's link; if the link fails, report the member as lost."""
        member = self._members.get(name)
        if member is None:
            return
        try:
            await member.downlink.send(word)
        except SpecsotError as error:
            if self._members.get(name) is member:
                self._on_lost(name, str(error))

    def _soon(self, work: Coroutine[Any, Any, object], failed: Failed | None = None) -> None:
        """Run a coroutine as a task, and hold a reference to the task until it ends."""
        task = start(work, failed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RefusedMembers:
    """Members that were refused and may ask again, so that the master's status shows an operator why."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By address of the member: the time of its last attempt, and the refusal in words.
        self._asked: dict[str, tuple[float, str]] = {}

    def note(self, asking: Registration, refusal: Refused) -> None:
        """Remember a refusal, and log it if it is not listed yet.

        At most MAX_REFUSED_MEMBERS members are listed.
        """
        said = f"{asking.kind} {asking.name} at {asking.address} is not let in: {refusal}"
        known = said in self.lines()
        if not known and len(self._asked) < MAX_REFUSED_MEMBERS:
            log.warning(
                "member not let in",
                kind=asking.kind,
                name=asking.name,
                at=asking.address,
                reason=str(refusal),
            )
        if known or len(self._asked) < MAX_REFUSED_MEMBERS:
            self._asked[asking.address] = self._clock(), said

    def forget(self, joined: Registration) -> None:
        """Forget the refusal of a member that has joined now."""
        self._asked.pop(joined.address, None)

    def lines(self) -> tuple[str, ...]:
        """Return one line per member that was refused within the last ASKS_AGAIN_SECONDS."""
        since = self._clock() - ASKS_AGAIN_SECONDS
        self._asked = {address: one for address, one in self._asked.items() if one[0] > since}
        return tuple(said for _, said in self._asked.values())


class RejoinGrace:
    """A timer during which the fleet waits for lost members; `over` is called when the time has run out."""

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def active(self) -> bool:
        """Whether the timer is running."""
        return self._alarm is not None

    def begin(self, seconds: float) -> None:
        """Start the timer anew, whether or not it is running already."""
        self.end()
        self._alarm = asyncio.get_running_loop().call_later(seconds, self._run_out)

    def end(self) -> None:
        """Stop the timer without calling `over`."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None

    def _run_out(self) -> None:
        """Call `over` when the time has run out."""
        self._alarm = None
        self._over()


class DrafterGrace(RejoinGrace):
    """The time during which the first ring, once it has its workers, waits for a drafter.

    Without this wait, a drafter that joins a moment later would cause the ring to be formed a second time.
    """

    def __init__(self, over: Callable[[], None], seconds: float) -> None:
        super().__init__(over)
        self._seconds = seconds
        self._begun = False

    def waits(self, members: Iterable[Registration]) -> bool:
        """Start the timer on the first call. Return whether no drafter has joined yet and time is left.

        members: the registrations of all members.
        """
        if any(one.kind == "drafter" for one in members):
            self.end()
        elif not self._begun and self._seconds:
            self.begin(self._seconds)
        self._begun = True
        return self.active
