"""Predicts a stage's next step, and launches it before its frame arrives. See the package for the timing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
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
from specsot_kernels.device_waits import record_on, wait_for
from specsot_model.core.kv_plan import plan_frame
from specsot_model.inference import inference_mode
from specsot_model.kv import KVPages
from specsot_model.step_rows import FilledStep, Outputs, StepRows

# Trees. The trees of a step have few different numbers of nodes. Untuned.
CACHED_TREES = 64


class Steps(Protocol):
    """Runner of frames through a layer range, as captured CUDA graphs. `CapturedSteps` implements it."""

    def run(self, rows: StepRows) -> Outputs | None:
        """Run a frame, and return its hidden states and fused features. Return None if it does not fit into a
        graph.

        rows: Inputs, positions, KV slots and visible KV of the frame's tokens.
        """
        ...

    def fill(self, rows: StepRows) -> FilledStep | None:
        """Write what the frame needs, except token ids and hidden states, to the device, and return the
        prepared step, which `launch` runs. Return None if the frame does not fit into a graph.

        rows: Positions, KV slots and visible KV of the frame's tokens. Its inputs (`entry`) are ignored.
        """
        ...

    def launch(self, filled: FilledStep, entry: Sequence[int] | Tensor) -> Outputs:
        """Run a frame that `fill` has prepared, and return its hidden states and fused features.

        filled: The prepared step, from `fill`.
        entry: Token ids, one per token of the frame, or hidden states [num_tokens, hidden_size]. Token ids
            may be an int32 tensor on the device if `accepts_device_tokens`.
        """
        ...

    @property
    def accepts_device_tokens(self) -> bool:
        """True if `launch` takes token ids that the host has not read."""
        ...

    @property
    def accepts_device_trees(self) -> bool:
        """True if `launch_device_trees` can be used."""
        ...

    def launch_device_trees(self, filled: FilledStep, roots: Sequence[int], trees: DeviceTrees) -> Outputs:
        """Run a prepared frame with trees that the host has not read, and return its hidden states and fused
        features.

        filled: The prepared step, from `fill`, of a frame with trees of as many nodes.
        roots: Token ids of the roots, which are known, one per tree.
        trees: The trees, whose tokens and shapes are on the device.
        """
        ...


# Returns the tokens that follow hidden states [num_sequences, hidden_size]: int32 [num_sequences] on their
# device, -1 where the logits are not finite. The number says in which pass of the step they were computed.
ChooseTokens = Callable[[Tensor, int], Tensor]


class ChosenTokens:
    """The tokens that the device has chosen in the passes of one step, on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        """Start to copy the tokens to the host.

        tokens: int32 [num_sequences, num_passes] on the device, -1 where logits are not finite.
        """
        on_gpu = tokens.is_cuda
        self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=on_gpu)
        self._tokens.copy_(tokens, non_blocking=True)
        self._arrived = torch.Event(tokens.device, enable_timing=False) if on_gpu else None
        if self._arrived:
            record_on(self._arrived, tokens.device)
        # Numbers of the sequences that have not ended meanwhile.
        self._sequences = [*range(len(tokens))]

    def keep(self, numbers: Sequence[int]) -> None:
        """Leave out all sequences but these.

        numbers: Numbers of the sequences that remain, among those that have not been left out before.
        """
        self._sequences = [self._sequences[number] for number in numbers]

    def read(self) -> list[list[int | None]]:
        """Wait for the device, and return the tokens of each sequence, one per pass. None: the logits are not
        finite.
        """
        if self._arrived:
            wait_for(self._arrived)
        chosen = self._tokens.tolist()
        found = [chosen[number] for number in self._sequences]
        if all(min(tokens) >= 0 for tokens in found):
            return found
        return [[token if token >= 0 else None for token in tokens] for tokens in found]


@dataclass(slots=True)
class SpeculativeStep(OverlappedWork):
    """A predicted step, in one of the states that the package describes.

    segments: The predicted tree segments, in frame order.
    trees: The trees of the segments, one each. They replace the trees that the segments name.
    reserved: Pairs of a sequence's id and the number of pages that were reserved for it for the step. Empty
        if no sequence needed a further page.
    filled: The inputs of the frame that were written to the device for the graphs. None in the state IDLE.
    tokens: Token ids with which the step was launched, one per tree, if `trees` are single nodes that name
        other ids, because these were unknown when the step was prepared. None: the ids are those of `trees`.
    outputs: Hidden states [num_tokens, hidden_size] and fused features. None before the step is launched.
    chosen: The target tokens of a step of several passes. None for a step of one pass.
    timed: True if the stage's timer counts since the launch. False if it must start with the frame.
    """

    segments: Sequence[TreeSegment]
    trees: Sequence[Tree]
    reserved: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    filled: FilledStep | None = None
    tokens: list[int] | None = None
    outputs: Outputs | None = None
    chosen: ChosenTokens | None = None
    timed: bool = False

    @property
    def hidden(self) -> bool:
        """True if a window hides part of the KV from some of the tokens. False for a step that could not be
        prepared.
        """
        # A list takes less time here than a generator, which `any` would need.
        return self.filled is not None and bool([True for span in self.filled.rows.spans if span.sight])

    @property
    def rows(self) -> int:
        """Number of tokens of the step."""
        return sum([len(tree.tokens) for tree in self.trees])

    @property
    def passes(self) -> int:
        """Number of forward passes of the step."""
        return len(self.trees[0].tokens) if self.chosen else 1

    def join_passes(self, outputs: Sequence[Outputs], chosen: ChosenTokens) -> None:
        """Make this the step of several passes that have been launched one after the other. Its trees become
        chains whose tokens after the root are 0, see `Frame.extra_passes`.

        outputs: Hidden states [num_sequences, hidden_size] and fused features of every pass.
        chosen: Tokens that follow every pass.

        The first pass must have been launched with `tokens`, one root per sequence.
        """
        self.outputs = _join(outputs)
        self.chosen = chosen
        self.trees = [unknown_chain(token, len(outputs)) for token in self.tokens or ()]
        self.tokens = None

    def leave_out(self, closed: Sequence[int]) -> None:
        """Remove sequences that have ended since the launch, and their outputs. Unknown ids are ignored.

        closed: Ids of the sequences that have ended.

        For example:

            # tokens [a0 a1 | b0 | c0 c1 c2], closed [b] -> outputs of tokens [0, 1, 3, 4, 5]

        The step must have been launched. If none of the ids is part of the step, nothing changes.
        """
        assert self.outputs is not None
        if {one.sequence for one in self.segments}.isdisjoint(closed):
            return
        firsts = accumulate(map(len, self.trees), initial=0)
        placed = zip(self.segments, self.trees, firsts)
        remaining = [each for each in placed if each[0].sequence not in closed]
        if self.chosen:
            sequences = [one.sequence for one in self.segments]
            self.chosen.keep([n for n, sequence in enumerate(sequences) if sequence not in closed])
        self.segments = [one for one, _, _ in remaining]
        self.trees = [tree for _, tree, _ in remaining]
        runs = _runs([(first, first + len(tree)) for _, tree, first in remaining])
        self.tokens = self.tokens and [token for start, stop in runs for token in self.tokens[start:stop]]
        hidden, fused = self.outputs
        self.outputs = _rows_of(hidden, runs), None if fused is None else _rows_of(fused, runs)

    def is_for(self, frame: Frame) -> bool:
        """Return whether the step can be used for a frame. Return False for a step that could not be
        prepared.

        frame: The frame that has arrived or was composed.

        The frame must have as many passes, and the predicted segments with the same kept nodes and tree
        shapes. If the step was launched, it must be confirmed and its tokens must be those of the frame.
        Closings are allowed. So are openings and prompt chunks after the trees, if a step of one pass was
        launched; the stage then computes the chunks after it.

            # launched [t0 t1 | u0], frame [t0 t1 | u0 | p0 p1] -> True; prepared only -> False

        Return False also for a frame with fewer segments than the step, and for a step all of whose sequences
        have been left out.
        """
        if self.state not in (OverlapState.PREPARED, OverlapState.CONFIRMED) or not self.segments:
            return False
        if frame.extra_passes != self.passes - 1:
            return False
        others = frame.segments[len(self.segments) :]
        if (others or frame.openings) and not (self.confirmed and self.passes == 1):
            return False
        if len(frame.segments) < len(self.segments) or any(isinstance(one, TreeSegment) for one in others):
            return False
        # The tokens of `trees` are compared only if the step was launched with them.
        compares_tokens = self.confirmed and self.tokens is None
        # The comparison is written out, because a call for each sequence would take as long again.
        for segment, predicted, tree in zip(frame.segments, self.segments, self.trees):
            if (
                not isinstance(segment, TreeSegment)
                or segment.sequence != predicted.sequence
                or segment.committed != predicted.committed
                or segment.keep != predicted.keep
                or segment.parent != predicted.parent
                or segment.scratch != predicted.scratch
            ):
                return False
            own = segment.tree
            # Most frames carry the same tree objects that the drafter has proposed.
            if own is not tree and (
                own.parents != tree.parents or (compares_tokens and own.tokens != tree.tokens)
            ):
                return False
        if self.tokens is None or not self.confirmed:
            return True
        return self.tokens == [one.tree.tokens[0] for one in frame.segments if isinstance(one, TreeSegment)]


class NextStep:
    """Predictor and launcher of the next step of a stage. There is at most one predicted step. Used by the
    thread that runs frames only.

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

        table: Page table of the stage, in which pages are reserved.
        kv: KV pages of the stage, of which freed ones are cleared.
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
        # True if the newest frame has trees, and no sequence of it has another KV policy than a window.
        self._trees_continue = False
        # True if every tree of the newest frame is a single node, or a chain of a frame of several passes,
        # and drafting was neither paused nor resuming. True also for a frame of prompts alone.
        self._single_nodes = False
        # True if the last trees had the shapes that `prepare` had expected.
        self._shapes_repeat = True
        # What the passes of the step that was taken last have chosen. None if it had one pass.
        self.chosen: ChosenTokens | None = None
        # For sequences of a discarded step that had been launched: their number of committed tokens. The
        # launch has already moved their accepted KV down to that position.
        self._moved_to: dict[int, int] = {}

    @property
    def state(self) -> OverlapState:
        """State of the predicted step; IDLE if no step is predicted."""
        return self._step.state if self._step else OverlapState.IDLE

    @property
    def launched_passes(self) -> int:
        """Number of forward passes of the confirmed step, which waits for its frame; 0 without one."""
        return self._step.passes if self._step and self._step.confirmed else 0

    def take(self, frame: Frame) -> SpeculativeStep | None:
        """Return the predicted step if it is for this frame; no step is predicted afterwards. Otherwise
        discard the step, if there is one, and return None.

        frame: The frame that has arrived or was composed.

        A returned step is PREPARED or CONFIRMED: in the first case, call `run_prepared`.

        Sequences that the frame closes are first left out of a confirmed step. None is returned as well if
        no step is predicted. `chosen` becomes that of the returned step.
        """
        step = self._step
        self.chosen = None
        if step is None:
            return None
        if step.confirmed and frame.closings:
            step.leave_out(frame.closings)
        if step.is_for(frame):
            self._step = None
            self.chosen = step.chosen
            self._forget(frame.closings)
            return step
        self._discard()
        return None

    def without_applied_moves(self, frame: Frame) -> Frame:
        """Return the frame without the KV moves that a discarded step has applied already. A frame that needs
        no change is returned as it is.

        frame: The frame that runs instead of the discarded step.

        A second move would copy slots that the discarded step has overwritten.

            # the last tree had its root in slot 10; accepted nodes (0, 2) were moved to slots 10 and 11
            # segment with committed 12, keep (0, 2) -> keep (0,), which moves nothing

        What is remembered of sequences that the frame closes, or that have a segment in it, is dropped.
        """
        self._forget(frame.closings)
        if not self._moved_to:
            return frame
        return replace(frame, segments=tuple(map(self._without_applied_move, frame.segments)))

    def predict(self, frame: Frame) -> None:
        """Prepare the step that follows a frame, if it will feed one token per sequence; otherwise predict
        nothing.

        frame: The frame that is running.

        One token per sequence is expected if the trees of this frame are single nodes, or chains of a frame
        of several passes, and no drafter will answer. No answer is expected if drafting is paused or
        resuming. Otherwise none is expected if drafting was neither in the previous frame, and that frame had
        no other trees either; it may have had prompts alone.

        Nothing is predicted after a frame without trees. After a frame of prompts alone, mostly other
        sequences continue in the next frame, or a drafter answers. Nor is anything predicted after a frame
        with a prompt chunk that is not the last one of its prompt, or with a KV policy other than a window. A
        frame whose step cannot be prepared leaves a step in the state IDLE.
        """
        had_single_nodes = self._single_nodes
        trees = [one for one in frame.segments if isinstance(one, TreeSegment)]
        self._trees_continue = bool(trees) and self._policies_allow(frame.segments)
        single_nodes = bool(frame.extra_passes) or all(len(one.tree.tokens) == 1 for one in trees)
        draft_paused = frame.paused or frame.catching_up
        # After a pause of drafting, trees may follow.
        self._single_nodes = single_nodes and not draft_paused
        if (
            self._trees_continue
            and single_nodes
            and (had_single_nodes or draft_paused)
            and all(isinstance(one, TreeSegment) or one.final for one in frame.segments)
        ):
            segments = [*map(_following, frame.segments)]
            self._prepare(segments, [one.tree for one in segments])

    @inference_mode
    def launch(self, tokens: list[int]) -> bool:
        """Launch the prepared step. Return whether it was launched: False if no step with as many tokens is
        prepared, or if the vocabulary does not have a token id.

        tokens: Token ids, one per predicted segment, in their order. At least one.

        The step is confirmed at once, because the host knows the tokens.

        The timer starts unless a token id is beyond the vocabulary.
        """
        if max(tokens) >= self._vocabulary:
            return False
        self._start_timer()
        return self._launch(tokens, tokens)

    @property
    def accepts_device_tokens(self) -> bool:
        """True if `run_ahead` and `run_passes` can be used."""
        return self._steps.accepts_device_tokens

    @inference_mode
    def run_ahead(self, choose: ChooseTokens, passes: int) -> None:
        """Launch further passes after the step that `launch` has just launched. There are fewer passes than
        asked for if pages or graphs have no room.

        choose: Chooses the tokens that follow a pass, on the device.
        passes: Number of passes in all, at least 1.

        Nothing happens if no step is confirmed.
        """
        step = self._step
        if step is not None and step.confirmed and step.outputs:
            outputs, chosen = self._launch_passes(step.segments, step.outputs, choose, passes, step.reserved)
            if len(outputs) > 1:
                step.join_passes(outputs, chosen)

    @inference_mode
    def run_passes(self, frame: Frame, choose: ChooseTokens) -> Frame:
        """Launch all passes but the first of a frame whose first pass is running, and return the frame with
        the outputs of all passes. `chosen` becomes their tokens.

        frame: The frame, with the hidden states of its roots. Pages for all passes are reserved.
        choose: Chooses the tokens that follow a pass, on the device.

        If no graph has room, the frame gets fewer passes, and its chains fewer nodes.
        """
        assert isinstance(frame.hidden, Tensor)
        fused = frame.fused if isinstance(frame.fused, Tensor) else None
        segments = [one for one in frame.segments if isinstance(one, TreeSegment)]
        first = frame.hidden, fused
        outputs, self.chosen = self._launch_passes(segments, first, choose, 1 + frame.extra_passes, [])
        hidden, features = _join(outputs)
        chains = [one.with_tree(unknown_chain(one.tree.tokens[0], len(outputs))) for one in segments]
        return replace(
            frame, segments=tuple(chains), hidden=hidden, fused=features, extra_passes=len(outputs) - 1
        )

    def _launch_passes(
        self,
        segments: Sequence[TreeSegment],
        first: Outputs,
        choose: ChooseTokens,
        passes: int,
        reserved: list[tuple[int, int]],
    ) -> tuple[list[Outputs], ChosenTokens]:
        """Launch passes after a first one; each feeds the tokens that the pass before has chosen. Return the
        outputs of all passes, and the tokens that follow each of them. There are fewer passes if pages or
        graphs have no room.

        segments: The segments of the first pass, whose roots it feeds.
        first: Outputs of the first pass.
        choose: Chooses the tokens that follow a pass, on the device.
        passes: Number of passes in all.
        reserved: Pages that are reserved for the passes are added, see `SpeculativeStep.reserved`.
        """
        outputs = [first]
        chosen = list[Tensor]()
        roots = [single(0)] * len(segments)
        while len(outputs) < passes:
            number = len(outputs)
            following = [
                TreeSegment(one.sequence, one.draft_round, one.committed + number, (0,), root)
                for one, root in zip(segments, roots)
            ]
            if (filled := self._fill(following, roots, reserved)) is None:
                break
            chosen.append(choose(outputs[-1][0], number - 1))
            outputs.append(self._steps.launch(filled, chosen[-1].clamp(min=0)))
        chosen.append(choose(outputs[-1][0], len(outputs) - 1))
        return outputs, ChosenTokens(torch.stack(chosen, 1))

    @inference_mode
    def prepare(self, segments: Sequence[TreeSegment], trees: Sequence[Tree]) -> bool:
        """Prepare the step with these segments, if the newest frame has trees and no KV policy forbids it.
        Return whether that is so: if True, `launch_drafts` is to be called when the trees are known; if
        False, no step is predicted.

        segments: The predicted segments. Their own trees do not matter.
        trees: A tree of the expected shape for each segment; the tokens are open. If the shapes of trees
            changed in the previous step, preparing is left to `launch_drafts`.

        A step that was predicted before is discarded. True is also returned if pages or graphs have no room
        for the step; `launch_drafts` then returns False.
        """
        self._discard()
        if self._trees_continue and self._shapes_repeat:
            self._prepare(segments, trees)
        elif self._trees_continue:
            self._step = SpeculativeStep(segments, trees)
        return self._trees_continue

    @inference_mode
    def launch_drafts(self, trees: Sequence[Tree]) -> bool:
        """Launch the step of the last `prepare`. Return whether it was launched: False if no step is
        predicted, if it does not fit, or if a token id is beyond the vocabulary.

        trees: The drafter's trees, one per predicted segment, in their order.

        The step is prepared here if `prepare` has left that to this call, and prepared again if the shapes
        differ from the expected ones.

        The timer starts, and whether the shapes were as expected is remembered for the next `prepare`,
        unless no step is predicted or a token id is beyond the vocabulary.
        """
        step = self._step
        if step is None or max(max(tree.tokens) for tree in trees) >= self._vocabulary:
            return False
        self._start_timer()
        was_prepared = self._shapes_repeat
        self._shapes_repeat = all(tree.parents == one.parents for tree, one in zip(trees, step.trees))
        if not (self._shapes_repeat and was_prepared):
            segments = step.segments
            self._discard()
            step = self._prepare(segments, trees)
        step.trees = trees
        return self._launch(_tokens(trees))

    @inference_mode
    def launch_selected(self, segments: Sequence[TreeSegment], trees: DeviceTrees) -> bool:
        """Launch the step with trees that the device selects. Return whether it was launched.

        segments: The next segments; each tree is the root alone, which is known. A sequence's first tree
            (`draft_round` 1) stays a root.
        trees: Trees of a fixed number of nodes, which the host has not read.

        Returns False if graphs cannot take such trees, or if a window would hide part of the KV from the
        deepest trees that so many nodes can form. Call `confirm` when the host knows the trees.

            # nodes 4, draft rounds [3, 5, 1] -> chains of 4, 4 and 1 tokens are planned

        Returns False, too, if the newest frame has no trees, if a sequence of it has a KV policy other than a
        window, or if pages or graphs have no room. A step that was predicted before is discarded.
        """
        self._discard()
        if not (self._trees_continue and self._steps.accepts_device_trees):
            return False
        # One tree serves all sequences: building one for each of 64 sequences, say, would delay the launch.
        unknown = _unread_tree(trees.nodes)
        step = self._prepare(segments, [unknown if one.draft_round > 1 else one.tree for one in segments])
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

        trees: The trees that the host has read, one per segment of the step, in their order.

        The timer starts in any case. After True, the state is CONFIRMED.
        """
        self._start_timer()
        step = self._step
        if step is None or step.state is not OverlapState.LAUNCHED:
            return False
        if any(len(tree.tokens) != len(planned.tokens) for tree, planned in zip(trees, step.trees)):
            return False
        step.trees = trees
        step.timed = True
        step.apply(OverlapEvent.MATCHED)
        return True

    def pause_timer(self) -> None:
        """Stop counting time for the confirmed step, whose frame does not come yet. The time counts again
        from the frame's arrival on. Nothing happens without a step.
        """
        if self._step:
            self._step.timed = False

    def run_prepared(self, step: SpeculativeStep, entry: Sequence[int] | Tensor) -> Outputs:
        """Launch a prepared step with the inputs of its frame, and return its hidden states and fused
        features. The step is confirmed.

        step: A step in the state PREPARED.
        entry: Ids of its tokens, or hidden states [num_tokens, hidden_size] that enter the layers.

        The timer is not started here.
        """
        assert step.filled is not None
        step.outputs = self._steps.launch(step.filled, entry)
        step.apply(OverlapEvent.LAUNCHED, OverlapEvent.MATCHED)
        return step.outputs

    def _prepare(self, segments: Sequence[TreeSegment], trees: Sequence[Tree]) -> SpeculativeStep:
        """Prepare a step: reserve pages, plan the frame, and fill the graphs' inputs. Return the step, which
        is the predicted one now. If pages are too few, or if no graph has room, it stays in the state IDLE.

        segments: The predicted tree segments. Their own trees do not matter.
        trees: For each segment, a tree of the shape that it feeds; its token ids may differ from those with
            which the step is launched.

        A step in the state IDLE has reserved no pages if pages were too few; if only a graph had no room,
        its pages stay reserved until it is discarded.
        """
        step = SpeculativeStep(segments, trees)
        self._step = step
        step.filled = self._fill(segments, trees, step.reserved)
        if step.filled:
            step.apply(OverlapEvent.WRITTEN)
        return step

    def _fill(
        self, segments: Sequence[TreeSegment], trees: Sequence[Tree], reserved: list[tuple[int, int]]
    ) -> FilledStep | None:
        """Reserve pages for one pass, plan it, and fill the graphs' inputs. Return them, or None if pages are
        too few, or if no graph has room.

        segments: The segments of the pass. Their own trees do not matter.
        trees: For each segment, a tree of the shape that it feeds; its token ids do not matter.
        reserved: Pages that are reserved for the pass are added, see `SpeculativeStep.reserved`.
        """
        table = self._table
        needed = table.missing_pages(
            [(one.sequence, one.committed + len(tree.tokens)) for one, tree in zip(segments, trees)]
        )
        if sum([pages for _, pages in needed]) > table.free:
            return None
        reserved += needed
        plan = plan_frame(table, Frame(0, 0, segments=tuple(segments)), trees)
        if plan.trimmed:
            self._kv.clear_pages(plan.trimmed)
        return self._steps.fill(StepRows((), plan.positions, plan.slots, plan.spans, plan.moves))

    def _launch(self, tokens: list[int], open_tokens: list[int] | None = None) -> bool:
        """Launch the predicted step, for which the timer has started. Return whether it was launched: False
        if no step is prepared, or if it has another number of tokens.

        tokens: Token ids of all its trees, in frame order.
        open_tokens: The same token ids if the step's trees name other ones, see `SpeculativeStep.tokens`.
            None: the trees name these ids.

        After True the state is CONFIRMED and the step's time counts.
        """
        step = self._step
        if step is None or step.state is not OverlapState.PREPARED or len(tokens) != step.rows:
            return False
        step.tokens = open_tokens
        step.timed = True
        self.run_prepared(step, tokens)
        return True

    def _discard(self) -> None:
        """Discard the predicted step and undo its page reservations. Nothing happens without a step.

        If the step was launched, its pages are cleared, because it may have written to them; and the KV moves
        that it has applied are remembered for its sequences.

        Afterwards no step is predicted. A step that was prepared or launched is in the state DISCARDED.
        """
        step = self._step
        self._step = None
        if step is None:
            return
        was_launched = step.on_device
        if was_launched:
            self._moved_to |= {one.sequence: one.committed for one in step.segments}
        if step.state is not OverlapState.IDLE:
            step.apply(OverlapEvent.DIFFERED)
        unreserve = self._table.unreserve
        freed = [page for reserved in reversed(step.reserved) for page in unreserve(*reserved)]
        if was_launched and freed:
            self._kv.clear_pages(freed)

    def _forget(self, closings: Sequence[int]) -> None:
        """Drop what is remembered of discarded steps for sequences that have ended. Unknown ids are ignored.

        closings: Ids of the sequences.
        """
        for sequence in closings:
            self._moved_to.pop(sequence, None)

    def _without_applied_move(self, segment: Segment) -> Segment:
        """Return the segment without its KV moves, if a discarded step has applied them; otherwise the
        segment itself. What is remembered for its sequence is dropped.

        segment: A segment of the frame that runs instead.

        Prompt chunks, segments without moves, and segments at another position are returned unchanged.
        """
        moved = self._moved_to.pop(segment.sequence, None)
        if isinstance(segment, TreeSegment) and segment.keep and segment.committed == moved:
            return replace(segment, keep=(0,))
        return segment

    def _policies_allow(self, segments: Sequence[Segment]) -> bool:
        """Return whether the step after a frame may be predicted: no sequence of the frame has a KV policy
        other than a window. Return True for no segments.

        segments: The segments of the newest frame.
        """
        policies = [self._table.policy(one.sequence) for one in segments] if self._table.has_policies else ()
        return all(policy is None or isinstance(policy, Window) for policy in policies)


def _following(segment: Segment) -> TreeSegment:
    """Return the tree segment that follows a segment if its sequence generates one token. The token is not
    known yet, so 0 stands for it.

    segment: A tree of one node, a chain of a frame of several passes, or a final prompt chunk.

    For example:

        # tree at committed 12 -> committed 13, keep (0,); final chunk of tokens 0..8 -> round 1, committed 9
    """
    if isinstance(segment, TreeSegment):
        kept = tuple(range(len(segment.tree.tokens)))
        committed = segment.committed + len(kept)
        return TreeSegment(segment.sequence, segment.draft_round, committed, kept, single(0))
    return TreeSegment(segment.sequence, 1, segment.start + len(segment.tokens), (), single(0))


@lru_cache(CACHED_TREES)
def _unread_tree(num_nodes: int) -> Tree:
    """Return a tree that stands for one that the host has not read: a chain of tokens 0.

    num_nodes: Number of nodes.
    """
    return chain((0,) * num_nodes)


def unknown_chain(root: int, num_nodes: int) -> Tree:
    """Return the chain of a sequence in a frame of several passes: its tokens after the root are 0, because
    they are not known yet, see `Frame.extra_passes`.

    root: Token id of the root.
    num_nodes: Number of nodes, which is the number of passes.
    """
    return chain((root, *(0,) * (num_nodes - 1)))


def _runs(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of numbers (start, stop), in which each range that begins where another one stops is
    joined to it.

    parts: Ascending ranges (start, stop). Without ranges, the result is one empty range, because torch cannot
        concatenate no tensors.

        # (0, 3), (3, 5), (6, 8) -> [(0, 5), (6, 8)]
    """
    runs = list[tuple[int, int]]()
    for start, stop in parts:
        if runs and start == runs[-1][1]:
            start, _ = runs.pop()
        runs.append((start, stop))
    return runs or [(0, 0)]


def _rows_of(values: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Return some rows of a tensor, [num_rows, width]. They are sliced, because indices would have to be sent
    to the device first. The rows of a single range are a view of `values`.

    values: Rows of all tokens, [num_tokens, width].
    runs: The rows, as ranges (start, stop), at least one.
    """
    parts = [values[start:stop] for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _join(outputs: Sequence[Outputs]) -> Outputs:
    """Return the outputs of several passes as those of one step, whose tokens are in the order of sequences.

    outputs: Hidden states [num_sequences, hidden_size] and fused features of every pass.

        # 2 passes of the sequences a, b: [a0 b0], [a1 b1] -> [a0 a1 | b0 b1]
    """
    hidden, fused = zip(*outputs)
    features = [one for one in fused if one is not None]
    joined = torch.stack(features, 1).flatten(0, 1) if features else None
    return torch.stack(hidden, 1).flatten(0, 1), joined


def _tokens(trees: Iterable[Tree]) -> list[int]:
    """Return the token ids of all trees, one tree after the other.

    trees: Trees in frame order.
    """
    return [token for tree in trees for token in tree.tokens]
