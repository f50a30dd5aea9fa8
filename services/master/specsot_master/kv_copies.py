"""Keeps a copy of every stage's KV at another stage while a ring runs, so that a repair need not compute the
KV of a lost stage again.

The master orders the copies, and the workers send each other the rows. A row is what a stage stores for one
token of a sequence in one layer; a sequence of 100 tokens with 60 final ones has rows 0..59 to copy. For
example, while sequence 5 grows in a ring of the stages a, b and c:

    final tokens   order                  confirmed by   copied
    100            1: rows 0..99          a, b           0
    104            (order 1 is awaited)   a, b, c        100
    106            (fewer than 8 new)                    100
    110            2: rows 100..109       a, b, c        110
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from specsot.members import HandOver, Registration, RowsOf, Stage
from specsot_master.core.ring.placement import Stages
from specsot_master.members import MemberTable

# Tokens, over all sequences. Copies may lag behind by this many, because each order costs a message for every
# layer; a repair computes them in one frame with the tokens that are not final. Untuned.
MIN_NEW_TOKENS: Final = 8
# Seconds after which an order that was not confirmed is given up, and everything is copied again. Precedent:
# ROUND_SECONDS of a migration.
COPY_SECONDS: Final = 60.0


def copying_stages(stages: Stages) -> Stages:
    """Return which worker keeps the copies of which layers, in the order of the stages: every stage keeps
    those of the stage after it, and the last one those of the first.

        # stages a 0:10, b 10:19, c 19:28 -> a 10:19, b 19:28, c 0:10

    stages: the stages of a ring, in order; at least two, since a single one would keep its own copies.
    """
    return tuple(replace(one, layers=other.layers) for one, other in zip(stages, (*stages[1:], stages[0])))


def share_one_cpu(workers: Sequence[Registration]) -> bool:
    """Return True if all workers are known to run on one machine, and none of them can use a GPU. Return
    False without workers, and if the host of a worker is unknown.

    workers: the registrations of all workers, those without a stage included.
    """
    return len({one.host for one in workers}) == 1 and all(one.host and not one.gpus for one in workers)


class KvCopies:
    """Orders the stages of a running ring to copy KV, one order at a time, each with the tokens that have
    become final since the order before.

    Call `advance` now and then, and `record_confirmation` for every confirmation of a worker. `rows_of` says
    what a repair can use.
    """

    def __init__(self, table: MemberTable, next_number: Callable[[], int]) -> None:
        """Start without copies.

        table: the members and their links.
        next_number: returns the number of the next order; orders of the same workers have different numbers.
        """
        self._table = table
        self._next_number = next_number
        self._epoch = 0
        # By sequence id: how many of its first tokens are known to be copied, in all layers.
        self._rows: dict[int, int] = {}
        # The sequences that the last order named: workers may hold copies of them.
        self._held = set[int]()
        # The order that was sent last. None if there is none, or if it was given up.
        self._order: HandOver | None = None
        # The names of the workers that have not confirmed the order.
        self._lacking: set[str] = set()
        # The event loop's time, in seconds, at which the order is given up.
        self._ends = 0.0

    def rows_of(self, epoch: int) -> Mapping[int, int]:
        """Return, by sequence id, how many of its first tokens are copied. Empty for another epoch than the
        one whose KV is being copied.

        epoch: number of the epoch.
        """
        return dict(self._rows) if epoch == self._epoch else {}

    def advance(self, epoch: int, stages: Stages, final_rows: Mapping[int, int], features: bool) -> None:
        """Order the next copies. Nothing happens while an order is being carried out, and while fewer than
        MIN_NEW_TOKENS tokens are new, unless copies of a sequence are to be dropped. In a new epoch, and
        after an order that was not confirmed within COPY_SECONDS, everything is copied anew.

        epoch: number of the running epoch.
        stages: its stages, at least two.
        final_rows: by sequence id, how many of its first tokens have final KV; sequences that are left out
            are not copied, and copies of them are dropped.
        features: True if the last stage stores features for a draft head, which are copied as well.
        """
        now = asyncio.get_running_loop().time()
        if epoch != self._epoch or (self._lacking and now >= self._ends):
            self._epoch = epoch
            self._rows = {}
            self._held = set()
            # A confirmation that comes after all must not count for workers that have sent none.
            self._order = None
            self._lacking.clear()
        rows = tuple(RowsOf(one, min(self._rows.get(one, 0), last), last) for one, last in final_rows.items())
        new = sum(one.last - one.first for one in rows)
        if self._lacking or (new < MIN_NEW_TOKENS and self._held <= final_rows.keys()):
            return
        self._held = set(final_rows)
        self._rows = {one: length for one, length in self._rows.items() if one in final_rows}
        takers = copying_stages(stages)
        self._order = HandOver(epoch, stages, takers, rows, self._next_number(), features, copies=True)
        self._lacking = {stage.name for stage in takers}
        self._ends = now + COPY_SECONDS
        self._table.send_all({stage.name: self._order for stage in stages})

    def record_confirmation(self, name: str, number: int, closed_sequences: Sequence[int]) -> bool:
        """Record that a worker has the copies of an order, and return True. Once all workers have them, the
        tokens of the order count as copied. Return False, and change nothing, for the confirmation of another
        order, such as one that was given up.

        name: the worker's name.
        number: the number of the order.
        closed_sequences: ids of sequences of which the worker got no copies, because the stage that has their
            KV had closed them already. They do not count as copied.
        """
        order = self._order
        if order is None or number != order.number:
            return False
        self._lacking.discard(name)
        closed = set(closed_sequences)
        self._order = replace(order, rows=tuple(one for one in order.rows if one.sequence not in closed))
        if not self._lacking:
            self._rows = {one.sequence: one.last for one in self._order.rows}
        return True


def givers_of_copies(stages: Stages, left: Stages) -> tuple[Stage, ...] | None:
    """Return the stages that were lost, in no particular order, each with the name of the worker that has
    copies of its rows. Return None if such a worker was lost as well, and () if no stage was lost.

        # stages a 0:10, b 10:19, c 19:28; b is lost -> a 10:19; a and b are lost -> None

    stages: the stages of the ring that broke, in order.
    left: those of them that are left.
    """
    remaining = {one.name for one in left}
    lost = {(one.layers.first, one.layers.last) for one in stages if one.name not in remaining}
    givers = tuple(one for one in copying_stages(stages) if (one.layers.first, one.layers.last) in lost)
    return givers if all(one.name in remaining for one in givers) else None
