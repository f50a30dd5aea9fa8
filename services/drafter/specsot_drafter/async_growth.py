"""Grows trees on a GPU after a step, before the host has read which tokens that step accepted.

The device finds out by itself which tokens were accepted, and in which slots their draft rows and features
belong. The host sends everything else while the device computes the step. When the host takes the candidates
it compares what the device accepted with its own verification result, and discards the trees that differ.

If the number of nodes per tree is fixed beforehand, the host may also let the device select the nodes, and
launch the step that verifies them. The host then reads which nodes were selected.
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

# Rows. Bounds the tree nodes of a frame after which trees grow asynchronously. Untuned.
MAX_JUDGED_ROWS = 2048
# Nodes. Bounds a tree whose nodes the device selects, root included: the kernel writes two words of mask
# bits.
MAX_CHOSEN_NODES = 2 * WORD
# The place of a sequence that has no tree.
NOWHERE = (-1, -1)


class VerifiedTree(NamedTuple):
    """A tree that the device has verified, or is verifying, and whose result the host has not read.

    segment: The tree, and the number of committed tokens before its root.
    pages: Draft KV pages of its sequence, up to the last row that accepting and growing may need.
    """

    segment: TreeSegment
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GrownPool:
    """The candidates that a graph has grown, on the device.

    pool: Tokens, scores and parents of all candidates.
    depths: Depth of each candidate, int32 [n], on the device.
    levels: Levels of every tree.
    chooser: Selects nodes from these candidates.
    """

    pool: CandidatePool
    depths: Tensor
    levels: int
    chooser: TreeChooser


@dataclass(frozen=True, slots=True)
class AsyncGrowth:
    """Trees that grow after trees whose verification result the host has not read.

    places: By sequence id, the index of its tree in the frame and its number of tokens before that tree.
    due:    Most accepted tokens of a tree for which the device stores features.
    read:   Waits for the device. Returns the candidates of all trees, and the acceptance that the device
            found, int32 [trees, 1 + due]: the number of tokens that continue the sequence, then these tokens.
    pool:   Where the device may select nodes from; None: it cannot.
    astray: Ids of the sequences for which the host has found another verification result than the device.
    told:   Ids of the sequences whose feature batch of this step has arrived. A later batch of such a
            sequence belongs to another step, even if it begins at the same position.
    """

    places: Mapping[int, tuple[int, int]]
    due: int
    read: Callable[[], tuple[Candidates, Numbers]]
    pool: GrownPool | None = None
    astray: Set[int] = frozenset()
    told: set[int] = field(default_factory=set[int], init=False)

    def covers(self, feature_batch: FeatureBatch) -> bool:
        """Return whether the device has already stored the features of this batch.

        True at most once for each sequence. False if the sequence is mispredicted or unknown, if the batch
        begins elsewhere, or if it has more tokens than the device handles.
        """
        if feature_batch.sequence in self.told:
            return False
        self.told.add(feature_batch.sequence)
        place = None if feature_batch.sequence in self.astray else self.places.get(feature_batch.sequence)
        return place is not None and place[1] == feature_batch.start and len(feature_batch.tokens) <= self.due

    def of(self, due: Sequence[DueRows]) -> Callable[[], Candidates | None] | None:
        """Return a function that waits for the candidates of these sequences, one row each, in this order.

        That function returns None if the device accepted other tokens than the host for any of them.
        Return None instead of a function if a sequence has no tree here, if its due rows begin elsewhere, or
        if the host has found any sequence of the frame mispredicted.

        due: the rows of accepted tokens of each sequence, by the host's verification result.
        """
        places = [self.places.get(one.sequence, NOWHERE) for one in due]
        if self.astray or any(committed != one.first for (_, committed), one in zip(places, due)):
            return None
        found = [place for place, _ in places]

        def grown() -> Candidates | None:
            offer, said = self.read()
            # `said` has a row [count, token, token, ...] per tree: [2, 7, 9, -, -] continues by 7 and 9.
            told = said.tolist()
            wanted = [[len(one.tokens), *one.tokens] for one in due]
            if any(told[at][: len(want)] != want for at, want in zip(found, wanted)):
                return None
            if found == [*range(len(offer))]:
                return offer
            return Candidates(offer.tokens[found], offer.scores[found], offer.parents[found], offer.depths)

        return grown

    def take(self, sequences: Sequence[FollowedSequence | None]) -> list[DueRows]:
        """Take the due rows of these sequences, if all of them continue from their trees here.

        Otherwise take nothing and return an empty list.
        """
        known = [one for one in sequences if one]
        most = self.due
        at = self.places
        here = [one for one in known if 0 < one.due <= most and at.get(one.id, NOWHERE)[1] == one.extended]
        return [] if self.astray or len(here) < len(sequences) else [one.take(asked=True) for one in here]

    def choose(self, sequences: Sequence[int], nodes: int, room: int, trust: Floats) -> DeviceChoice | None:
        """Let the device select trees for these sequences. Return None if the device cannot.

        sequences: ids, in the order of the trees in the next frame.
        nodes: most nodes per tree, root included.
        room: most levels that every one of the sequences can have. The device does not check the depth, so
        it cannot select if the trees have more levels.
        trust: see `ChoiceNumbers`.
        """
        found = [self.places.get(one) for one in sequences]
        if self.pool is None or room < self.pool.levels or None in found:
            return None
        nodes = min(nodes, self.pool.pool.tokens.shape[1] + 1, MAX_CHOSEN_NODES)
        places = tuple(place[0] for place in found if place)
        return DeviceChoice(tuple(sequences), nodes, places, self.pool, trust) if nodes > 1 else None


@dataclass(slots=True)
class DeviceChoice:
    """A selection of nodes that the device makes when a step reads it; see `DeviceTrees`.

    sequences: Sequence id of each tree.
    nodes: Nodes of every tree, root included.
    places: Index of each tree in the pool.
    grown: The candidates.
    trust: What is added to a candidate's score at each depth, see `ChoiceNumbers`.
    taken: True once the drafter has sent these trees as its drafts.
    """

    sequences: tuple[int, ...]
    nodes: int
    places: tuple[int, ...]
    grown: GrownPool
    trust: Floats
    taken: bool = field(default=False, init=False)
    _made: bool = field(default=False, init=False)
    _failure: Exception | None = field(default=None, init=False)

    def choose(self, tokens: Tensor, positions: Tensor, bits: Tensor, vocabulary: int) -> None:
        """See `DeviceTrees`. An error is kept, and raised by `take`."""
        self._made = True
        try:
            self.grown.chooser.choose(self, TreeRows(tokens, positions, bits), vocabulary)
        except Exception as error:  # The caller runs the step, which must go on if the drafter fails.
            self._failure = error

    def take(self) -> Flags | None:
        """Wait for the device and return [trees, n] flags of the selected candidates.

        Return None if `choose` was not called. Raises the error that `choose` met.
        """
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
    """The inputs and outputs of the kernel `choose_rows`; holds one selection at a time."""

    def __init__(self, trees: int, candidates: int, levels: int, device: torch.device) -> None:
        """Allocate for selections of at most so many trees, candidates per tree and levels."""
        on_gpu = device.type == "cuda"
        self._shapes = (trees,), (levels,)
        self._numbers = torch.zeros(size_of(self._shapes), dtype=torch.int32, device=device)
        self._staging = Staging(len(self._numbers), device)
        self._ranks = self._numbers.new_zeros(trees * candidates)
        self._chosen = self._numbers.new_zeros(trees * (MAX_CHOSEN_NODES - 1))
        self._host = torch.empty(self._chosen.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._told = torch.cuda.Event() if on_gpu else None

    def warm_up(self, grown: GrownPool) -> None:
        """Compile the kernel for these candidates, so that no request waits for that."""
        told = self._numbers.new_zeros(2)
        rows = TreeRows(told, torch.zeros_like(told), told.new_zeros((2, 1)))
        self.choose(DeviceChoice((0,), 2, (0,), grown, np.zeros(1)), rows, 1)

    def choose(self, asked: DeviceChoice, rows: TreeRows, vocabulary: int) -> None:
        """Launch the selection, and the copy of its result to the host. See `choose_rows`."""
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
        """Wait for the last selection and return the candidates in it, int32 [trees, nodes], without roots.

        The result is a view of a buffer that the next selection overwrites.
        """
        if self._told:
            self._told.synchronize()
        return self._host[: trees * nodes].view(trees, nodes).numpy()


class JudgedTrees:
    """Sends a frame's trees to the device, so that the device can find out which nodes were accepted."""

    def __init__(self, room: int, trees: int, page_rows: int, device: torch.device) -> None:
        """Allocate the buffers.

        room: draft rows per tree that get a slot: accepted tokens, and the rows of the tree that grows next.
        trees: most trees of a frame.
        """
        self.room = room
        self._most = trees
        self._page_rows = page_rows
        size = 2 * MAX_JUDGED_ROWS + trees * (3 + room) + 4 * ALIGNED
        self._numbers = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = Staging(size, device)
        # Target tokens of the made-up tree of the warm-up.
        self.targets = self._numbers.new_zeros(1)

    def send(self, trees: Sequence[VerifiedTree], targets: Tensor) -> VerifiedTrees | None:
        """Send the trees with which a frame begins, in this order. Return None if there are too many.

        targets: int32, at least one per node of the frame: the base model's token after the node.
        """
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
        # The slots of `room` draft rows per tree, [trees, room], from the committed tokens on. `every` has
        # the pages of all trees, `firsts` where each tree's pages begin in it. A row at column c lies in the
        # page c // size, and its slot is page * size + c % size = (page - c // size) * size + c.
        # size 4, pages [7 2 5], 6 committed tokens, room 3 -> columns [6 7 8] -> slots [10 11 20]
        held = np.array([len(pages) for _, pages in trees], np.int32)
        every = np.fromiter(chain.from_iterable(pages for _, pages in trees), np.int32, int(held.sum()))
        columns = parts[2][:, 2:] + np.arange(self.room, dtype=np.int32)
        place = columns // np.int32(size)
        firsts = (held.cumsum(dtype=np.int32) - held)[:, None]
        parts.append((every[place + firsts] - place) * np.int32(size) + columns)
        self._staging.send(parts, self._numbers)
        shapes = (len(tokens),), (len(tokens),), (len(trees), 3), (len(trees), self.room)
        return VerifiedTrees(targets, *views(self._numbers[: size_of(shapes)], shapes))
