"""The way in: whether there is room for a newcomer, and what it asks for, looked into before it may wait.

Refuses to know rings, pages and whose turn it is.
"""

from __future__ import annotations

import asyncio

from specsot.errors import Overloaded, TimedOut
from specsot.params import Ask
from specsot_master.conductor.accepting import Acceptance, Words
from specsot_master.conductor.clock import Clock
from specsot_master.conductor.counts import Counts
from specsot_master.conductor.hints import Hints
from specsot_master.conductor.live import LiveRequest
from specsot_master.conductor.ring import Caller, ConductorConfig
from specsot_master.conductor.roster import Full, Roster
from specsot_master.conductor.trying import Forms


class Arrivals:
    """All that may take its time happens here, beside everybody else's requests. inside: how many are."""

    def __init__(
        self,
        acceptance: Acceptance,
        forms: Forms,
        roster: Roster,
        counts: Counts,
        clock: Clock,
        config: ConductorConfig,
    ) -> None:
        self._acceptance, self._forms, self._roster = acceptance, forms, roster
        self._counts, self._clock, self._most = counts, clock, config.queue
        self._hints = Hints(config.retry_after)
        self.inside = 0

    async def look_into(self, ask: Ask, caller: Caller) -> tuple[Words, float | None]:
        """Its words, and the seconds it has left. Who would be refused anyway is refused at once.

        Raises Overloaded, TimedOut, and whatever is wrong with it.
        """
        timeout = caller.timeout
        check_time(timeout)
        self.find_room(caller.client)
        if self.inside >= self._most:
            raise self.overloaded()
        self._acceptance.check(ask, caller.request)
        begun = self._clock.now()
        self.inside += 1
        try:
            async with asyncio.timeout(timeout):
                words = await self._word(ask, caller.client)
        except TimeoutError:
            raise TimedOut("the deadline passed while the request was looked into") from None
        finally:
            self.inside -= 1
        left = None if timeout is None else timeout - (self._clock.now() - begun)
        check_time(left)
        return words, left

    def find_room(self, client: str) -> LiveRequest | None:
        """Who must leave the queue for this client, if anybody. Raises Overloaded."""
        try:
            return self._roster.make_room(client)
        except Full:
            raise self.overloaded() from None

    def overloaded(self) -> Overloaded:
        """One more is refused, and told when to come back."""
        self._counts.refused += 1
        later = self._hints.refuse(self._clock.now())
        return Overloaded(f"{self._roster.waiting} requests are waiting already", later)

    def left(self) -> None:
        """A request is over, so that another can be taken."""
        self._hints.left(self._clock.now())

    async def _word(self, ask: Ask, client: str) -> Words:
        if ask.form:
            await self._forms.check(ask.form, client)
        return await self._acceptance.word(ask)


def check_time(timeout: float | None) -> None:
    """Raises TimedOut."""
    if timeout is not None and timeout <= 0:
        raise TimedOut("the deadline had passed when the request came")
