"""Who has joined, and the way to each: messages go out in order, and one that cannot be reached is lost.

Refuses to know epochs and what the messages say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from specsot.errors import SpecsotError
from specsot.links import Link
from specsot.members import Configuration, Disband, Registration, Rejoined, StandBy
from specsot.tasks import Failed, start

Word = Configuration | Disband | StandBy | Rejoined


@dataclass(frozen=True, slots=True)
class Member:
    registration: Registration
    downlink: Link


class Roll:
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

    def tell(self, name: str, word: Word) -> None:
        """Soon, and in the order of the calls."""
        self._soon(
            self._send(name, word), lambda error: self._on_lost(name, f"{type(error).__name__} on the way")
        )

    def tell_all(self, words: Mapping[str, Word]) -> None:
        """To each by name its own."""
        for name, word in words.items():
            self.tell(name, word)

    def hang_up(self, member: Member) -> None:
        """Another one took its place: what its link still says, and its end, is nobody's any more."""
        self._soon(member.downlink.close())

    def drop(self, name: str, reason: str) -> None:
        """It does not do what it must; once it does again, it may join again."""
        if member := self._members.get(name):
            self.hang_up(member)
            self._on_lost(name, reason)

    async def _send(self, name: str, word: Word) -> None:
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
