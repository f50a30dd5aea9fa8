"""Launches a stage's next step speculatively, before its frame arrives.

The code says `step` for a step and `guess` for a predicted step. There are three ways to predict:

* Without drafts, where each sequence feeds one token per step, everything but the tokens is known while the
  device still computes the previous step. The next step is prepared then, with a token for every sequence,
  although some sequences may end: their outputs are left out. It is launched when the tokens are known
  (`guess`, `start`).
* With drafts, the step is prepared while the trees grow, after the previous step was verified. Only the
  tokens are open, if the trees have the shapes of the previous trees. It is launched when the trees are known
  (`apply_forecast`, `grow`).
* If the device chooses trees of a known size by itself, the step is launched at once, and the host reads the
  trees later (`launch_with_device_trees`, `read`).

A launched step has no effect unless exactly the predicted frame arrives: its page reservations are undone,
nothing is sent because of it, and the KV that it wrote is overwritten. One thing is permanent: pages that a
window hides from the predicted tokens on are freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from specsot.core.device_verification import DeviceTrees
from specsot.core.frames import Frame, Segment, TreeSegment
from specsot.core.pages import PageTable
from specsot.core.tree import Tree, chain, single
from specsot.params import Window
from specsot_model.core.kv_plan import plan_frame
from specsot_model.kv import KVPages, indices
from specsot_model.step_rows import FilledStep, Outputs, StepRows


class Steps(Protocol):
    """What runs frames for a layer range. See `CapturedSteps`."""

    def run(self, rows: StepRows) -> Outputs | None:
        """Run a frame, or return None if it does not fit."""
        ...

    def fill(self, rows: StepRows) -> FilledStep | None:
        """Write what the frame needs, but no tokens, to the device. Return None if it does not fit."""
        ...

    def launch(self, filled: FilledStep, entry: Sequence[int] | Tensor) -> Outputs:
        """Run a frame that `fill` has prepared. entry: token ids or hidden states."""
        ...

    @property
    def accepts_device_trees(self) -> bool:
        """True if `launch_device_trees` can be used."""
        ...

    def launch_device_trees(self, filled: FilledStep, roots: Sequence[int], trees: DeviceTrees) -> Outputs:
        """Run a prepared frame with trees that the host has not read. roots: token ids of the roots, which
        are known.
        """
        ...


@dataclass(slots=True)
class GuessedStep:
    """A predicted step. The tokens of its trees are open until it is launched.

    segments: The predicted tree segments.
    trees: The trees of the segments. They replace the trees that the segments name.
    arranged: True if preparing was tried. It fails if pages are too few or no graph has room.
    reserved: Pairs of a sequence and the number of pages that were reserved for the step.
    filled: What graphs read of the frame. None if the step could not be prepared.
    tokens: Token ids of all trees, in frame order. Empty until they are known.
    outputs: Hidden states and fused features of the launched step. None until it is launched.
    """

    segments: Sequence[TreeSegment]
    trees: Sequence[Tree]
    arranged: bool = False
    reserved: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    filled: FilledStep | None = None
    tokens: list[int] = field(default_factory=list[int])
    outputs: Outputs | None = None

    @property
    def hidden(self) -> bool:
        """True if a window hides part of the KV from some of the tokens."""
        return self.filled is not None and any(span.sight for span in self.filled.rows.spans)

    @property
    def rows(self) -> int:
        """Number of tokens of the step."""
        return sum(len(tree.tokens) for tree in self.trees)

    def leave_out(self, closed: Sequence[int]) -> None:
        """Remove the sequences in `closed`, which have ended since the launch, and their outputs.

        For example:

            # tokens [a0 a1 | b0 | c0 c1 c2], closed [b] -> outputs of tokens [0, 1, 3, 4, 5]
        """
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
        """Return whether the step was predicted for this frame.

        The frame must have no openings, and the predicted segments with the same kept nodes and tree shapes.
        If the step was launched, its tokens must be those of the frame. Closings are allowed.
        """
        if self.filled is None or frame.openings or not frame.segments:
            return False
        alike = map(_is_alike, frame.segments, self.segments, self.trees)
        if len(frame.segments) != len(self.segments) or not all(alike):
            return False
        trees = [one.tree for one in frame.segments if isinstance(one, TreeSegment)]
        return self.outputs is None or self.tokens == _tokens(trees)


class NextStep:
    """Predicts the next step of a stage. There is at most one predicted step. Used by the thread that runs
    frames only.
    """

    def __init__(self, table: PageTable, kv: KVPages, steps: Steps) -> None:
        """Start without a predicted step.

        table: Page table of the stage.
        kv: KV pages of the stage.
        steps: CUDA graphs that run the step.
        """
        self._table = table
        self._kv = kv
        self._steps = steps
        self._predicted: GuessedStep | None = None
        # _trees: every segment of the newest frame is followed by a tree.
        # _plain: the newest frame has single-node trees only, and drafting was neither paused nor resuming.
        self._trees = self._plain = False
        # True if the last trees had the shapes that `apply_forecast` had prepared.
        self._alike = True
        # For sequences of a discarded step that had been launched: their number of committed tokens. The
        # launch has already moved their accepted KV down to that position.
        self._brought: dict[int, int] = {}

    def take(self, frame: Frame) -> GuessedStep | None:
        """Return the predicted step if it is for this frame. Otherwise discard it and return None.

        Either way, no step is predicted afterwards.
        """
        guess = self._predicted
        if guess and guess.tokens and frame.closings:
            guess.leave_out(frame.closings)
        if guess is None or guess.is_for(frame):
            self._predicted = None
            self._forget(frame.closings if guess else ())
            return guess
        if guess.outputs:
            self._brought |= {one.sequence: one.committed for one in guess.segments}
        self._drop()
        return None

    def settled(self, frame: Frame) -> Frame:
        """Return the frame without the KV moves that a discarded step has applied already.

        A second move would copy slots that the discarded step has overwritten.

            # the last tree had its root in slot 10; accepted nodes (0, 2) were moved to slots 10 and 11
            # segment with committed 12, keep (0, 2) -> keep (0,), which moves nothing
        """
        self._forget(frame.closings)
        if not self._brought:
            return frame
        return replace(frame, segments=tuple(map(self._settled, frame.segments)))

    def guess(self, frame: Frame) -> None:
        """Prepare the step after `frame`, which is running, if it will feed one token per sequence.

        This is expected if all trees of the frame are single nodes and no drafter will answer: either
        drafting is paused or resuming, or the previous frame had single-node trees as well.
        """
        plain = self._plain
        trees = [one for one in frame.segments if isinstance(one, TreeSegment)]
        self._trees = bool(trees) and all(map(self._will_continue, frame.segments))
        alone = all(len(one.tree) == 1 for one in trees)
        unasked = frame.paused or frame.catching_up
        # After a pause of drafting, trees may follow.
        self._plain = bool(trees) and alone and not unasked
        if alone and (plain or unasked) and self._trees:
            self._arrange([*map(_following, frame.segments)])

    def apply_forecast(self, segments: Sequence[TreeSegment]) -> bool:
        """Prepare the step with these segments, if every segment of the newest frame is followed by a tree.
        Return whether that is so.

        If the shapes of trees changed in the previous step, preparing is left to `grow`, which knows the
        trees.
        """
        self._drop()
        if self._trees and self._alike:
            self._arrange(segments)
        elif self._trees:
            self._predicted = GuessedStep(segments, [one.tree for one in segments])
        return self._trees

    def start(self, tokens: list[int]) -> bool:
        """Launch the predicted step with these tokens, one per predicted token. Return whether there was a
        prepared step with as many tokens.
        """
        guess = self._predicted
        if guess is None or guess.filled is None or len(tokens) != guess.rows:
            return False
        guess.tokens, guess.outputs = tokens, self.launch(guess, tokens)
        return True

    def launch_with_device_trees(self, segments: Sequence[TreeSegment], trees: DeviceTrees) -> bool:
        """Launch the step with these segments and with trees that the host has not read. Return whether it
        was launched.

        segments: The next segments; each tree is the root alone, which is known. A sequence's first tree
            (`draft_round` 1) stays a root.
        trees: Trees of a fixed number of nodes, which the device chooses.

        Returns False if graphs cannot take such trees, or if a window would hide part of the KV from the
        deepest trees that so many nodes can form. Call `read` when the host knows the trees.

            # nodes 4, steps [3, 5, 1] -> chains of 4, 4 and 1 tokens are planned
        """
        self._drop()
        if not (self._trees and self._steps.accepts_device_trees):
            return False
        # One tree serves all sequences: building one for each of 64 sequences, say, would delay the launch.
        unknown = chain((0,) * trees.nodes)
        self._arrange(
            [
                TreeSegment(one.sequence, one.draft_round, one.committed, one.keep, unknown)
                if one.draft_round > 1
                else one
                for one in segments
            ]
        )
        if (guess := self._predicted) and guess.filled and not guess.hidden:
            roots = [one.tree.tokens[0] for one in segments]
            guess.outputs = self._steps.launch_device_trees(guess.filled, roots, trees)
        return bool(guess and guess.outputs)

    def read(self, trees: Sequence[Tree]) -> bool:
        """Record the trees that the device has chosen for the launched step. Return False if there is no such
        step, or if the sizes differ from the planned ones.
        """
        guess = self._predicted
        if guess is None or any(len(own.tokens) != len(one.tokens) for own, one in zip(trees, guess.trees)):
            return False
        guess.trees = trees
        guess.tokens = _tokens(trees)
        return True

    def grow(self, trees: Sequence[Tree]) -> bool:
        """Launch the step that `apply_forecast` has predicted, with these trees. Return whether it was
        launched.

        The step is prepared again if the shapes differ from the predicted ones.
        """
        if self._predicted is None:
            return False
        segments = self._predicted.segments
        self._alike = all(tree.parents == one.parents for tree, one in zip(trees, self._predicted.trees))
        if not (self._alike and self._predicted.arranged):
            self._drop()
            self._arrange([replace(one, tree=tree) for one, tree in zip(segments, trees)])
        self._predicted.trees = trees
        return self.start(_tokens(trees))

    def launch(self, guess: GuessedStep, entry: Sequence[int] | Tensor) -> Outputs:
        """Run the prepared step. entry: token ids or hidden states. See `CapturedSteps.launch`."""
        assert guess.filled is not None
        return self._steps.launch(guess.filled, entry)

    def _arrange(self, segments: Sequence[TreeSegment]) -> None:
        """Prepare a step with these segments: reserve pages, plan the frame, and fill the graphs' inputs.

        If pages are too few, the predicted step stays unprepared (`filled` is None).
        """
        table = self._table
        trees = [one.tree for one in segments]
        self._predicted = GuessedStep(segments, trees, arranged=True)
        own = [one.sequence for one in segments]
        wanted = map(table.wanted, own, [one.committed + len(one.tree.tokens) for one in segments])
        reserved = [(sequence, pages) for sequence, pages in zip(own, wanted) if pages]
        if sum(pages for _, pages in reserved) > table.free:
            return
        self._predicted.reserved = reserved
        plan = plan_frame(table, Frame(0, 0, segments=tuple(segments)))
        for page in plan.trimmed:
            self._kv.clear_page(page)
        self._predicted.filled = self._steps.fill(
            StepRows((), plan.positions, plan.slots, plan.spans, plan.moves)
        )

    def _drop(self) -> None:
        """Discard the predicted step, and undo its page reservations.

        Freed pages are cleared if the step was launched, because it may have written to them.
        """
        guess = self._predicted
        self._predicted = None
        for sequence, pages in reversed(guess.reserved) if guess else ():
            for page in self._table.unreserve(sequence, pages):
                if guess and guess.outputs:
                    self._kv.clear_page(page)

    def _forget(self, closings: Sequence[int]) -> None:
        """Drop what is remembered of discarded steps for these sequences."""
        for sequence in closings:
            self._brought.pop(sequence, None)

    def _settled(self, segment: Segment) -> Segment:
        """Return the segment without moves, if a discarded step has applied them."""
        brought = self._brought.pop(segment.sequence, None)
        if isinstance(segment, TreeSegment) and segment.keep and segment.committed == brought:
            return replace(segment, keep=(0,))
        return segment

    def _will_continue(self, segment: Segment) -> bool:
        """Return whether the segment's sequence has a tree in the next frame, and has no KV policy other than
        a window.
        """
        if not (isinstance(segment, TreeSegment) or segment.final):
            return False
        policy = self._table.policy(segment.sequence)
        return policy is None or isinstance(policy, Window)


def _following(segment: Segment) -> TreeSegment:
    """Return the segment after this one, of a sequence that generates one token. The token is not known yet,
    so 0 stands for it.

    For example:

        # tree at committed 12 -> committed 13, keep (0,); final chunk of tokens 0..8 -> step 1, committed 9
    """
    if isinstance(segment, TreeSegment):
        # `dataclasses.replace` takes three times as long, for each sequence of each step.
        return TreeSegment(segment.sequence, segment.draft_round, segment.committed + 1, (0,), segment.tree)
    return TreeSegment(segment.sequence, 1, segment.start + len(segment.tokens), (), single(0))


def _is_alike(segment: Segment, guessed: TreeSegment, tree: Tree) -> bool:
    """Return whether a frame's segment is the predicted one, apart from its tokens."""
    return (
        isinstance(segment, TreeSegment)
        and segment.sequence == guessed.sequence
        and segment.committed == guessed.committed
        and segment.keep == guessed.keep
        and segment.tree.parents == tree.parents
    )


def _tokens(trees: Iterable[Tree]) -> list[int]:
    """Return the token ids of all trees, in frame order."""
    return [token for tree in trees for token in tree.tokens]
