"""Trees that grow on a GPU while the host has not read the verification result that they follow.

The device finds out by itself which tokens were accepted, and in which slots their draft rows and features
belong. The host sends everything else while the device computes the step. See the package for the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np

from specsot.core.frames import FeatureBatch
from specsot.core.overlap import OverlapEvent, OverlapState
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.core.selection import Candidates, Floats
from specsot_drafter.eagle_kv import DueRows, FollowedRows, FrameTrees
from specsot_drafter.overlap.device_selection import MAX_CHOSEN_NODES, DeviceChoice, GrownPool
from specsot_model.kv import Numbers, aligned, size_of

# Nodes. Maximum number of tree nodes of a frame that is verified on the device for asynchronous growth.
# Untuned.
MAX_VERIFIED_ROWS = 2048
# Entry of `DeviceGrowth.places` that stands for a sequence without a tree: no sequence has a row -1.
NOWHERE = (-1, -1)


@dataclass(slots=True)
class DeviceGrowth(AsyncGrowth):
    """Trees that a captured graph grows from what the device itself has accepted.

    places: By sequence id, the index of its tree in the frame, and the number of its first due row: the draft
            row that is fed the target token of the tree's root.
    due:    Maximum number of accepted tokens of a tree whose rows the device computes.
    read:   Waits for the device. Returns the candidates of all trees, and the acceptance that the device
            found, int32 [trees, 1 + due]: the number of tokens that continue the sequence, then these tokens.
    pool:   The candidates on the device from which it may select nodes. None: it cannot select.
    observed: Ids of the sequences whose feature batch of this step has arrived. A later batch of such a
            sequence belongs to another step, even if it begins at the same position.
    """

    places: Mapping[int, tuple[int, int]]
    due: int
    read: Callable[[], tuple[Candidates, Numbers]]
    pool: GrownPool | None = None
    observed: set[int] = field(default_factory=set[int], init=False)

    @classmethod
    def launched(
        cls,
        places: Mapping[int, tuple[int, int]],
        due: int,
        read: Callable[[], tuple[Candidates, Numbers]],
        pool: GrownPool | None = None,
    ) -> DeviceGrowth:
        """Return a growth whose graph was just launched.

        places: By sequence id, the index of its tree in the frame, and the number of its first due row.
        due: Maximum number of accepted tokens of a tree whose rows the device computes.
        read: Waits for the device, see the class docstring.
        pool: Where the device may select nodes from. None: it cannot.
        """
        return cls(frozenset(places), places, due, read, pool)

    def covers(self, feature_batch: FeatureBatch) -> bool:
        """Return whether the device has already stored the features of a batch. True at most once for each
        sequence. False if the sequence is mispredicted or unknown, if the batch does not begin with the
        sequence's first due row, or if it has more tokens than the device handles (`due`).

        feature_batch: Committed tokens of one sequence, by the host's verification result.

        The batch counts as the sequence's batch of this step from then on, whatever the result is. This
        method is called only for heads that read features, whose row numbers are token positions.
        """
        sequence = feature_batch.sequence
        if sequence in self.observed:
            return False
        self.observed.add(sequence)
        # An unknown sequence has the row of NOWHERE, at which no batch begins.
        row = self.places.get(sequence, NOWHERE)[1]
        return (
            row == feature_batch.start
            and len(feature_batch.tokens) <= self.due
            and sequence not in self.mispredicted
        )

    def take(self, sequences: Sequence[FollowedRows | None]) -> list[DueRows]:
        """Return the due rows of some sequences, and confirm the growth, if the device computes exactly these
        rows. Otherwise discard the growth, take no rows and return [].

        sequences: The sequences whose trees are requested. None stands for a sequence that is not followed.

        The device computes the due rows of a sequence if the sequence has a tree in this growth, if its next
        row is the tree's first due row, and if it has from 1 to `due` due rows. All sequences must meet these
        conditions, and the growth must have been neither discarded nor confirmed before.
        """
        max_due = self.due
        places = self.places
        counts = [
            due
            for one in sequences
            if one
            and 0 < (due := one.due) <= max_due
            and places.get(one.sequence.id, NOWHERE)[1] == one.extended
        ]
        if self.state is not OverlapState.LAUNCHED or len(counts) < len(sequences):
            self.discard()
            return []
        self.apply(OverlapEvent.MATCHED)
        return [one.take(asked=True, rows=due) for one, due in zip(sequences, counts) if one]

    def candidates_for(self, due: Sequence[DueRows]) -> Candidates | None:
        """Wait for the candidates, and return one row for each sequence, in the order of `due`. Return None,
        and discard the growth, if the device accepted other tokens than the host for any of them. The arrays
        may be views of a buffer that the next run of the same graph overwrites.

        due: The result of `take`: the rows of accepted tokens of each sequence, by the host's result.
        """
        places = [self.places[one.sequence][0] for one in due]
        offer, accepted = self.read()
        # `accepted` has a row [count, token, token, ...] per tree: [2, 7, 9, -, -] continues by 7 and 9.
        found = accepted.tolist()
        for place, one in zip(places, due):
            count = len(one.tokens)
            if found[place][0] != count or tuple(found[place][1 : 1 + count]) != one.tokens:
                self.discard()
                return None
        if places == [*range(len(offer))]:
            return offer
        return Candidates(offer.tokens[places], offer.scores[places], offer.parents[places], offer.depths)

    def choose(
        self, sequences: Sequence[int], nodes: int, max_levels: int, trust: Floats
    ) -> DeviceChoice | None:
        """Let the device select nodes of these trees, and return the selection. Return None if the device
        cannot select, if a sequence has no tree here, or if only roots would fit.

        sequences: Ids of the sequences, in the order of the trees in the next frame.
        nodes: Maximum number of nodes per tree, root included.
        max_levels: Maximum number of levels that every one of the sequences can have. The device does not
            check the depth, so it cannot select if the trees have more levels.
        trust: What is added to a candidate's score at each depth, [levels], see `ChoiceNumbers`.

        At most MAX_CHOSEN_NODES nodes per tree are selected, and at most as many as there are candidates and
        the root.
        """
        found = [self.places.get(one) for one in sequences]
        if self.pool is None or max_levels < self.pool.levels or None in found:
            return None
        nodes = min(nodes, self.pool.pool.tokens.shape[1] + 1, MAX_CHOSEN_NODES)
        places = tuple(place[0] for place in found if place)
        return DeviceChoice(tuple(sequences), nodes, places, self.pool, trust) if nodes > 1 else None


def verified_numbers_size(pages: int, trees: int) -> int:
    """Return how many int32 numbers of a buffer the arrays of `page_windows` and `verified_numbers` take at
    most, if each array begins at an aligned place.

    pages: Number of pages of a window, see `page_windows`.
    trees: Maximum number of trees of a frame.
    """
    return size_of(((trees, 1 + pages), (4, trees), (MAX_VERIFIED_ROWS,), (MAX_VERIFIED_ROWS,)))


def verified_numbers(trees: FrameTrees) -> Numbers | None:
    """Return what a device must know of the trees with which a frame begins, so that it can find out which
    nodes were accepted. Return None if the trees have more than MAX_VERIFIED_ROWS nodes together.

    trees: The trees in the order of the frame. At least one.

    The result is one int32 array with the last three fields of `VerifiedTrees`, one after the other: trees
    [4, num_trees], tokens [num_nodes] and parents [num_nodes]. Each begins at an aligned place, as `views`
    assumes. One array takes the host less time than three. The first field of `VerifiedTrees`, `windows`, is
    the result of `page_windows`.

        # trees [r a] and [s]: first rows 0 and 2, 2 and 1 nodes, first due rows 8 and 5, columns 8 and 5
        # -> [0 2 | 2 1 | 8 5 | 8 5] [r a s 0] [0 0 0]; the number after s is padding
    """
    grown = [segment.tree for segment in trees.segments]
    tokens = [tree.tokens for tree in grown]
    counts = [*map(len, tokens)]
    num_nodes = sum(counts)
    if num_nodes > MAX_VERIFIED_ROWS:
        return None
    first_nodes = accumulate(counts[:-1], initial=0)
    # `trees` needs no padding after it, because it has 4 numbers per tree, and ALIGNED is 4.
    padding = (0,) * (aligned(num_nodes) - num_nodes)
    parents = [tree.parents for tree in grown]
    numbers = chain(first_nodes, counts, trees.firsts, trees.columns, *tokens, padding, *parents)
    return np.fromiter(numbers, np.int32, 4 * len(counts) + aligned(num_nodes) + num_nodes)


def page_windows(
    starts: Sequence[int], pages: Sequence[tuple[int, ...]], num_pages: int, page_rows: int
) -> Numbers:
    """Return the pages by which a device finds the slots of a sequence's draft rows from a column on, int32
    [trees, 1 + num_pages]: the field `windows` of `VerifiedTrees`.

    starts: For each tree, the column at which the window begins, a multiple of page_rows.
    pages: The pages of each tree's sequence, from column 0 on.
    num_pages: Number of pages of a window. Windows of sequences that have fewer are padded with 0.
    page_rows: Number of KV slots of a page.

        # pages [7 2 5] of 4 rows, start 4, num_pages 3 -> [4 2 5 0]
    """
    padding = (0,) * num_pages
    windows = [
        (start, *own_pages[start // page_rows :], *padding)[: 1 + num_pages]
        for start, own_pages in zip(starts, pages)
    ]
    return np.fromiter(chain.from_iterable(windows), np.int32).reshape(len(windows), -1)
