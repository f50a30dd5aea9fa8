"""The KV cache of an EAGLE head and the base model's features, stored in the same pages.

Features are stored when they arrive; the head's KV rows are computed from them when a tree is requested.

Draft row j pairs the feature of position j with the token at position j + 1. With n committed tokens there
are n features, and n draft rows once the next token is known:

    tokens    t0 t1 t2 | t3      3 committed tokens and the bonus token t3
    features  f0 f1 f2
    rows      (f0 t1) (f1 t2) (f2 t3)

A fork at n shares n - 1 draft rows with its source, because row n - 1 contains token n, which the fork does
not share. *True* features come from the base model; features of drafted tokens are the head's own outputs.
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
    """Consecutive draft rows of one sequence that are to be computed; row j is fed token j + 1.

    sequence: Id of the sequence.
    first:    Number of the first row.
    tokens:   Token of each row.
    asked:    Number of the last rows whose outputs are returned.
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
    """A sequence whose features are stored.

    sequence: What is known of the sequence.
    extended: Number of draft rows that were computed from true features.
    """

    sequence: DraftSequence
    extended: int = 0

    @property
    def id(self) -> int:
        return self.sequence.id

    @property
    def length(self) -> int:
        """Return the number of known features; they belong to the positions 0 .. length - 1."""
        return self.sequence.committed

    @property
    def due(self) -> int:
        """Return the number of rows that could be computed and are not computed yet.

        A row needs its feature and the token after it, so with n tokens there are at most n - 1 rows.
        """
        sequence = self.sequence
        known = sequence.committed
        told = len(sequence.tokens) - 1
        due = (known if known < told else told) - self.extended
        return due if due > 0 else 0

    def take(self, asked: bool, rows: int | None = None) -> DueRows:
        """Return the due rows, and count them as extended.

        With tokens t0 .. t4, 4 committed and extended 2, the rows 2 and 3 are due, with the tokens t3 and t4.

        asked: True if the output of the last row is needed. If no row is due, the last row is taken again.
        rows: take only the first `rows` due rows; None: all of them.
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
    """The pages of all sequences: draft row j and feature j of a sequence have the same slot.

    table: Assigns pages to sequences.
    kv: Keys and values of the draft rows.
    features: [pages * page_rows, hidden]; [pages * page_rows, 0] for a head that uses no features.
    """

    def __init__(self, head: DraftHead, pages: int, page_rows: int) -> None:
        self.table = PageTable(pages, page_rows)
        self.kv = head.make_kv(pages, page_rows)
        width = head.hidden if head.taps else 0
        self.features = untouched_zeros((pages * page_rows, width), head.dtype, head.device)

    def share(self, sequence: int, source: int, rows: int) -> None:
        """Open a sequence that shares the first `rows` rows of another one.

        Whole pages are shared, the rows of a last partial page are copied, features included: with page_rows
        4 and 6 rows, the first page is shared, and rows 4 and 5 are copied to a new page.
        Raises NotFound if the source does not have these rows, and Overloaded if no page is free.
        """
        copy = self.table.fork(sequence, source, rows)
        if copy is not None:
            self.kv.copy_page(copy.source, copy.target, copy.rows)
            to = copy.target * self.table.page_rows
            origin = copy.source * self.table.page_rows
            self.features[to : to + copy.rows] = self.features[origin : origin + copy.rows]

    def fork(self, sequence: int, source: int, length: int) -> None:
        """Open a sequence that forks another one after `length` tokens.

        The first length - 1 rows are shared. The feature of row length - 1 is copied, but not its KV: the row
        pairs with a token that the source does not have, and is computed again.
        Raises NotFound if the source does not have these rows, and Overloaded if no page is free.
        """
        self.share(sequence, source, length - 1)
        self.table.reserve(sequence, length)
        origin, own = (self.table.slots(owner, length - 1, length)[0] for owner in (source, sequence))
        self.features[own] = self.features[origin]

    def reserve_tree(self, sequence: int, base: int, rows: int) -> TreeRoom | None:
        """Reserve `rows` rows after the first `base` rows. Return None if no page is free."""
        return reserve_room(self.table, sequence, base, rows)

    def cover_tree(self, sequence: int, base: int, rows: int) -> tuple[int, ...] | None:
        """Reserve like `reserve_tree`, and return only the pages; for a sequence without a KV policy."""
        try:
            return self.table.reserve_pages(sequence, base + rows)
        except Overloaded:
            return None

    def trim(self, sequence: int, row: int) -> None:
        """Free the pages that a window hides from all rows from `row` on.

        There is no mask for a window here: a row attends to everything that is left in the pages.
        """
        self._wipe(self.table.trim(sequence, row))

    def close(self, sequence: int) -> None:
        """Give a sequence's pages back."""
        self._wipe(self.table.close(sequence))

    def _wipe(self, pages: Sequence[int]) -> None:
        """Clear freed pages, so that NaN rows of one sequence never reach the attention of another one."""
        for page in pages:
            self.kv.clear_page(page)

    def store_features(self, slots: Sequence[int], features: Tensor) -> None:
        """Store true features, [rows, hidden], in the given slots, one per row."""
        self.features[indices(slots, self.features.device)] = features.to(self.features.dtype)


def compute_rows(head: DraftHead, pages: DraftPages, due: Sequence[DueRows]) -> Tensor:
    """Compute the KV of all due rows, and return the outputs of the asked rows, [asked, hidden].

    The outputs are ordered as `due`. In a head with one layer, only the asked rows take part in attention:
    the KV of a row depends on the row's inputs alone. With several layers, every row attends, because each
    layer reads all rows of the layer before.
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
    """Return the indices of the asked rows among all due rows.

    Due rows [a0 a1 | b0 b1 b2] with asked 1 and 2 -> [1, 3, 4], that is a1, b1 and b2.
    """
    rows: list[int] = []
    stop = 0
    for stretch in due:
        stop += len(stretch.tokens)
        rows += range(stop - stretch.asked, stop)
    return rows


def _span_of(pages: DraftPages, due: DueRows, first: int) -> RowSpan:
    """Return the due rows from row `first` on as query rows, each of which attends to all rows before it."""
    rows = due.stop - first
    table = pages.table
    column = table.column(due.sequence, first)
    return RowSpan(rows, column, rows, table.pages(due.sequence)[: table.pages_for(column + rows)])


def _plan(head: DraftHead, pages: DraftPages, spans: Sequence[RowSpan]) -> AttentionPlan | None:
    if not spans:
        return None
    return head.plan(spans, pages.kv.page_rows)
