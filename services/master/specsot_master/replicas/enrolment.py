"""Members of several rings: each joins where it is missing; one without work goes where a ring broke.

Refuses to know requests, and how a ring is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from specsot.links import Link
from specsot.members import Registration
from specsot_master.fleet import Fleet
from specsot_master.fleet.formation import with_one_gpu

log = structlog.get_logger()


class MemberRouter:
    """What a fleet is to a master with one ring.

    changed: somebody came or went.
    """

    def __init__(self, fleets: Sequence[Fleet], changed: Callable[[], None]) -> None:
        self._fleets, self._changed = fleets, changed
        self._homes: dict[str, Fleet] = {}

    async def join(self, registration: Registration, downlink: Link) -> None:
        """Raises Refused when it belongs into none of the rings."""
        others = [
            one for fleet in self._fleets for one in fleet.registrations if one.name != registration.name
        ]
        registration = with_one_gpu(registration, others)
        fleet = self._homes.get(registration.name)  # back before its old link was known to be lost
        self._enter(fleet or self._choose(registration), registration, downlink)
        self._changed()

    def heard(self, name: str, message: object, by: Link | None = None) -> None:
        if fleet := self._homes.get(name):
            fleet.heard(name, message, by)

    def lost(self, name: str, reason: str, by: Link | None = None) -> None:
        fleet = self._homes.get(name)
        if fleet is None or (fleet.knows(name) and not fleet.knows(name, by)):
            return
        del self._homes[name]
        fleet.lost(name, reason)
        self._changed()

    def lend(self) -> None:
        """Workers without work go to rings that they complete."""
        for needy in self._fleets:
            for lender, worker in self._helpers(needy):
                member = lender.release(worker.name)
                log.info("goes to another ring", name=worker.name, replica=self._fleets.index(needy))
                self._enter(needy, member.registration, member.downlink)

    def _enter(self, fleet: Fleet, registration: Registration, downlink: Link) -> None:
        fleet.take(registration, downlink)
        self._homes[registration.name] = fleet

    def _choose(self, registration: Registration) -> Fleet:
        """Where it ran before and is missing; else the first where one is missing; else the smallest, where
        it stands by for all of them.
        """
        accepting = [fleet for fleet in self._fleets if fleet.accepts(registration)]
        if not accepting or registration.kind == "drafter":
            return (accepting or self._fleets)[0]
        short = [fleet for fleet in accepting if fleet.short]
        before = [fleet for fleet in short if fleet.ran(registration.name)]
        return (before or short or sorted(accepting, key=lambda fleet: len(fleet.registrations)))[0]

    def _helpers(self, needy: Fleet) -> list[tuple[Fleet, Registration]]:
        """As many as make it complete; none where that cannot be. Those of complete rings first: what is
        left of a broken one may be needed there.
        """
        lenders = sorted((one for one in self._fleets if one is not needy), key=lambda one: not one.formed)
        helpers: list[tuple[Fleet, Registration]] = []
        for lender in lenders:
            for worker in filter(needy.accepts, lender.idle_workers):
                helpers.append((lender, worker))
                if needy.completed_by([one for _, one in helpers]):
                    return helpers
        return []
