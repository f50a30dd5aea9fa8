"""Drafters for the laws: one that knows the plain text and errs, one that is slow to the end.

They stand where the product's drafter stands, behind the same interface.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from specsot.checkpoint.config import read_config
from specsot.checkpoint.fingerprint import fingerprint
from specsot.core.frames import Draft, Drafts, Features
from specsot.core.tree import Tree, chain
from specsot.members import Configuration, HandOver, Head, Ready, Registration, StandBy, Tap
from specsot.service.membership import RingMember
from specsot.transport.links import Arrival, Link

TAPS = 0, 2, 3  # layers that a base of four has, too

# Nodes of a chain that is longer than any tree that a drafter may be asked for, and than Python may recurse.
DEEP = 1100

Vary = Callable[[random.Random, Draft, int], list[Draft]]  # dice, a right draft, the vocabulary's size


def knowing(
    base: Path, texts: Sequence[Sequence[int]], skill: float = 0.85, vary: Vary | None = None
) -> Callable[..., RingMember]:
    """Makes a drafter that knows these whole texts, prompts included. vary: what is sent for each."""

    def continuation(text: list[int]) -> list[int]:
        return next((list(one[len(text) :]) for one in texts if list(one[: len(text)]) == text), [])

    def make(name, address, dialer, compute) -> RingMember:
        return KnowingDrafter(base, name, address, dialer, continuation, skill, seed=5, vary=vary)

    return make


def hostile(base: Path, texts: Sequence[Sequence[int]], most: int) -> Callable[..., RingMember]:
    """Makes a drafter that says whatever a drafter must not say, beside right trees. most: nodes of one."""
    return knowing(base, texts, vary=partial(_spoil, most))


def add_sometimes(token: int, rng: random.Random, draft: Draft, vocabulary: int) -> list[Draft]:
    """One more node somewhere, every third time."""
    tokens, parents = draft.tree.tokens, draft.tree.parents
    if rng.random() > 1 / 3:
        return [draft]
    return [replace(draft, tree=Tree((*tokens, token), (*parents, rng.randrange(len(tokens)))))]


def _spoil(most: int, rng: random.Random, draft: Draft, vocabulary: int) -> list[Draft]:
    """What comes in place of one right draft, in any order."""
    sequence, draft_round, tree = draft.sequence, draft.draft_round, draft.tree
    root, wrong = tree.tokens[0], vocabulary + rng.randrange(1 << 20)
    deep = chain([root, *(rng.randrange(vocabulary) for _ in range(DEEP))])
    spoilt = {
        "beyond": Tree((*tree.tokens, wrong), (*tree.parents, 0)),
        "beyond by one": Tree((*tree.tokens, vocabulary), (*tree.parents, 0)),
        "another root": Tree((root ^ 1, *tree.tokens[1:]), tree.parents),
        "a root beyond": Tree((wrong, *tree.tokens[1:]), tree.parents),
        "deep": deep,
        "wide": Tree((root,) + (7,) * (most - 1), (0,) * most),
        "twins": Tree(tree.tokens + tree.tokens[1:], tree.parents + tree.parents[1:]),
        "right": tree,
    }
    chosen = [Draft(sequence, draft_round, one) for one in rng.choices(list(spoilt.values()), k=2)]
    later = [Draft(sequence, draft_round + ahead, rng.choice(list(spoilt.values()))) for ahead in (1, 2, 900)]
    drafts = [*chosen, *later, Draft(sequence + 10**6, draft_round, tree), Draft(sequence, 0, tree)]
    rng.shuffle(drafts)
    return drafts


class KnowingDrafter:
    """Drafts trees along `continuation(tokens) -> next tokens`, right with probability `skill`.

    It takes features like a real one (so the ring fuses and ships them) and checks their count.
    """

    def __init__(
        self,
        base,
        name,
        address,
        dialer,
        continuation: Callable[[list[int]], list[int]],
        skill: float,
        seed: int,
        vary: Vary | None = None,
    ):
        self._base, self._name, self._address, self._dialer = base, name, address, dialer
        self._continuation, self._skill = continuation, skill
        self._rng = random.Random(seed)
        self._configuration: Configuration | None = None
        self._link: Link | None = None
        self._texts: dict[int, list[int]] = {}
        self._vary = vary
        self._prompts: dict[int, int] = {}
        self.drafted = 0  # trees that it has sent

    @property
    def epoch(self) -> int:
        return self._configuration.epoch if self._configuration else 0

    async def registration(self) -> Registration:
        config = read_config(self._base)
        return Registration(
            kind="drafter",
            name=self._name,
            address=self._address,
            fingerprint=fingerprint(self._base),
            model_layers=config.layers,
            max_positions=config.max_positions,
            kv_bytes=1 << 26,
            row_bytes=64,
            head=Head(TAPS, 3),
        )

    async def configure(self, configuration: Configuration, uplink: Link) -> None:
        import torch

        hidden = read_config(self._base).hidden
        for layer in TAPS if configuration.head else ():
            stage = next(s for s in configuration.stages if layer < s.layers.last)
            link = await self._dialer.dial(stage.address, configuration.epoch)
            await link.send(Tap(configuration.epoch, layer, torch.ones(3, hidden)))
        self._link = await self._dialer.dial(configuration.stages[0].address, configuration.epoch)
        self._configuration = configuration
        await uplink.send(Ready(configuration.epoch))

    async def prepare(self, order: StandBy | HandOver, uplink: Link) -> None: ...

    async def handle(self, arrival: Arrival) -> None:
        if isinstance(arrival.message, Features):
            await self._learn(arrival.message)

    async def run_due(self) -> float | None:
        return None

    async def disband(self) -> None:
        self._configuration = None

    async def _learn(self, features: Features) -> None:
        for opening in features.openings:
            origin = self._texts[opening.fork.sequence][: opening.fork.length] if opening.fork else []
            self._texts[opening.sequence] = list(origin)
        count = sum(len(feature_batch.tokens) for feature_batch in features.feature_batches)
        assert (0 if features.rows is None else features.rows.shape[0]) == count
        drafts = []
        for feature_batch in features.feature_batches:
            text = self._texts[feature_batch.sequence]
            assert len(text) == feature_batch.start, (
                "features and tokens must follow each other without a gap"
            )
            text += feature_batch.tokens
            if feature_batch.bonus is not None and feature_batch.draft_round is not None:
                drafts.append(
                    Draft(
                        feature_batch.sequence,
                        feature_batch.draft_round,
                        self._tree([*text, feature_batch.bonus]),
                    )
                )
        for sequence in features.closings:
            self._texts.pop(sequence, None)
        if self._vary:
            size = read_config(self._base).vocab
            drafts = [one for draft in drafts for one in self._vary(self._rng, draft, size)]
        if drafts and self._link:
            self.drafted += len(drafts)
            await self._link.send(Drafts(features.epoch, tuple(drafts), drafter=self._name))

    def _tree(self, text: list[int]) -> Tree:
        """The known path with slips, and random siblings."""
        assert self._configuration is not None
        tokens, parents, tip = [text[-1]], [0], 0
        for token in self._continuation(text)[: self._configuration.shape.depth]:
            if self._rng.random() < 0.5:
                tokens.append(self._rng.randrange(100))
                parents.append(tip)
            tokens.append(token if self._rng.random() < self._skill else self._rng.randrange(100))
            parents.append(tip)
            tip = len(tokens) - 1
        return Tree(tuple(tokens), tuple(parents))
