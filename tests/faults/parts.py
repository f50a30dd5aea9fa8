"""A drafter of its own that guesses, beside the product's WorkerPart on stages without weights.

Refuses to know masters and nets. The product's drafter measures its costs by the clock: it would not do the
same twice.
"""

from __future__ import annotations

import random

from specsot.frames import Draft, Drafts, Features, Lesson
from specsot.links import Arrival, Dialer, Link, Lost
from specsot.members import Configuration, Ready, Registration
from specsot.tree import Tree
from specsot_app.mock.voice import Voice, read, read_all


class GuessingDrafter:
    """A drafter that is right with probability `skill`, and takes its time."""

    def __init__(
        self, registration: Registration, dialer: Dialer, voice: Voice, rng: random.Random, skill: float
    ) -> None:
        self._registration, self._dialer, self._voice = registration, dialer, voice
        self._rng, self._skill = rng, skill
        self._now: tuple[Configuration, Link] | None = None
        self.texts: dict[int, list[int]] = {}
        self._wanted: dict[int, Lesson] = {}

    @property
    def epoch(self) -> int:
        return self._now[0].epoch if self._now else 0

    async def registration(self) -> Registration:
        return self._registration

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        self._now = (
            configuration,
            await self._dialer.dial(configuration.stages[0].address, configuration.epoch),
        )
        await uplink.send(Ready(configuration.epoch))

    async def handle(self, arrival: Arrival) -> None:
        match arrival.message:
            case Features(epoch) as features if epoch == self.epoch:
                self._learn(features)
            case Lost(peer, _, epoch) if self._now and epoch == self.epoch:
                if peer in (self._now[0].stages[0].name, self._now[0].stages[-1].name):
                    await self.disband()
            case _:
                pass

    async def settle(self) -> float | None:
        wanted, self._wanted = self._wanted, {}
        if self._now is None or not wanted:
            return None
        drafts = tuple(
            Draft(one.sequence, one.step, self._tree(one)) for one in wanted.values() if one.step is not None
        )
        await self._now[1].send(Drafts(self.epoch, drafts))
        return None

    async def disband(self) -> None:
        now, self._now = self._now, None
        self.texts, self._wanted = {}, {}
        if now is not None:
            await now[1].close()

    def _learn(self, features: Features) -> None:
        for opening in features.openings:
            source = self.texts.get(opening.fork.sequence) if opening.fork else []
            if source is not None:
                self.texts[opening.sequence] = source[: opening.fork.length if opening.fork else 0]
        for lesson in features.lessons:
            text = self.texts.get(lesson.sequence)
            if text is not None and len(text) >= lesson.start:
                text[lesson.start :] = lesson.tokens
                if lesson.bonus is not None and lesson.step is not None:
                    self._wanted[lesson.sequence] = lesson
        for sequence in features.closings:
            self.texts.pop(sequence, None)
            self._wanted.pop(sequence, None)

    def _tree(self, lesson: Lesson) -> Tree:
        assert lesson.bonus is not None
        tokens, parents = [lesson.bonus], [0]
        states = [read_all([*self.texts[lesson.sequence], lesson.bonus])]
        for node in range(1, self._rng.randrange(1, 7)):
            parent = self._rng.randrange(max(node - 2, 0), node)
            right = self._rng.random() < self._skill
            tokens.append(self._voice.next(states[parent]) if right else self._rng.randrange(300, 800))
            parents.append(parent)
            states.append(read(states[parent], tokens[-1]))
        return Tree(tuple(tokens), tuple(parents))
