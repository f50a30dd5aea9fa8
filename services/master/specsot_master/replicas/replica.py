"""One ring of a master: its members, its requests, its laps.

Refuses to know that there may be others.
"""

from __future__ import annotations

from dataclasses import dataclass

from specsot.info import PagesInfo, ReplicaInfo
from specsot_master.conductor import Engine
from specsot_master.fleet import Fleet
from specsot_master.laps import LapMeter


@dataclass(frozen=True, slots=True)
class Replica:
    """number: 0 for the first."""

    number: int
    conductor: Engine
    fleet: Fleet
    laps: LapMeter

    @property
    def drafts(self) -> bool:
        """The ring runs, and has a drafter."""
        ring = self.fleet.ring
        return ring is not None and ring.drafter is not None

    def info(self) -> ReplicaInfo:
        """How it stands."""
        fleet, conductor, waiting = self.fleet, self.conductor, self.fleet.waiting_for()
        return ReplicaInfo(
            number=self.number,
            epoch=fleet.epoch,
            ready=fleet.ready,
            waiting_for=(waiting,) if waiting else (),
            pages=self._pages(),
            laps=self.laps.info(),
            requests=conductor.requests(),
            plan=fleet.plan,
        )

    def _pages(self) -> PagesInfo | None:
        ring, conductor = self.fleet.ring, self.conductor
        return (
            PagesInfo(ring.pages, conductor.free_pages, ring.page_rows, conductor.kept_pages)
            if ring
            else None
        )
