"""What a head's guesses are worth: the drafts that verification would accept, chain by chain.

Needs NumPy alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """Chains over texts that the base wrote.

    tested:   by depth, drafts that verification reached: all before them were accepted.
    accepted: by depth, those that were right.
    laps:     chains; each commits its accepted drafts and one token more.
    """

    tested: tuple[int, ...]
    accepted: tuple[int, ...]
    laps: int

    def __add__(self, other: ChainAcceptance) -> ChainAcceptance:
        return ChainAcceptance(
            tuple(a + b for a, b in zip(self.tested, other.tested)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted)),
            self.laps + other.laps,
        )

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Share accepted of those reached."""
        return tuple(right / max(reached, 1) for right, reached in zip(self.accepted, self.tested))

    @property
    def per_step(self) -> float:
        """The same over all depths: of the drafts that verification reached, the share it accepted."""
        return sum(self.accepted) / max(sum(self.tested), 1)

    @property
    def tokens_per_lap(self) -> float:
        return sum(self.accepted) / max(self.laps, 1) + 1


def none(depth: int) -> ChainAcceptance:
    return ChainAcceptance((0,) * depth, (0,) * depth, 0)


def chains(hits: Bools, learned: Bools, depth: int) -> ChainAcceptance:
    """Drafting one text as decoding does: a chain, its accepted drafts, the bonus token, the next chain.

    hits: [length, depth] as `Unrolling.hits` has them; learned: [length] what the base wrote.
    """
    tested, accepted, laps = np.zeros(depth, np.int64), np.zeros(depth, np.int64), 0
    for first, last in _stretches(learned):
        root = max(first, 1)  # a token that is committed; row root - 1 drafts what comes behind it
        while root + 1 < last:
            reach = min(depth, last - root - 1)
            missed = np.flatnonzero(~hits[root - 1, :reach])
            right = int(missed[0]) if len(missed) else reach
            tested[: min(right + 1, reach)] += 1
            accepted[:right] += 1
            laps += 1
            root += right + 1
    return ChainAcceptance(tuple(tested.tolist()), tuple(accepted.tolist()), laps)


def _stretches(learned: Bools) -> Iterator[tuple[int, int]]:
    """First and last + 1 of each run of learned tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], learned, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist())
