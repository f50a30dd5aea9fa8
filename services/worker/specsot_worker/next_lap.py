"""A stage's next lap, begun before its frame comes.

Of plain laps, where each sequence of a frame writes one token, all but the tokens is known while a device
computes the lap before: the next one is arranged then, with a row for each, though some may end: what is
computed for those is left out. With drafts it is arranged while those grow, once the lap before is judged:
but for their tokens, if trees have the shapes that they had. Either is launched as soon as its tokens are
there; or at once, where a device chooses trees of a known size by itself. It is a guess: a table keeps
nothing of it, nothing is sent because of it, and what a device wrote is written over, unless exactly that
frame comes. Only pages that a window hides from then on are given back for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from specsot.core.frames import Frame, Segment, TreeSegment
from specsot.core.pages import PageTable
from specsot.core.tree import Tree, chain, single
from specsot.core.verdict import UnreadTrees
from specsot.params import Window
from specsot_model.core.kv_plan import plan_frame
from specsot_model.kv import KVPages, indices
from specsot_model.lap_rows import FilledLap, LapRows, Outputs


class Laps(Protocol):
    """What runs frames for a range; see `CapturedLaps`."""

    def run(self, rows: LapRows) -> Outputs | None: ...

    def fill(self, rows: LapRows) -> FilledLap | None: ...

    def launch(self, filled: FilledLap, entry: Sequence[int] | Tensor) -> Outputs: ...

    @property
    def takes_unread(self) -> bool: ...

    def launch_unread(self, filled: FilledLap, roots: Sequence[int], trees: UnreadTrees) -> Outputs: ...


@dataclass(slots=True)
class GuessedLap:
    """A frame to come, its trees' tokens left open until it is launched.

    trees: of the segments, whatever those say. arranged: as far as that can be. reserved: sequences with
    pages that they took for it. filled: None, too, where there is no room for it. outputs: of the lap, once
    it is launched.
    """

    segments: Sequence[TreeSegment]
    trees: Sequence[Tree]
    arranged: bool = False
    reserved: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    filled: FilledLap | None = None
    tokens: list[int] = field(default_factory=list[int])
    outputs: Outputs | None = None

    @property
    def hidden(self) -> bool:
        """Whether a window hides something from its rows."""
        return self.filled is not None and any(span.sight for span in self.filled.rows.spans)

    @property
    def rows(self) -> int:
        return sum(len(tree.tokens) for tree in self.trees)

    def leave_out(self, closed: Sequence[int]) -> None:
        """These are over since it was launched, with tokens that are known: nobody asks for their rows."""
        assert self.outputs is not None
        firsts = accumulate(map(len, self.trees), initial=0)
        every = zip(self.segments, self.trees, firsts)
        left = [each for each in every if each[0].sequence not in closed]
        if len(left) < len(self.segments):
            rows = [row for _, tree, first in left for row in range(first, first + len(tree))]
            self.segments = [one for one, _, _ in left]
            self.trees = [tree for _, tree, _ in left]
            self.tokens = [self.tokens[row] for row in rows]
            hidden, fused = self.outputs
            kept = indices(rows, hidden.device)
            self.outputs = hidden[kept], None if fused is None else fused[kept]

    def is_for(self, frame: Frame) -> bool:
        """Nothing else comes with this frame but closings, and no other tokens."""
        if self.filled is None or frame.openings or not frame.segments:
            return False
        alike = map(_is_alike, frame.segments, self.segments, self.trees)
        if len(frame.segments) != len(self.segments) or not all(alike):
            return False
        trees = [one.tree for one in frame.segments if isinstance(one, TreeSegment)]
        return self.outputs is None or self.tokens == _tokens(trees)


class NextLap:
    """At most one guess at a time; asked by the thread that runs frames."""

    def __init__(self, table: PageTable, kv: KVPages, laps: Laps) -> None:
        self._table = table
        self._kv = kv
        self._laps = laps
        self._guess: GuessedLap | None = None
        self._trees = self._plain = (
            False  # all of the newest frame have trees next; those it has: of one node
        )
        self._alike = True  # trees had the shapes that were foreseen
        # By sequence: up to there its rows were brought down for a frame that never came.
        self._brought: dict[int, int] = {}

    def take(self, frame: Frame) -> GuessedLap | None:
        """What was guessed, if it is for this frame; else it has never been."""
        guess = self._guess
        if guess and guess.tokens and frame.closings:
            guess.leave_out(frame.closings)
        if guess is None or guess.is_for(frame):
            self._guess = None
            self._forget(frame.closings if guess else ())
            return guess
        if guess.outputs:
            self._brought |= {one.sequence: one.committed for one in guess.segments}
        self._drop()
        return None

    def settled(self, frame: Frame) -> Frame:
        """The frame, but that no row is brought down twice."""
        self._forget(frame.closings)
        if not self._brought:
            return frame
        return replace(frame, segments=tuple(map(self._settled, frame.segments)))

    def guess(self, frame: Frame) -> None:
        """Arrange what comes behind this frame, which runs, if its trees are of one node, and nobody drafts
        behind it: a drafter rests, or those of the frame before were, too.
        """
        plain = self._plain
        trees = [one for one in frame.segments if isinstance(one, TreeSegment)]
        self._trees = bool(trees) and all(map(self._goes_on, frame.segments))
        alone = all(len(one.tree) == 1 for one in trees)
        unasked = frame.resting or frame.waking
        self._plain = bool(trees) and alone and not unasked  # behind a rest somebody drafts
        if alone and (plain or unasked) and self._trees:
            self._arrange([*map(_following, frame.segments)])

    def foresee(self, segments: Sequence[TreeSegment]) -> bool:
        """Arrange that, with trees of these shapes, if it follows a frame that goes on so; whether it does.
        Where shapes change from lap to lap, that is left to `grow`.
        """
        self._drop()
        if self._trees and self._alike:
            self._arrange(segments)
        elif self._trees:
            self._guess = GuessedLap(segments, [one.tree for one in segments])
        return self._trees

    def start(self, tokens: list[int]) -> bool:
        """Launch what was guessed, with these tokens; whether there was such a guess."""
        guess = self._guess
        if guess is None or guess.filled is None or len(tokens) != guess.rows:
            return False
        guess.tokens, guess.outputs = tokens, self.launch(guess, tokens)
        return True

    def go_unread(self, segments: Sequence[TreeSegment], trees: UnreadTrees) -> bool:
        """Launch that, if it follows a frame that goes on so, with trees below these roots that only a device
        knows, but for those of first trees, which are all of those; whether that can be: not where a window
        would hide something from the deepest trees of so many nodes. `read` says then what they are.
        """
        self._drop()
        if not (self._trees and self._laps.takes_unread):
            return False
        unknown = chain((0,) * trees.nodes)  # one for all: 64 texts wait for this
        self._arrange(
            [
                TreeSegment(one.sequence, one.step, one.committed, one.keep, unknown) if one.step > 1 else one
                for one in segments
            ]
        )
        if (guess := self._guess) and guess.filled and not guess.hidden:
            roots = [one.tree.tokens[0] for one in segments]
            guess.outputs = self._laps.launch_unread(guess.filled, roots, trees)
        return bool(guess and guess.outputs)

    def read(self, trees: Sequence[Tree]) -> bool:
        """These are the trees of what was launched unread; whether they can be."""
        guess = self._guess
        if guess is None or any(len(own.tokens) != len(one.tokens) for own, one in zip(trees, guess.trees)):
            return False
        guess.trees = trees
        guess.tokens = _tokens(trees)
        return True

    def grow(self, trees: Sequence[Tree]) -> bool:
        """The same with the trees that came: arranged once more, if they are not as foreseen."""
        if self._guess is None:
            return False
        segments = self._guess.segments
        self._alike = all(tree.parents == one.parents for tree, one in zip(trees, self._guess.trees))
        if not (self._alike and self._guess.arranged):
            self._drop()
            self._arrange([replace(one, tree=tree) for one, tree in zip(segments, trees)])
        self._guess.trees = trees
        return self.start(_tokens(trees))

    def launch(self, guess: GuessedLap, entry: Sequence[int] | Tensor) -> Outputs:
        """See `CapturedLaps.launch`."""
        assert guess.filled is not None
        return self._laps.launch(guess.filled, entry)

    def _arrange(self, segments: Sequence[TreeSegment]) -> None:
        """As a frame of these would be; nothing, where pages are too few."""
        table = self._table
        trees = [one.tree for one in segments]
        self._guess = GuessedLap(segments, trees, arranged=True)
        own = [one.sequence for one in segments]
        wanted = map(table.wanted, own, [one.committed + len(one.tree.tokens) for one in segments])
        reserved = [(sequence, pages) for sequence, pages in zip(own, wanted) if pages]
        if sum(pages for _, pages in reserved) > table.free:
            return
        self._guess.reserved = reserved
        plan = plan_frame(table, Frame(0, 0, segments=tuple(segments)))
        for page in plan.trimmed:
            self._kv.clear_page(page)
        self._guess.filled = self._laps.fill(LapRows((), plan.positions, plan.slots, plan.spans, plan.moves))

    def _drop(self) -> None:
        """It has never been."""
        guess = self._guess
        self._guess = None
        for sequence, pages in reversed(guess.reserved) if guess else ():
            for page in self._table.unreserve(sequence, pages):
                if guess and guess.outputs:
                    self._kv.clear_page(page)

    def _forget(self, closings: Sequence[int]) -> None:
        for sequence in closings:
            self._brought.pop(sequence, None)

    def _settled(self, segment: Segment) -> Segment:
        brought = self._brought.pop(segment.sequence, None)
        if isinstance(segment, TreeSegment) and segment.keep and segment.committed == brought:
            return replace(segment, keep=(0,))
        return segment

    def _goes_on(self, segment: Segment) -> bool:
        """With a tree; and no policy but a window has a say in what it sees."""
        if not (isinstance(segment, TreeSegment) or segment.final):
            return False
        policy = self._table.policy(segment.sequence)
        return policy is None or isinstance(policy, Window)


def _following(segment: Segment) -> TreeSegment:
    """Of a text that writes one token now, which is not known."""
    if isinstance(segment, TreeSegment):
        return replace(segment, committed=segment.committed + 1, keep=(0,))
    return TreeSegment(segment.sequence, 1, segment.start + len(segment.tokens), (), single(0))


def _is_alike(segment: Segment, guessed: TreeSegment, tree: Tree) -> bool:
    return (
        isinstance(segment, TreeSegment)
        and segment.sequence == guessed.sequence
        and segment.committed == guessed.committed
        and segment.keep == guessed.keep
        and segment.tree.parents == tree.parents
    )


def _tokens(trees: Iterable[Tree]) -> list[int]:
    return [token for tree in trees for token in tree.tokens]
