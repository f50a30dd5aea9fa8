"""Drafts on the verifier's own thread, and speculative launches of the steps that verify these drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from specsot.core.device_verification import DeviceTrees, DeviceVerification
from specsot.core.frames import Drafts, Features, Frame, Outcome, Payload, PromptChunk, Segment, TreeSegment
from specsot.core.tree import Tree, single
from specsot.transport.links import ColocatedDrafter


class RunsAhead(Protocol):
    """A stage that can launch the next step speculatively. See `DecoderStage`."""

    def go_on(self, tokens: list[int]) -> bool:
        """See `DecoderStage.go_on`."""
        ...

    def apply_forecast(self, segments: Sequence[TreeSegment]) -> bool:
        """See `DecoderStage.apply_forecast`."""
        ...

    def grow_on(self, trees: Sequence[Tree]) -> bool:
        """See `DecoderStage.grow_on`."""
        ...

    def launch_with_device_trees(self, segments: Sequence[TreeSegment], trees: DeviceTrees) -> bool:
        """See `DecoderStage.launch_with_device_trees`."""
        ...

    def read(self, trees: Sequence[Tree]) -> bool:
        """See `DecoderStage.read`."""
        ...


# Returns the place of a segment's sequence among a frame's trees, if its next tree is the drafter's.
# Otherwise None.
Place = Callable[[Segment], tuple[int, int] | None]


class DraftedStep:
    """The step after a verified frame, if it consists of trees for exactly the sequences that continue.

    Sequences that have just generated their first token come last. If the device chooses the trees, the tree
    of such a sequence is its root alone.

    unread: Trees that the device has chosen and the host has not read, if the step has been launched with
        them.
    """

    def __init__(
        self, stage: RunsAhead, frame: Frame, outcomes: Mapping[int, Outcome], places: Sequence[object]
    ) -> None:
        """Predict the segments that follow `frame`.

        outcomes: Of the frame, by sequence.
        places: Of the frame's segments, see `ColocatedDrafts`.
        """
        self._stage = stage
        self._frame = frame
        self._outcomes = outcomes
        self._segments = self._following(places)
        self.unread: DeviceTrees | None = None

    def launch(self, drafter: ColocatedDrafter) -> None:
        """Launch the step before results are made, if the device chooses the trees.

        Not if a grammar forces tokens, because the host adds those to the trees.
        """
        forced = any(one.forced for one in self._outcomes.values())
        trees = drafter.choose_async(self._segments) if self._segments and not forced else None
        if trees and self._stage.launch_with_device_trees(self._segments, trees):
            self.unread = trees

    def arrange(self) -> None:
        """Prepare the step while the trees grow, with the shapes of the frame's own trees."""
        if self._segments and not self.unread:
            segments = self._frame.segments
            trees = {one.sequence: one.tree for one in segments if isinstance(one, TreeSegment)}
            alike = [replace(one, tree=trees.get(one.sequence, one.tree)) for one in self._segments]
            if not self._stage.apply_forecast(alike):
                self._segments = []

    def begin(self, drafts: Drafts) -> bool:
        """Launch the step with these drafts, or confirm it if it was launched already. Return whether a step
        is running with trees for all sequences.

        A draft is needed for every sequence that continues, with the expected draft round and root.
        """
        found = {draft.sequence: draft for draft in drafts.drafts}
        trees = list[Tree]()
        for segment in self._segments:
            draft = found.get(segment.sequence)
            if (
                draft is None
                or draft.draft_round != segment.draft_round
                or draft.tree.tokens[0] != segment.tree.tokens[0]
            ):
                return False
            trees.append(draft.tree)
        if self.unread:
            return self.unread.taken and self._stage.read(trees)
        return bool(trees) and self._stage.grow_on(trees)

    def _following(self, every: Sequence[object]) -> list[TreeSegment]:
        """Return the roots of the next frame. Return an empty list if a segment has no outcome or no new
        token, or if the next frame would have another order.

        every: Places of the frame's segments.

            # tree at committed 12, accepted (0, 2), tokens (x, y) -> root y at committed 14, keep (0, 2)
        """
        following = list[TreeSegment]()
        places = list[Any]()
        for segment, place in zip(self._frame.segments, every):
            outcome = self._outcomes.get(segment.sequence)
            if outcome is not None and outcome.end:
                continue
            if outcome is None or not outcome.tokens:
                return []
            tree = isinstance(segment, TreeSegment)
            committed = segment.committed if tree else segment.start + len(segment.tokens)
            committed = committed + len(outcome.accepted)
            draft_round = outcome.draft_round + 1
            root = single(outcome.tokens[-1])
            following.append(TreeSegment(segment.sequence, draft_round, committed, outcome.accepted, root))
            places.append(place)
        return following if places == sorted(places) else []


class ColocatedDrafts:
    """Asks the drafter on this thread for trees, and launches the next step with them.

    drafter: None if the drafter is elsewhere, or if there is none.
    """

    def __init__(self, stage: RunsAhead | None, place: Place, quiet: Callable[[], bool]) -> None:
        """Start without a drafter.

        stage: Launches steps. None if no stage can.
        place: Returns a segment's place among a frame's trees if its sequence's next tree is the drafter's,
            whatever tokens it generates; otherwise None.
        quiet: Returns whether no message has arrived that would change the next frame.
        """
        self.drafter: ColocatedDrafter | None = None
        self._stage = stage
        self._place = place
        self._quiet = quiet
        # Number and verification of the frame for which `begin` was called last.
        self._begun: tuple[int, DeviceVerification] | None = None

    def begin(self, frame: Frame, targets: Payload) -> None:
        """Let the drafter start from a verification whose results are still on the device.

        targets: int32 [num_tokens] on the device, see `DeviceVerification`.

        This is done only for frames of trees followed by prompt chunks, with features, while drafting is
        active.
        """
        self._begun = None
        if (
            self.drafter is None
            or frame.fused is None
            or frame.paused
            or frame.catching_up
            or not frame.number
        ):
            return
        trees = [one for one in frame.segments if isinstance(one, TreeSegment) and self._place(one)]
        if trees and all(isinstance(one, PromptChunk) for one in frame.segments[len(trees) :]):
            verdict = DeviceVerification(frame.epoch, tuple(trees), targets, frame.fused)
            self._begun = frame.number, verdict
            self.drafter.begin_async(verdict)

    def record_misprediction(self, sequence: int) -> None:
        """Record that the host has found other target tokens for this sequence than the device."""
        if self._begun:
            self._begun[1].mispredicted.add(sequence)

    def follow(self, frame: Frame, outcomes: Mapping[int, Outcome]) -> DraftedStep | None:
        """Return the step that follows a verified frame, launched already if the device chooses its trees.
        Return None if the next frame cannot be predicted.
        """
        if not (frame.number and self._stage and self.drafter):
            return None
        places = [*map(self._place, frame.segments)]
        if not all(places):
            return None
        ahead = DraftedStep(self._stage, frame, outcomes, places)
        number, verdict = self._begun or (0, None)
        if verdict and number == frame.number and not verdict.mispredicted and self._quiet():
            ahead.launch(self.drafter)
        return ahead

    def draft(
        self, features: Sequence[Features], ahead: DraftedStep | None = None
    ) -> tuple[tuple[Drafts, ...] | None, bool]:
        """Have the drafter grow trees. Return its messages for stage 0, and whether the next step is running
        with these trees.

        features: Messages for the drafter, in order.
        ahead: The step that follows, from `follow`. None if it cannot be predicted.

        The messages are None if the drafter is elsewhere, if there is nothing to send it, or if it takes
        nothing this way now.
        """
        if self.drafter is None or not features:
            return None, False
        drafts = self.drafter.draft(features, ahead.arrange if ahead else lambda: None)
        will_continue = drafts and ahead and (ahead.unread or self._quiet()) and ahead.begin(drafts[0])
        return drafts, bool(will_continue)
