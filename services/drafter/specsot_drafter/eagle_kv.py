"""An EAGLE head's KV and the base's true features, in the same pages: stored as they come, computed when due.

Draft row j pairs the feature of position j with the token at j + 1. So with n committed tokens there are n
features, and n rows once the token behind them is known; a fork at n shares n - 1 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specsot.core.pages import PageTable
from specsot.errors import Overloaded
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.growth import TreeRoom, reserve_room
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_model.attention import AttentionPlan, RowSpan
from specsot_model.kv import indices, untouched_zeros


class DueRows(NamedTuple):
    """Rows first .. first + len(tokens) - 1 of one sequence; row j is fed token j + 1.

    asked: of how many of its last rows the output is wanted.
    """

    sequence: int
    first: int
    tokens: tuple[int, ...]
    asked: int

    @property
    def stop(self) -> int:
        return self.first + len(self.tokens)


@dataclass(slots=True)
class FollowedSequence:
    """extended: draft rows computed from true features."""

    sequence: DraftSequence
    extended: int = 0

    @property
    def id(self) -> int:
        return self.sequence.id

    @property
    def length(self) -> int:
        """Features known, of positions 0 .. length - 1."""
        return self.sequence.committed

    @property
    def due(self) -> int:
        """Rows that could be computed and are not yet."""
        sequence = self.sequence
        known = sequence.committed
        told = len(sequence.tokens) - 1
        due = (known if known < told else told) - self.extended
        return due if due > 0 else 0

    def take(self, asked: bool, rows: int | None = None) -> DueRows:
        """The next rows to compute (all, or the first `rows`), which now count as extended; where the output
        is asked for, at least the last row again.
        """
        sequence = self.sequence
        due = self.due
        if asked and not due and sequence.root is not None:
            self.extended -= 1
            due = self.due
        first = self.extended
        self.extended = stop = first + (due if rows is None else rows)
        return DueRows(sequence.id, first, tuple(sequence.tokens[first + 1 : stop + 1]), asked)


class DraftPages:
    """Draft row j of a sequence lives in slot j of its pages; feature j lives in the same slot.

    features: [slots, hidden]; no columns where a head wants none.
    """

    def __init__(self, head: DraftHead, pages: int, page_rows: int) -> None:
        self.table = PageTable(pages, page_rows)
        self.kv = head.make_kv(pages, page_rows)
        width = head.hidden if head.taps else 0
        self.features = untouched_zeros((pages * page_rows, width), head.dtype, head.device)

    def share(self, sequence: int, source: int, rows: int) -> None:
        """Open a sequence with the first rows of another. Raises NotFound, Overloaded."""
        copy = self.table.fork(sequence, source, rows)
        if copy is not None:
            self.kv.copy_page(copy.source, copy.target, copy.rows)
            to = copy.target * self.table.page_rows
            origin = copy.source * self.table.page_rows
            self.features[to : to + copy.rows] = self.features[origin : origin + copy.rows]

    def fork(self, sequence: int, source: int, length: int) -> None:
        """Share the first `length - 1` rows, and copy the feature of the row after them.

        That row pairs with a token the source does not have. Raises NotFound, Overloaded.
        """
        self.share(sequence, source, length - 1)
        self.table.reserve(sequence, length)
        origin, own = (self.table.slots(owner, length - 1, length)[0] for owner in (source, sequence))
        self.features[own] = self.features[origin]

    def reserve_tree(self, sequence: int, base: int, rows: int) -> TreeRoom | None:
        """Room for `rows` grown rows behind the first `base` ones, or None where there is none."""
        return reserve_room(self.table, sequence, base, rows)

    def cover_tree(self, sequence: int, base: int, rows: int) -> tuple[int, ...] | None:
        """The same of a sequence without a policy; its pages alone."""
        try:
            return self.table.cover(sequence, base + rows)
        except Overloaded:
            return None

    def trim(self, sequence: int, row: int) -> None:
        """Give back what a window hides from all rows from `row` on. Here a row sees all that is left."""
        self._wipe(self.table.trim(sequence, row))

    def close(self, sequence: int) -> None:
        """Give a sequence's pages back."""
        self._wipe(self.table.close(sequence))

    def _wipe(self, pages: Sequence[int]) -> None:
        """Rows that are not numbers must not reach another sequence."""
        for page in pages:
            self.kv.clear_page(page)

    def store_features(self, slots: Sequence[int], features: Tensor) -> None:
        """Store [rows, hidden] true features at so many slots."""
        self.features[indices(slots, self.features.device)] = features.to(self.features.dtype)


def compute_rows(head: DraftHead, pages: DraftPages, due: Sequence[DueRows]) -> Tensor:
    """Write the KV of all rows; returns [asked, hidden], outputs of the asked rows.

    Where a head has several layers, each reads every row of the one before: then all rows are asked for.
    """
    fed = [token for stretch in due for token in stretch.tokens]
    at = [row for s in due for row in range(s.first, s.stop)]
    slots, tokens, positions = indices((_slots(pages, due), fed, at), head.device)
    asked = indices(_asked_rows(due), head.device)
    features = pages.features[slots]
    if head.layers > 1:
        plan = _plan(head, pages, [_span_of(pages, stretch, stretch.first) for stretch in due])
        return head.forward(tokens, features, HeadRows(positions, slots, plan, pages.kv))[asked]
    plan = _plan(head, pages, [_span_of(pages, s, s.stop - s.asked) for s in due if s.asked])
    return head.forward(tokens, features, HeadRows(positions, slots, plan, pages.kv, asked))


def _slots(pages: DraftPages, due: Sequence[DueRows]) -> list[int]:
    table = pages.table
    return [slot for s in due for slot in table.slots(s.sequence, s.first, s.stop)]


def _asked_rows(due: Sequence[DueRows]) -> list[int]:
    rows: list[int] = []
    stop = 0
    for stretch in due:
        stop += len(stretch.tokens)
        rows += range(stop - stretch.asked, stop)
    return rows


def _span_of(pages: DraftPages, due: DueRows, first: int) -> RowSpan:
    """A stretch's rows from `first` on as query rows; each sees all rows before it."""
    rows = due.stop - first
    table = pages.table
    column = table.column(due.sequence, first)
    return RowSpan(rows, column, rows, table.pages(due.sequence)[: table.pages_for(column + rows)])


def _plan(head: DraftHead, pages: DraftPages, spans: Sequence[RowSpan]) -> AttentionPlan | None:
    if not spans:
        return None
    return head.plan(spans, pages.kv.page_rows)
