"""Trees that grow behind a lap whose verdict a device has, and its host has not.

The device says by itself what is due: what was accepted, and where that goes. The host sends all else while
it computes the lap, and checks what was said when it takes the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specsot.core.frames import FeatureBatch, TreeSegment
from specsot.kernels.growing import VerifiedTrees
from specsot.model.kv import ALIGNED, Numbers, Staging, size_of, views
from specsot_drafter.core.selection import Candidates
from specsot_drafter.eagle_kv import DueRows
from specsot_drafter.growth import TreeRoom

MAX_JUDGED_ROWS = 2048  # of a frame whose drafts are begun before its host has judged it; not measured


class VerifiedTree(NamedTuple):
    """A tree whose verdict a device has, and its host has not; its drafts are grown in `room`, which begins
    where the rows end that the tree's text has.
    """

    segment: TreeSegment
    room: TreeRoom


@dataclass(frozen=True, slots=True)
class EarlyGrowth:
    """Drafts that grow behind trees which nobody had judged.

    places: by sequence, its tree's number, and how many tokens its text had before that.
    due:    rows of a tree that the device looks at; of a longer way it stores no more features.
    read:   candidates of all of them, and what the device said of each: how many tokens its text goes on by,
            and which, [trees, 1 + due].
    told:   sequences whose lesson has come: what comes of them then, from the same place, is of another lap.
    """

    places: Mapping[int, tuple[int, int]]
    due: int
    read: Callable[[], tuple[Candidates, Numbers]]
    told: set[int] = field(default_factory=set[int], init=False)

    def covers(self, lesson: FeatureBatch) -> bool:
        """The device has stored its features, as those of what it accepted."""
        if lesson.sequence in self.told:
            return False
        self.told.add(lesson.sequence)
        place = self.places.get(lesson.sequence)
        return place is not None and place[1] == lesson.start and len(lesson.tokens) <= self.due

    def of(self, due: Sequence[DueRows]) -> Callable[[], Candidates | None] | None:
        """Of these texts alone, once their verdict is known; None where others are among them, or they did
        not go on from there. What is returned says None where the device has said what its host does not.
        """
        places = [self.places.get(one.sequence, (-1, -1)) for one in due]
        if any(committed != one.first for (_, committed), one in zip(places, due)):
            return None
        found = [place for place, _ in places]

        def grown() -> Candidates | None:
            offer, said = self.read()
            wanted = [(len(one.tokens), *one.tokens) for one in due]
            if any(tuple(said[at, : len(want)].tolist()) != want for at, want in zip(found, wanted)):
                return None
            return Candidates(offer.tokens[found], offer.scores[found], offer.parents[found], offer.depths)

        return grown


class JudgedTrees:
    """What a device must know of a frame's trees to find out what was accepted of them."""

    def __init__(self, room: int, trees: int, device: torch.device) -> None:
        self.room, self._most = room, trees
        size = 2 * MAX_JUDGED_ROWS + trees * (3 + room) + 4 * ALIGNED
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = Staging(size, device)
        self.targets = self._numbers.new_zeros(1)  # of a tree that nobody has

    def send(self, trees: Sequence[VerifiedTree], targets: Tensor) -> VerifiedTrees | None:
        """Of a frame that has these in this order and nothing else; None where they are too many."""
        tokens, parents, told, slots = list[int](), list[int](), list[tuple[int, int, int]](), list[int]()
        for segment, room in trees:
            told.append((len(tokens), len(segment.tree), segment.committed))
            tokens += segment.tree.tokens
            parents += segment.tree.parents
            slots += room.slots
        if len(tokens) > MAX_JUDGED_ROWS or len(trees) > self._most:
            return None
        parts = [np.array(part, np.int32) for part in (tokens, parents, told, slots)]
        self._staging.send(parts, self._numbers)
        shapes = (len(tokens),), (len(tokens),), (len(trees), 3), (len(trees), self.room)
        return VerifiedTrees(targets, *views(self._numbers[: size_of(shapes)], shapes))
