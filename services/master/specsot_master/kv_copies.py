"""Keeps a copy of every stage's KV at another stage while a ring runs, so that a repair need not compute the
KV of a lost stage again.
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
    """Return which worker keeps the copies of which layers: every stage keeps those of the stage after it,
    and the last one those of the first.

        # stages a 0:10, b 10:19, c 19:28 -> a 10:19, b 19:28, c 0:10

    stages: the stages of a ring, in order.
    """
    return tuple(replace(one, layers=other.layers) for one, other in zip(stages, (*stages[1:], stages[0])))


def share_one_cpu(workers: Sequence[Registration]) -> bool:
    """Return True if all workers are known to run on one machine, and none of them can use a GPU.

    workers: the registrations of the workers of a ring.
    """
    return len({one.host for one in workers}) == 1 and all(one.host and not one.gpus for one in workers)


class KvCopies:
    """Orders the stages of a running ring to copy KV, one order at a time, each with the tokens that have
    become final since the order before.
    """

    def __init__(self, table: MemberTable, next_number: Callable[[], int]) -> None:
        """Start without copies.

        table: the members and their links.
        next_number: returns the number of the next order; orders of the same workers have different numbers.
        """
        self._table = table
        self._next_number = next_number
        self._epoch = 0
        # By sequence id: how many of its first tokens are known to be copied.
        self._rows: dict[int, int] = {}
        # The sequences that the last order named, of which workers may hold copies.
        self._held = set[int]()
        # The order that was sent last, and the names of the workers that have not confirmed it.
        self._order: HandOver | None = None
        self._lacking: set[str] = set()
        # The loop's time at which the order is given up.
        self._ends = 0.0

    def rows_of(self, epoch: int) -> Mapping[int, int]:
        """Return, by sequence id, how many of its first tokens are copied. Empty for another epoch than the
        one whose KV is being copied.

        epoch: number of the epoch.
        """
        return dict(self._rows) if epoch == self._epoch else {}

    def advance(self, epoch: int, stages: Stages, final_rows: Mapping[int, int], features: bool) -> None:
        """Order the next copies. Nothing happens while an order is being carried out, and while fewer than
        MIN_NEW_TOKENS tokens are new, unless copies of a sequence are to be dropped.

        epoch: number of the epoch, which runs.
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
        """Note that a worker has the copies of an order, and return True. Return False for the confirmation
        of another order.

        name: the worker's name.
        number: the number of the order.
        closed_sequences: ids of sequences of which it got no copies, because they were closed already.
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
    """Return the stages that were lost, each with the worker that has copies of its rows. None if such a
    worker was lost as well.

    stages: the stages of the ring that broke, in order.
    left: those of them that are left.
    """
    remaining = {one.name for one in left}
    lost = {(one.layers.first, one.layers.last) for one in stages if one.name not in remaining}
    givers = tuple(one for one in copying_stages(stages) if (one.layers.first, one.layers.last) in lost)
    return givers if all(one.name in remaining for one in givers) else None
