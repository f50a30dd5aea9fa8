"""Grows trees on a GPU behind a lap before the host has read which tokens that lap accepted.

The device says by itself what is due: what was accepted, and where that goes. The host sends all else while
it computes the lap, and checks what was said when it takes the candidates. Where trees are of a known size it
may also let the device choose them, and begin the lap that verifies them: then it reads what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specsot.core.frames import FeatureBatch, TreeSegment
from specsot_drafter.core.selection import Candidates, Flags, Floats
from specsot_drafter.eagle_kv import DueRows, FollowedSequence
from specsot_kernels.growing import WORD, CandidatePool, ChoiceNumbers, TreeRows, VerifiedTrees
from specsot_model.kv import ALIGNED, Numbers, Staging, size_of, views

MAX_JUDGED_ROWS = 2048  # of a frame whose drafts are begun before its host has judged it; not measured
MAX_CHOSEN_NODES = 2 * WORD  # of a tree that a device chooses: its kernel makes so many bits
NOWHERE = (-1, -1)


class VerifiedTree(NamedTuple):
    """A tree whose verdict a device has, and its host has not; its drafts are grown where the rows end that
    its text has, on the last of its `pages`.
    """

    segment: TreeSegment
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GrownPool:
    """Where the candidates of a graph are. depths: int32 [n] of each, on the device."""

    pool: CandidatePool
    depths: Tensor
    levels: int
    chooser: TreeChooser


@dataclass(frozen=True, slots=True)
class EarlyGrowth:
    """Drafts that grow behind trees which nobody had judged.

    places: by sequence, its tree's number, and how many tokens its text had before that.
    due:    rows of a tree that the device looks at; of a longer way it stores no more features.
    read:   candidates of all of them, and what the device said of each: how many tokens its text goes on by,
            and which, [trees, 1 + due].
    pool:   where a device may choose from it.
    astray: sequences of whom the host knows that the device's verdict is wrong.
    told:   sequences whose lesson has come: what comes of them then, from the same place, is of another lap.
    """

    places: Mapping[int, tuple[int, int]]
    due: int
    read: Callable[[], tuple[Candidates, Numbers]]
    pool: GrownPool | None = None
    astray: Set[int] = frozenset()
    told: set[int] = field(default_factory=set[int], init=False)

    def covers(self, lesson: FeatureBatch) -> bool:
        """The device has stored its features, as those of what it accepted."""
        if lesson.sequence in self.told:
            return False
        self.told.add(lesson.sequence)
        place = None if lesson.sequence in self.astray else self.places.get(lesson.sequence)
        return place is not None and place[1] == lesson.start and len(lesson.tokens) <= self.due

    def of(self, due: Sequence[DueRows]) -> Callable[[], Candidates | None] | None:
        """Of these texts alone, once their verdict is known; None where others are among them, or they did
        not go on from there. What is returned says None where the device has said what its host does not.
        """
        places = [self.places.get(one.sequence, NOWHERE) for one in due]
        if self.astray or any(committed != one.first for (_, committed), one in zip(places, due)):
            return None
        found = [place for place, _ in places]

        def grown() -> Candidates | None:
            offer, said = self.read()
            told = said.tolist()
            wanted = [[len(one.tokens), *one.tokens] for one in due]
            if any(told[at][: len(want)] != want for at, want in zip(found, wanted)):
                return None
            if found == [*range(len(offer))]:
                return offer
            return Candidates(offer.tokens[found], offer.scores[found], offer.parents[found], offer.depths)

        return grown

    def take(self, texts: Sequence[FollowedSequence | None]) -> list[DueRows]:
        """What is due of these; nothing is taken where some of them do not go on from there."""
        known = [one for one in texts if one]
        most = self.due
        at = self.places
        here = [one for one in known if 0 < one.due <= most and at.get(one.id, NOWHERE)[1] == one.extended]
        return [] if self.astray or len(here) < len(texts) else [one.take(asked=True) for one in here]

    def choose(self, sequences: Sequence[int], nodes: int, room: int, trust: Floats) -> DeviceChoice | None:
        """Have the device choose trees of at most so many nodes for these texts, all of which have `room`
        levels below their root. trust: see `ChoiceNumbers`. None where it cannot.
        """
        found = [self.places.get(one) for one in sequences]
        if self.pool is None or room < self.pool.levels or None in found:
            return None
        nodes = min(nodes, self.pool.pool.tokens.shape[1] + 1, MAX_CHOSEN_NODES)
        places = tuple(place[0] for place in found if place)
        return DeviceChoice(tuple(sequences), nodes, places, self.pool, trust) if nodes > 1 else None


@dataclass(slots=True)
class DeviceChoice:
    """See `specsot.core.verdict.UnreadTrees`. sequences: whose they are. places: theirs in the pool."""

    sequences: tuple[int, ...]
    nodes: int
    places: tuple[int, ...]
    grown: GrownPool
    trust: Floats
    taken: bool = field(default=False, init=False)
    _made: bool = field(default=False, init=False)
    _failure: Exception | None = field(default=None, init=False)

    def choose(self, tokens: Tensor, positions: Tensor, bits: Tensor, vocabulary: int) -> None:
        """See `UnreadTrees`."""
        self._made = True
        try:
            self.grown.chooser.choose(self, TreeRows(tokens, positions, bits), vocabulary)
        except Exception as error:  # the caller's is the lap, the drafter's this
            self._failure = error

    def take(self) -> Flags | None:
        """[trees, n] which candidates were chosen; None: nobody asked for that. Waits for the device."""
        if self._failure:
            raise self._failure
        if not self._made:
            return None
        self.taken = True
        chosen = self.grown.chooser.read(len(self.places), self.nodes - 1)
        flags = np.zeros((len(chosen), self.grown.pool.tokens.shape[1]), np.bool_)
        np.put_along_axis(flags, chosen.astype(np.int64), True, 1)
        return flags


class TreeChooser:
    """Numbers for `choose_rows` and what it tells, of one choice at a time."""

    def __init__(self, trees: int, candidates: int, levels: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._shapes = (trees,), (levels,)
        self._numbers = torch.zeros(size_of(self._shapes), dtype=torch.int32, device=device)
        self._staging = Staging(len(self._numbers), device)
        self._ranks = self._numbers.new_zeros(trees * candidates)
        self._chosen = self._numbers.new_zeros(trees * (MAX_CHOSEN_NODES - 1))
        self._host = torch.empty(self._chosen.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._told = torch.cuda.Event() if on_gpu else None

    def warm_up(self, grown: GrownPool) -> None:
        """Compile what chooses from there, before anybody waits."""
        told = self._numbers.new_zeros(2)
        rows = TreeRows(told, torch.zeros_like(told), told.new_zeros((2, 1)))
        self.choose(DeviceChoice((0,), 2, (0,), grown, np.zeros(1)), rows, 1)

    def choose(self, asked: DeviceChoice, rows: TreeRows, vocabulary: int) -> None:
        """See `choose_rows`."""
        from specsot_kernels.gpu.choosing import choose_rows

        trees = len(asked.places)
        below = asked.nodes - 1
        grown = asked.grown
        (most,), (levels,) = self._shapes
        places = np.zeros(most, np.int32)
        trust = np.zeros(levels, np.float32)
        places[:trees], trust[: len(asked.trust)] = asked.places, asked.trust[:levels]
        self._staging.send([places, trust.view(np.int32)], self._numbers)
        sent, factors = views(self._numbers, self._shapes)
        ranks = self._ranks[: trees * len(grown.depths)]
        chosen = self._chosen[: trees * below]
        numbers = ChoiceNumbers(
            sent, grown.depths, factors.view(torch.float32), ranks, chosen.view(trees, below)
        )
        choose_rows(grown.pool, numbers, rows, asked.nodes, vocabulary)
        self._host[: len(chosen)].copy_(chosen, non_blocking=True)
        if self._told:
            self._told.record(torch.cuda.current_stream(chosen.device))

    def read(self, trees: int, nodes: int) -> Numbers:
        """[trees, nodes] of the choice that was made last."""
        if self._told:
            self._told.synchronize()
        return self._host[: trees * nodes].view(trees, nodes).numpy()


class JudgedTrees:
    """What a device must know of a frame's trees to find out what was accepted of them."""

    def __init__(self, room: int, trees: int, page_rows: int, device: torch.device) -> None:
        self.room = room
        self._most = trees
        self._page_rows = page_rows
        size = 2 * MAX_JUDGED_ROWS + trees * (3 + room) + 4 * ALIGNED
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = Staging(size, device)
        self.targets = self._numbers.new_zeros(1)  # of a tree that nobody has

    def send(self, trees: Sequence[VerifiedTree], targets: Tensor) -> VerifiedTrees | None:
        """Of a frame that begins with these in this order; None where they are too many."""
        tokens = list[int]()
        parents = list[int]()
        told = list[tuple[int, int, int]]()
        size = self._page_rows
        for segment, _ in trees:
            tree = segment.tree
            told.append((len(tokens), len(tree.tokens), segment.committed))
            tokens += tree.tokens
            parents += tree.parents
        if len(tokens) > MAX_JUDGED_ROWS or len(trees) > self._most:
            return None
        parts = [np.array(part, np.int32) for part in (tokens, parents, told)]
        held = np.array([len(pages) for _, pages in trees], np.int32)
        every = np.fromiter(chain.from_iterable(pages for _, pages in trees), np.int32, int(held.sum()))
        columns = parts[2][:, 2:] + np.arange(self.room, dtype=np.int32)
        place = columns // np.int32(size)
        firsts = (held.cumsum(dtype=np.int32) - held)[:, None]
        parts.append((every[place + firsts] - place) * np.int32(size) + columns)
        self._staging.send(parts, self._numbers)
        shapes = (len(tokens),), (len(tokens),), (len(trees), 3), (len(trees), self.room)
        return VerifiedTrees(targets, *views(self._numbers[: size_of(shapes)], shapes))
