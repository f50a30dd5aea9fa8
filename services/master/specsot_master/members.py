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

# Seconds after which who was turned away does not ask any more: it would every 5 s; and how many are known.
ASKS_AGAIN_SECONDS = 15.0
MAX_TURNED_AWAY = 16

MemberMessage = Configuration | Disband | StandBy | HandOver | Rejoined | DrafterLost


class Membership(Protocol):
    """A fleet, or what deals members out to several."""

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Raises Refused."""
        ...

    def on_message(self, name: str, message: object, by: Link | None = None) -> None:
        """by: its downlink. What comes by another one than the newest of this name is nobody's."""
        ...

    def on_disconnect(self, name: str, reason: str, by: Link | None = None) -> None: ...


class RingUser(Protocol):
    """Runs requests on a fleet's ring. Called from the event loop; must be quick."""

    @property
    def at_work(self) -> int:
        """Requests that a new epoch would disturb."""
        ...

    def fitting(self, ring: RingState, /) -> int:
        """How many requests such a ring could hold."""
        ...

    def final_rows(self) -> Mapping[int, int]:
        """By sequence, how many first rows every stage has computed and leaves as they are."""
        ...

    def handle(self, event: RingEvent, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Member:
    """A member that has joined. downlink: the master's link to it."""

    registration: Registration
    downlink: Link


class MemberTable:
    """Members by name, in the order they joined. on_lost(name, reason): a message did not go through."""

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
        return [member.registration for member in list(self._members.values())]

    def add(self, registration: Registration, downlink: Link) -> None:
        self._members[registration.name] = Member(registration, downlink)

    def find(self, name: str) -> Member | None:
        return self._members.get(name)

    def remove(self, name: str) -> Member:
        return self._members.pop(name)

    def send(self, name: str, word: MemberMessage) -> None:
        self._soon(
            self._deliver(name, word), lambda error: self._on_lost(name, f"{type(error).__name__} on the way")
        )

    def send_all(self, words: Mapping[str, MemberMessage]) -> None:
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

    def _soon(self, work: Coroutine[Any, Any, object], failed: Failed | None = None) -> None:
        task = start(work, failed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class TurnedAway:
    """Who was not let in and may ask again: an operator who waits for it hears why, here too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, tuple[float, str]] = {}  # by address: when it did last, and what was said

    def note(self, asking: Registration, refusal: Refused) -> None:
        """Logged once for each reason."""
        said = f"{asking.kind} {asking.name} at {asking.address} is not let in: {refusal}"
        known = said in self.lines()
        if not known and len(self._asked) < MAX_TURNED_AWAY:
            log.warning(
                "member not let in",
                kind=asking.kind,
                name=asking.name,
                at=asking.address,
                reason=str(refusal),
            )
        if known or len(self._asked) < MAX_TURNED_AWAY:
            self._asked[asking.address] = self._clock(), said

    def forget(self, joined: Registration) -> None:
        self._asked.pop(joined.address, None)

    def lines(self) -> tuple[str, ...]:
        since = self._clock() - ASKS_AGAIN_SECONDS
        self._asked = {address: one for address, one in self._asked.items() if one[0] > since}
        return tuple(said for _, said in self._asked.values())


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


class DrafterGrace(RejoinGrace):
    """Of the first ring, once it has its workers: a drafter that came after it would have it formed twice."""

    def __init__(self, over: Callable[[], None], seconds: float) -> None:
        super().__init__(over)
        self._seconds = seconds
        self._begun = False

    def waits(self, members: Iterable[Registration]) -> bool:
        """Whether none has come yet, and there is time left for it."""
        if any(one.kind == "drafter" for one in members):
            self.end()
        elif not self._begun and self._seconds:
            self.begin(self._seconds)
        self._begun = True
        return self.active
