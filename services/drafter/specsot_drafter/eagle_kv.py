"""The KV cache of an EAGLE head and the base model's features, stored in the same pages.

A small language model uses the same pages without features: its draft row j is fed token j. The rest of this
text is about heads that read features.

Features are stored when they arrive; the head's KV rows are computed from them when a tree is requested.

Draft row j pairs the feature of position j with the token at position j + 1. With n committed tokens there
are n features, and n draft rows once the next token is known:

    tokens    t0 t1 t2 | t3      3 committed tokens and the bonus token t3
    features  f0 f1 f2
    rows      (f0 t1) (f1 t2) (f2 t3)

Features may be missing, because they were overwritten during a long pause of drafting or were lost. The rows
of these positions are skipped: they have no slots, and later rows attend to the rows before them and after
them, at their true positions.

A fork at n shares n - 1 draft rows with its source, because row n - 1 contains token n, which the fork does
not share. *True* features come from the base model; features of drafted tokens are the head's own outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsot.core.frames import TreeSegment
from specsot.core.pages import PageCopy, PageTable
from specsot.errors import Overloaded, WireError
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.growth import TreeRoom, reserve_room
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_model.attention import AttentionPlan, RowSpan
from specsot_model.kv import indices, untouched_zeros
from specsot_model.step_rows import StepRows


class DueRows(NamedTuple):
    """Consecutive draft rows of one sequence that are to be computed. Row j of a head with features is fed
    token j + 1, that of a language model token j.

    sequence: Id of the sequence.
    first:    Number of the first row.
    tokens:   Token id that each row is fed. Empty: no row is due.
    asked:    How many of the last rows have their outputs returned; 0 if only their KV is needed.
    """

    sequence: int
    first: int
    tokens: tuple[int, ...]
    asked: int

    @property
    def stop(self) -> int:
        """Number of the row after the last one."""
        return self.first + len(self.tokens)


class FollowedRows(Protocol):
    """What a proposer knows of the draft rows of one sequence that it follows. An EAGLE head has a
    `FollowedSequence`, and a language model `FedTokens`.
    """

    @property
    def sequence(self) -> DraftSequence:
        """What the drafter knows of the sequence."""
        ...

    @property
    def extended(self) -> int:
        """The number of draft rows, from the first, that were computed or skipped."""
        ...

    @property
    def due(self) -> int:
        """The number of draft rows that could be computed and are not computed yet."""
        ...

    def take(self, asked: bool, rows: int | None = None) -> DueRows:
        """Return the due rows, and count them as computed (`extended`). If no row is due, and no output is
        asked for, the result has no rows.

        asked: True if the output of the last row is needed. If no row is due, the last row is then computed
            again.
        rows: Number of due rows to return, from the first one on; at most `due`. None: all of them.
        """
        ...


class FrameTrees(NamedTuple):
    """The trees at the beginning of a frame that is being verified, and where the draft rows lie that are
    computed after the verification. Each field has one entry per tree, in the order of the frame.

    segments: The trees, as the frame has them.
    firsts: Number of each sequence's first row that is due once its tree is verified: the row that is fed the
        root's target token.
    columns: Column of that row in the sequence's pages. It is less than the row's number if rows before it
        were skipped.
    pages: Page numbers of each sequence, in order, at least up to the page of the last reserved row. If the
        pages of the previous step suffice for every sequence, they are returned again.

    Example: page_rows 4, a sequence of 6 rows in the pages [7, 2], and 4 rows reserved from row 6 on:

        # firsts [6], columns [6], pages [(7, 2, p)] with a new page p
    """

    segments: Sequence[TreeSegment]
    firsts: Sequence[int]
    columns: Sequence[int]
    pages: Sequence[tuple[int, ...]]


@dataclass(slots=True)
class FollowedSequence:
    """A sequence whose features are stored.

    sequence: What the drafter knows of the sequence: its tokens and how many of them are committed.
    extended: Number of draft rows, from the first, that were computed from true features or skipped.
    skipped: The last skipped row lies before this row. 0 if no row was skipped.
    """

    sequence: DraftSequence
    extended: int = 0
    skipped: int = 0

    @property
    def id(self) -> int:
        """Id of the sequence."""
        return self.sequence.id

    @property
    def length(self) -> int:
        """The number of known and skipped features; they belong to the positions 0 .. length - 1."""
        return self.sequence.committed

    @property
    def due(self) -> int:
        """The number of draft rows that could be computed and are not computed yet. A row needs its feature
        and the token after it, so with n tokens there are at most n - 1 rows.
        """
        sequence = self.sequence
        num_features = sequence.committed
        num_known = len(sequence.tokens) - 1
        due = (num_features if num_features < num_known else num_known) - self.extended
        return due if due > 0 else 0

    def take(self, asked: bool, rows: int | None = None) -> DueRows:
        """Return the due rows, and count them as extended. If no row is due, and no output is asked for, the
        result has no rows.

        With tokens t0 .. t4, 4 committed and extended 2, the rows 2 and 3 are due, with the tokens t3 and t4.

        asked: True if the output of the last row is needed. If no row is due, the last row is then computed
            again, provided that the token after the committed ones is known. Otherwise the result has no
            rows.
        rows: Number of due rows to return, from the first one on. None: all of them.
        """
        sequence = self.sequence
        if rows is None:
            rows = self.due
        if asked and not rows and sequence.root is not None:
            self.extended -= 1
            rows = self.due
        first = self.extended
        self.extended = stop = first + rows
        return DueRows(sequence.id, first, tuple(sequence.tokens[first + 1 : stop + 1]), asked)


class DraftPages:
    """The pages of all sequences: draft row j and feature j of a sequence have the same slot.

    table: Assigns pages to sequences.
    kv: Keys and values of the draft rows.
    features: The base model's features by slot, [pages * page_rows, hidden]; [pages * page_rows, 0] if no
        features are stored.
    """

    def __init__(self, head: DraftHead, pages: int, page_rows: int, features: bool = True) -> None:
        """Allocate the pages.

        head: The draft head.
        pages: Number of pages.
        page_rows: Number of slots of a page.
        features: False if the features are not stored, though the head uses them.

        The pages are empty, and no sequence is open.
        """
        self.table = PageTable(pages, page_rows)
        self.kv = head.make_kv(pages, page_rows)
        width = head.hidden if head.taps and features else 0
        self.features = untouched_zeros((pages * page_rows, width), head.dtype, head.device)

    def share(self, sequence: int, source: int, rows: int) -> None:
        """Open a sequence that shares rows with another one.

        sequence: Id of the new sequence.
        source: Id of the other one.
        rows: Number of rows that are shared, from the first.

        Whole pages are shared, the rows of a last partial page are copied, features included: with page_rows
        4 and 6 rows, the first page is shared, and rows 4 and 5 are copied to a new page. Raises NotFound if
        the source does not have these rows, and Overloaded if no page is free.

        The new sequence then has `rows` rows.
        """
        if copy := self._share_kv(sequence, source, rows):
            page_rows = self.table.page_rows
            self._copy_features(copy.source * page_rows, copy.target * page_rows, copy.rows)

    def _share_kv(self, sequence: int, source: int, rows: int) -> PageCopy | None:
        """Open a sequence that shares the KV of rows with another one, but not the features of a last partial
        page. Return the page that was copied. Return None if only whole pages are shared.

        sequence: Id of the new sequence.
        source: Id of the other one.
        rows: Number of rows that are shared, from the first.

        Raises what `share` raises.
        """
        copy = self.table.fork(sequence, source, rows)
        if copy is not None:
            self.kv.copy_page(copy.source, copy.target, copy.rows)
        return copy

    def _copy_features(self, source: int, target: int, rows: int) -> None:
        """Copy the features of adjacent slots.

        source: The first slot that is read.
        target: The first slot that is written.
        rows: Number of slots.
        """
        self.features[target : target + rows] = self.features[source : source + rows]

    def fork(self, sequence: int, source: int, length: int) -> None:
        """Open a sequence that forks another one.

        sequence: Id of the new sequence.
        source: Id of the other one.
        length: Number of tokens that both have in common.

        The first length - 1 rows are shared. The feature of row length - 1 is copied, but not its KV: the row
        pairs with a token that the source does not have, and is computed again. Raises NotFound if the source
        does not have these rows, and Overloaded if no page is free.
        """
        table = self.table
        copy = self._share_kv(sequence, source, length - 1)
        table.reserve(sequence, length)
        if copy:
            # The feature of row length - 1 follows those of the partial page.
            page_rows = table.page_rows
            self._copy_features(copy.source * page_rows, copy.target * page_rows, copy.rows + 1)
        else:
            origin, own = (table.slots(owner, length - 1, length)[0] for owner in (source, sequence))
            self._copy_features(origin, own, 1)

    def reserve_tree(self, sequence: int, base: int, rows: int) -> TreeRoom | None:
        """Reserve rows for growing a tree, and return where they are. Return None if there are too few free
        pages.

        sequence: Id of the sequence.
        base: Number of rows that the sequence has.
        rows: Number of rows to reserve after them.
        """
        return reserve_room(self.table, sequence, base, rows)

    def cover_trees(self, trees: Sequence[TreeSegment], rows: int, shift: int) -> FrameTrees | None:
        """Reserve the rows that are computed after these trees are verified: the due rows of accepted tokens,
        then those of the next tree. Return where the rows of each sequence lie. Return None if there are too
        few free pages, or if a sequence has a KV policy (a window), because some of its pages may have been
        freed.

        trees: The trees that are being verified, of open sequences. At least one.
        rows: Number of rows to reserve per sequence, from its first due row on.
        shift: Number of the first due row, which is fed the root's target token, minus the root's position;
            see `TreeProposer.first_due`.

        If some sequence needs another page while at least half of all pages are free, every sequence gets a
        page more than it needs, so that the pages of all sequences stay the same for many steps: page tables
        and windows, which depend on them, are then computed seldom. If there are too few free pages, even for
        the additional ones, sequences before the one that gets none keep what was reserved.
        """
        table = self.table
        sequences = [one.sequence for one in trees]
        firsts = [one.committed + shift for one in trees]
        if table.has_policies and any(map(table.policy, sequences)):
            return None
        page_rows = table.page_rows
        columns, pages = table.covered(sequences, firsts)
        # A list takes less time here than a generator, which `any` would need.
        if [own for column, own in zip(columns, pages) if len(own) * page_rows < column + rows]:
            reserved = rows + page_rows if 2 * table.free >= table.count else rows
            try:
                for sequence, first, column, own in zip(sequences, firsts, columns, pages):
                    if len(own) * page_rows < column + reserved:
                        table.cover(sequence, first, first + reserved)
            except Overloaded:
                return None
            columns, pages = table.covered(sequences, firsts)
        return FrameTrees(trees, firsts, columns, pages)

    def trim(self, sequence: int, first_row: int) -> None:
        """Free the pages that a window hides from all further rows. There is no mask for a window here: a row
        attends to everything that is left in the pages. Nothing happens for a sequence without a window.

        sequence: Id of the sequence, which must be open.
        first_row: Number of the first row that is still to be computed.
        """
        self._clear_pages(self.table.trim(sequence, first_row))

    def close(self, sequence: int) -> None:
        """Free a sequence's pages. An unknown sequence is ignored.

        sequence: Id of the sequence.
        """
        self._clear_pages(self.table.close(sequence))

    def _clear_pages(self, pages: Sequence[int]) -> None:
        """Clear freed pages, so that NaN rows of one sequence never reach the attention of another one.

        pages: Numbers of the pages.
        """
        if pages:
            self.kv.clear_pages(pages)

    def store_features(self, slots: Sequence[int], features: Tensor) -> None:
        """Store true features.

        slots: The slot of each feature.
        features: [len(slots), hidden].
        """
        self.features[indices(slots, self.features.device)] = features.to(self.features.dtype)


class UngatheredRows(Protocol):
    """Fused rows of a message from the last stage on the same thread, which stand for a tensor. They are some
    rows of a larger tensor, and are gathered only if they are asked for.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the tensor: (num_fused, width)."""
        ...

    def to(self, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return all rows as a tensor.

        device: Device of the result.
        dtype: Type of the result.
        """
        ...

    def rows_at(self, places: Sequence[int]) -> Tensor:
        """Return some of the rows, [len(places), width].

        places: Their indices.
        """
        ...


def read_features(
    head: DraftHead, fused: Tensor | UngatheredRows | None, num_fused: int, rows: Sequence[int]
) -> Tensor:
    """Convert fused rows of a message to features, [len(rows), hidden], on the head's device and in its type.

    head: The draft head.
    fused: The fused rows of the message, [num_fused, head.width]. None counts as another shape.
    num_fused: Number of tokens of the message's batches.
    rows: Indices of the fused rows that are used; the others are ignored.

    Raises WireError if `fused` has another shape.
    """
    shape = None if fused is None else tuple(fused.shape)
    if fused is None or shape != (num_fused, head.width):
        raise WireError(f"features have shape {shape}, their feature batches need {(num_fused, head.width)}")
    chosen = fused
    if len(rows) < num_fused:
        is_tensor = isinstance(fused, Tensor)
        chosen = fused[indices(rows, fused.device)] if is_tensor else fused.rows_at(rows)
    return head.features(chosen.to(device=head.device, dtype=head.dtype))


def compute_rows(head: DraftHead, pages: DraftPages, due: Sequence[DueRows]) -> Tensor:
    """Compute the KV of due rows, and return the outputs of the asked rows, [num_asked, hidden], in the order
    of `due`. If no row's output is asked for, the result has 0 rows.

    head: The draft head.
    pages: Its KV pages and features.
    due: The rows to compute, of one or more sequences. They have at least one row together.

    In most heads with one layer, only the asked rows take part in attention: the KV of a row depends on the
    row's inputs alone. In the other heads, every row attends (`DraftHead.asks_alone`).

    The rows must have slots already.
    """
    slots, tokens, positions = indices(_row_inputs(pages, due), head.device)
    asked_rows = _asked_rows(due)
    # Rows of prompts are mostly computed for their KV alone: then no plan and no outputs are needed.
    if not asked_rows and head.asks_alone:
        head.store(tokens, pages.features, HeadRows(positions, slots, None, pages.kv, slots[:0]))
        return pages.features[:0]
    asked = indices(asked_rows, head.device)
    features = pages.features[slots]
    if not head.asks_alone:
        plan = _plan(head, pages, [_span_of(pages, rows_due, rows_due.first) for rows_due in due])
        return head.forward(tokens, features, HeadRows(positions, slots, plan, pages.kv))[asked]
    plan = _plan(head, pages, [_span_of(pages, s, s.stop - s.asked) for s in due if s.asked])
    return head.forward(tokens, features, HeadRows(positions, slots, plan, pages.kv, asked))


def step_rows(pages: DraftPages, due: Sequence[DueRows]) -> StepRows:
    """Return due rows as a frame for the captured graphs of a language model (`CapturedSteps`). Every row is
    fed its token at its position, and attends to itself and to all rows of its sequence before it.

    pages: The KV pages of the model. The rows must have slots already.
    due: The rows to compute, of one or more sequences. Which of them are asked for is ignored.
    """
    slots, tokens, positions = _row_inputs(pages, due).tolist()
    spans = [_span_of(pages, rows_due, rows_due.first) for rows_due in due]
    return StepRows(tokens, positions, slots, spans)


def _row_inputs(pages: DraftPages, due: Sequence[DueRows]) -> NDArray[np.int64]:
    """Return the KV slots, the tokens and the positions of due rows, in order, [3, rows]: one array, which is
    copied to the device at once.

    pages: The KV pages of the head.
    due: The rows to compute.
    """
    slots = [pages.table.slots(one.sequence, one.first, one.stop) for one in due]
    tokens = [one.tokens for one in due]
    positions = [range(one.first, one.stop) for one in due]
    numbers = chain.from_iterable((*slots, *tokens, *positions))
    return np.fromiter(numbers, np.int64).reshape(3, -1)


def _asked_rows(due: Sequence[DueRows]) -> list[int]:
    """Return the indices of the asked rows among all due rows; [] if none is asked.

    due: The rows to compute.

    For example:

        # due rows [a0 a1 | b0 b1 b2] with asked 1 and 2 -> [1, 3, 4], that is a1, b1 and b2
    """
    rows: list[int] = []
    stop = 0
    for rows_due in due:
        stop += len(rows_due.tokens)
        rows += range(stop - rows_due.asked, stop)
    return rows


def _span_of(pages: DraftPages, due: DueRows, first: int) -> RowSpan:
    """Return due rows of one sequence as query rows, each of which attends to all rows before it.

    pages: The KV pages of the head.
    due: The due rows of the sequence.
    first: Number of the first row that is a query.
    """
    rows = due.stop - first
    table = pages.table
    column = table.column(due.sequence, first)
    return RowSpan(rows, column, rows, table.pages(due.sequence)[: table.pages_for(column + rows)])


def _plan(head: DraftHead, pages: DraftPages, spans: Sequence[RowSpan]) -> AttentionPlan | None:
    """Return the attention plan of query rows. Return None if there are none.

    head: The draft head.
    pages: Its KV pages.
    spans: The query rows of each sequence.
    """
    if not spans:
        return None
    return head.plan(spans, pages.kv.page_rows)
