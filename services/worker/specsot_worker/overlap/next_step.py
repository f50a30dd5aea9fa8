"""Predicts a stage's next step, and launches it before its frame arrives. See the package for the timing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from specsot.core.device_verification import DeviceTrees
from specsot.core.frames import Frame, Segment, TreeSegment
from specsot.core.overlap import OverlapEvent, OverlappedWork, OverlapState
from specsot.core.pages import PageTable
from specsot.core.tree import Tree, chain, single
from specsot.params import Window
from specsot_model.core.kv_plan import plan_frame
from specsot_model.kv import KVPages, indices
from specsot_model.step_rows import FilledStep, Outputs, StepRows


class Steps(Protocol):
    """Runs frames through a layer range. See `CapturedSteps`."""

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
        """Run a prepared frame with trees that the host has not read.

        roots: Token ids of the roots, which are known.
        """
        ...


@dataclass(slots=True)
class SpeculativeStep(OverlappedWork):
    """A predicted step, in one of the states that the package describes.

    segments: The predicted tree segments.
    trees: The trees of the segments. They replace the trees that the segments name.
    reserved: Pairs of a sequence and the number of pages that were reserved for the step.
    filled: What graphs read of the frame. None in the state IDLE.
    tokens: Token ids of all trees, in frame order. Known in the state CONFIRMED only.
    outputs: Hidden states and fused features. None before the step is launched.
    timed: True if the stage's timer counts since the launch. False if it must start with the frame.
    """

    segments: Sequence[TreeSegment]
    trees: Sequence[Tree]
    reserved: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    filled: FilledStep | None = None
    tokens: list[int] = field(default_factory=list[int])
    outputs: Outputs | None = None
    timed: bool = False

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
        """Return whether the step can be used for this frame.

        The frame must have no openings, and the predicted segments with the same kept nodes and tree shapes.
        If the step was launched, it must be confirmed and its tokens must be those of the frame. Closings are
        allowed. Return False for a step that could not be prepared.
        """
        if self.state not in (OverlapState.PREPARED, OverlapState.CONFIRMED):
            return False
        if frame.openings or not frame.segments or len(frame.segments) != len(self.segments):
            return False
        if not all(map(_is_alike, frame.segments, self.segments, self.trees)):
            return False
        trees = [one.tree for one in frame.segments if isinstance(one, TreeSegment)]
        return not self.confirmed or self.tokens == _tokens(trees)


class NextStep:
    """Predicts the next step of a stage. There is at most one predicted step. Used by the thread that runs
    frames only.

    Call `take` when a frame arrives, and `predict` once its step is launched. After verification, call
    `launch`; or `prepare` and then `launch_drafts`; or `launch_selected` and then `confirm`.
    """

    def __init__(
        self,
        table: PageTable,
        kv: KVPages,
        steps: Steps,
        vocabulary: int,
        start_timer: Callable[[], None] = lambda: None,
    ) -> None:
        """Start without a predicted step.

        table: Page table of the stage.
        kv: KV pages of the stage.
        steps: CUDA graphs that run the step.
        vocabulary: Number of token ids of the base model. Steps with other token ids are not launched.
        start_timer: Called when the time that a predicted step takes begins to count.
        """
        self._table = table
        self._kv = kv
        self._steps = steps
        self._vocabulary = vocabulary
        self._start_timer = start_timer
        self._step: SpeculativeStep | None = None
        # True if every segment of the newest frame is followed by a tree.
        self._trees_follow = False
        # True if the newest frame has single-node trees only, and drafting was neither paused nor resuming.
        self._single_nodes = False
        # True if the last trees had the shapes that `prepare` had expected.
        self._shapes_repeat = True
        # For sequences of a discarded step that had been launched: their number of committed tokens. The
        # launch has already moved their accepted KV down to that position.
        self._moved: dict[int, int] = {}

    @property
    def state(self) -> OverlapState:
        """State of the predicted step; IDLE if no step is predicted."""
        return self._step.state if self._step else OverlapState.IDLE

    def take(self, frame: Frame) -> SpeculativeStep | None:
        """Return the predicted step if it is for this frame. Otherwise discard it and return None.

        A returned step is PREPARED or CONFIRMED: in the first case, call `run_prepared`. No step is predicted
        afterwards.
        """
        step = self._step
        if step is None:
            return None
        if step.confirmed and frame.closings:
            step.leave_out(frame.closings)
        if step.is_for(frame):
            self._step = None
            self._forget(frame.closings)
            return step
        self._discard()
        return None

    def without_applied_moves(self, frame: Frame) -> Frame:
        """Return the frame without the KV moves that a discarded step has applied already.

        A second move would copy slots that the discarded step has overwritten.

            # the last tree had its root in slot 10; accepted nodes (0, 2) were moved to slots 10 and 11
            # segment with committed 12, keep (0, 2) -> keep (0,), which moves nothing
        """
        self._forget(frame.closings)
        if not self._moved:
            return frame
        return replace(frame, segments=tuple(map(self._without_applied_move, frame.segments)))

    def predict(self, frame: Frame) -> None:
        """Prepare the step after `frame`, which is running, if it will feed one token per sequence.

        This is expected if all trees of the frame are single nodes and no drafter will answer: either
        drafting is paused or resuming, or the previous frame had single-node trees as well.
        """
        before = self._single_nodes
        trees = [one for one in frame.segments if isinstance(one, TreeSegment)]
        self._trees_follow = bool(trees) and all(map(self._has_next_tree, frame.segments))
        alone = all(len(one.tree) == 1 for one in trees)
        unasked = frame.paused or frame.catching_up
        # After a pause of drafting, trees may follow.
        self._single_nodes = bool(trees) and alone and not unasked
        if alone and (before or unasked) and self._trees_follow:
            self._prepare([*map(_following, frame.segments)])

    @torch.inference_mode()
    def launch(self, tokens: list[int]) -> bool:
        """Launch the prepared step with these tokens, one per predicted token. Return whether it was
        launched: there must be a prepared step with as many tokens, and the vocabulary must have them.

        The step is confirmed at once, because the host knows the tokens.
        """
        if max(tokens) >= self._vocabulary:
            return False
        self._start_timer()
        return self._launch(tokens)

    @torch.inference_mode()
    def prepare(self, segments: Sequence[TreeSegment]) -> bool:
        """Prepare the step with these segments, if every segment of the newest frame is followed by a tree.
        Return whether that is so, and `launch_drafts` is to be called when the trees are known.

        segments: Their trees have the expected shapes; the tokens are open. If the shapes of trees changed in
            the previous step, preparing is left to `launch_drafts`.
        """
        self._discard()
        if self._trees_follow and self._shapes_repeat:
            self._prepare(segments)
        elif self._trees_follow:
            self._step = SpeculativeStep(segments, [one.tree for one in segments])
        return self._trees_follow

    @torch.inference_mode()
    def launch_drafts(self, trees: Sequence[Tree]) -> bool:
        """Launch the step of the last `prepare` with these trees. Return whether it was launched.

        The step is prepared again if the shapes differ from the expected ones. Return False if no step is
        predicted, if it does not fit, or if a token id is beyond the vocabulary.
        """
        step = self._step
        if step is None or max(max(tree.tokens) for tree in trees) >= self._vocabulary:
            return False
        self._start_timer()
        tried = self._shapes_repeat
        self._shapes_repeat = all(tree.parents == one.parents for tree, one in zip(trees, step.trees))
        if not (self._shapes_repeat and tried):
            segments = [replace(one, tree=tree) for one, tree in zip(step.segments, trees)]
            self._discard()
            step = self._prepare(segments)
        step.trees = trees
        return self._launch(_tokens(trees))

    @torch.inference_mode()
    def launch_selected(self, segments: Sequence[TreeSegment], trees: DeviceTrees) -> bool:
        """Launch the step with these segments and with trees that the device selects. Return whether it was
        launched.

        segments: The next segments; each tree is the root alone, which is known. A sequence's first tree
            (`draft_round` 1) stays a root.
        trees: Trees of a fixed number of nodes, which the host has not read.

        Returns False if graphs cannot take such trees, or if a window would hide part of the KV from the
        deepest trees that so many nodes can form. Call `confirm` when the host knows the trees.

            # nodes 4, steps [3, 5, 1] -> chains of 4, 4 and 1 tokens are planned
        """
        self._discard()
        if not (self._trees_follow and self._steps.accepts_device_trees):
            return False
        # One tree serves all sequences: building one for each of 64 sequences, say, would delay the launch.
        unknown = chain((0,) * trees.nodes)
        step = self._prepare(
            [
                TreeSegment(
                    one.sequence, one.draft_round, one.committed, one.keep, unknown, one.parent, one.scratch
                )
                if one.draft_round > 1
                else one
                for one in segments
            ]
        )
        if step.filled is None or step.hidden:
            return False
        roots = [one.tree.tokens[0] for one in segments]
        step.outputs = self._steps.launch_device_trees(step.filled, roots, trees)
        step.apply(OverlapEvent.LAUNCHED)
        return True

    def confirm(self, trees: Sequence[Tree]) -> bool:
        """Record the trees that the device has selected for the launched step. Return whether the step is
        confirmed: False if no step was launched, or if the sizes differ from the planned ones. An unconfirmed
        step is discarded when the next frame arrives.
        """
        self._start_timer()
        step = self._step
        if step is None or step.state is not OverlapState.LAUNCHED:
            return False
        if any(len(own.tokens) != len(one.tokens) for own, one in zip(trees, step.trees)):
            return False
        step.trees = trees
        step.tokens = _tokens(trees)
        step.timed = True
        step.apply(OverlapEvent.MATCHED)
        return True

    def pause_timer(self) -> None:
        """Stop counting time for the confirmed step, whose frame does not come yet. The time counts again
        from the frame's arrival on.
        """
        if self._step:
            self._step.timed = False

    def run_prepared(self, step: SpeculativeStep, entry: Sequence[int] | Tensor) -> Outputs:
        """Launch a prepared step with the inputs of its frame, and return the outputs. The step is confirmed.

        entry: Token ids or hidden states. See `CapturedSteps.launch`.
        """
        assert step.filled is not None
        step.outputs = self._steps.launch(step.filled, entry)
        step.apply(OverlapEvent.LAUNCHED, OverlapEvent.MATCHED)
        return step.outputs

    def _prepare(self, segments: Sequence[TreeSegment]) -> SpeculativeStep:
        """Prepare a step with these segments: reserve pages, plan the frame, and fill the graphs' inputs.

        Return the step, which is the predicted one now. If pages are too few, or if no graph has room, it
        stays in the state IDLE.
        """
        table = self._table
        step = SpeculativeStep(segments, [one.tree for one in segments])
        self._step = step
        own = [one.sequence for one in segments]
        wanted = map(table.missing_pages, own, [one.committed + len(one.tree.tokens) for one in segments])
        reserved = [(sequence, pages) for sequence, pages in zip(own, wanted) if pages]
        if sum(pages for _, pages in reserved) > table.free:
            return step
        step.reserved = reserved
        plan = plan_frame(table, Frame(0, 0, segments=tuple(segments)))
        for page in plan.trimmed:
            self._kv.clear_page(page)
        step.filled = self._steps.fill(StepRows((), plan.positions, plan.slots, plan.spans, plan.moves))
        if step.filled:
            step.apply(OverlapEvent.WRITTEN)
        return step

    def _launch(self, tokens: list[int]) -> bool:
        """Launch the predicted step with these tokens, for which the timer has started. Return whether it was
        launched: it must be prepared, with as many tokens.
        """
        step = self._step
        if step is None or step.state is not OverlapState.PREPARED or len(tokens) != step.rows:
            return False
        step.tokens = tokens
        step.timed = True
        self.run_prepared(step, tokens)
        return True

    def _discard(self) -> None:
        """Discard the predicted step, if there is one, and undo its page reservations.

        If the step was launched, its pages are cleared, because it may have written to them; and the KV moves
        that it has applied are remembered for its sequences.
        """
        step = self._step
        self._step = None
        if step is None:
            return
        launched = step.on_device
        if launched:
            self._moved |= {one.sequence: one.committed for one in step.segments}
        if step.state is not OverlapState.IDLE:
            step.apply(OverlapEvent.DIFFERED)
        for sequence, pages in reversed(step.reserved):
            for page in self._table.unreserve(sequence, pages):
                if launched:
                    self._kv.clear_page(page)

    def _forget(self, closings: Sequence[int]) -> None:
        """Drop what is remembered of discarded steps for these sequences, which have ended."""
        for sequence in closings:
            self._moved.pop(sequence, None)

    def _without_applied_move(self, segment: Segment) -> Segment:
        """Return the segment without its moves, if a discarded step has applied them."""
        moved = self._moved.pop(segment.sequence, None)
        if isinstance(segment, TreeSegment) and segment.keep and segment.committed == moved:
            return replace(segment, keep=(0,))
        return segment

    def _has_next_tree(self, segment: Segment) -> bool:
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


def _is_alike(segment: Segment, predicted: TreeSegment, tree: Tree) -> bool:
    """Return whether a frame's segment is the predicted one, apart from its tokens.

    tree: The tree of the predicted segment, as far as it is known.
    """
    return (
        isinstance(segment, TreeSegment)
        and segment.sequence == predicted.sequence
        and segment.committed == predicted.committed
        and segment.keep == predicted.keep
        and segment.parent == predicted.parent
        and segment.scratch == predicted.scratch
        and segment.tree.parents == tree.parents
    )


def _tokens(trees: Iterable[Tree]) -> list[int]:
    """Return the token ids of all trees, in frame order."""
    return [token for tree in trees for token in tree.tokens]
