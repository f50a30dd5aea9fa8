"""A master without doors: who takes requests, who hears members, and how everything stands.

Refuses to know how it was put together, and how a ring is led.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from specsot.errors import Unavailable
from specsot.events import Numbered
from specsot.info import Info, MemberInfo, ModelInfo, Rebalanced
from specsot.links import Link
from specsot.members import Registration
from specsot.params import Ask
from specsot_master import desk
from specsot_master.conductor import ANYBODY, Caller
from specsot_master.journal import Kept
from specsot_master.replicas import Replica, sum_up
from specsot_master.text import Text


class Leader(desk.Leader, Protocol):
    """A conductor, or what routes requests to several."""

    def generate(self, ask: Ask, caller: Caller = ANYBODY) -> AsyncGenerator[Numbered, None]: ...

    def resume(
        self, request_id: str, offset: int = 0, ask: Ask | None = None, caller: Caller = ANYBODY
    ) -> AsyncGenerator[Numbered, None]: ...

    async def revive(self, kept: Iterable[Kept]) -> None: ...


class Members(Protocol):
    """A fleet, or what deals members out to several."""

    async def join(self, registration: Registration, downlink: Link) -> None: ...

    def heard(self, name: str, message: object, by: Link | None = None) -> None: ...

    def lost(self, name: str, reason: str, by: Link | None = None) -> None: ...


@dataclass(slots=True)
class Master:
    """`serving`: a ring is complete, and moves when there is work. changed: a ring came or broke."""

    text: Text
    model: ModelInfo
    replicas: tuple[Replica, ...]
    leader: Leader
    members: Members
    changed: asyncio.Event
    serving: bool = False
    leaving: bool = False

    def info(self) -> Info:
        """How everything stands, for people and GetInfo."""
        told = sum_up([one.info() for one in self.replicas])
        members = tuple(member for one in self.replicas for member in self._members_of(one))
        return replace(told, models=(self.model,), members=members)

    def waiting_for(self) -> str:
        """What rings lack, in words."""
        return "; ".join(self.info().waiting_for)

    def rebalance(self) -> Rebalanced:
        """Every ring that is formed shares its layers out anew.

        Raises Unavailable while there is none, Refused where its workers have no room.
        """
        formed = [one for one in self.replicas if one.fleet.formed] or self.replicas[:1]
        done = [one.fleet.rebalance() for one in formed]
        plans = "; ".join(one.plan for one in done)
        return Rebalanced(any(one.changed for one in done), max(one.epoch for one in done), plans)

    async def complete(self, with_drafter: bool = False) -> None:
        """Return once all rings are complete (and draft, if asked for).

        Raises Unavailable with the member's own words when one cannot take part.
        """
        for one in self.replicas:
            while not one.fleet.ready or (with_drafter and not one.drafts):
                if one.fleet.complaint:
                    raise Unavailable(one.fleet.complaint)
                self.changed.clear()
                await self.changed.wait()

    def end(self, reason: str) -> None:
        """Every request ends with Unavailable(reason)."""
        for one in self.replicas:
            one.conductor.end(reason)

    def _members_of(self, one: Replica) -> Iterable[MemberInfo]:
        members = one.fleet.members()
        if len(self.replicas) == 1:
            return members
        return (replace(member, replica=one.number) for member in members)
