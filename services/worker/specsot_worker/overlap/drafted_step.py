"""Drafts on the verifier's own thread, and speculative launches of the steps that verify these drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import le
from typing import Any, Protocol

from specsot.core.device_verification import ColocatedDrafter, DeviceTrees, DeviceVerification, DraftHandle
from specsot.core.frames import Drafts, Features, Frame, Outcome, Payload, PromptChunk, Segment, TreeSegment
from specsot.core.overlap import OverlapState
from specsot.core.tree import Tree, single
from specsot_worker.overlap.next_step import NextStep


class OverlapsSteps(Protocol):
    """A stage that may launch its next step speculatively. `DecoderStage` implements it."""

    @property
    def next_step(self) -> NextStep | None:
        """The predictor and launcher of the stage's next step. None if the stage launches no step before its
        frame arrives.
        """
        ...


# Returns the place of each segment's sequence among a frame's trees, if its next tree is the drafter's.
# Otherwise None.
Places = Callable[[Sequence[Segment]], Sequence[tuple[int, int] | None]]


class DraftedStep:
    """The step that follows a verified frame, as predicted from its outcomes: trees for exactly the sequences
    that continue.

    Sequences that have just generated their first token come last. If the device selects the trees, the tree
    of such a sequence is its root alone.

    selected: Trees that the device selects and the host has not read, if the step has been launched with
        them. Otherwise None.
    """

    def __init__(
        self, step: NextStep, frame: Frame, outcomes: Mapping[int, Outcome], places: Sequence[object]
    ) -> None:
        """Predict the segments that follow a verified frame.

        step: Launches the step.
        frame: The verified frame.
        outcomes: Outcomes of the frame, by sequence.
        places: For each segment of the frame, the pair by which the next frame's trees are sorted, see
            `place_of`.
        """
        self._step = step
        self._frame = frame
        self._outcomes = outcomes
        self._segments = self._following(places)
        self.selected: DeviceTrees | None = None

    def launch_selected(self, handle: DraftHandle) -> None:
        """Launch the step before results are made, if the device selects the trees, and set `selected`.
        Nothing happens if no segments are predicted, if the drafter cannot select on the device, or if a
        grammar forces tokens, because the host adds those to the trees.

        handle: The trees, which grow on the device.

        If the step cannot be launched with the trees, `selected` stays None.
        """
        forced = [one for one in self._outcomes.values() if one.forced]
        trees = handle.select(self._segments) if self._segments and not forced else None
        if trees and self._step.launch_selected(self._segments, trees):
            self.selected = trees

    def prepare(self) -> None:
        """Prepare the step while the trees grow, with the shapes of the frame's own trees. Nothing happens if
        no segments are predicted, or if the device has selected the trees. If preparing is refused, no step
        is predicted any more.

        A sequence without a tree in the frame is expected to have its root alone.
        """
        if self._segments and not self.selected:
            # The chains of a frame of several passes say nothing about the drafter's trees.
            segments = () if self._frame.extra_passes else self._frame.segments
            trees = {one.sequence: one.tree for one in segments if isinstance(one, TreeSegment)}
            expected = [trees.get(one.sequence, one.tree) for one in self._segments]
            if not self._step.prepare(self._segments, expected):
                self._segments = []

    def launch_or_confirm(self, drafts: Drafts) -> None:
        """Launch the step with the drafter's trees, or confirm it if it was launched already.

        drafts: The trees that the drafter proposed, by sequence and draft round.

        Nothing happens unless there is a draft for every sequence that continues, with the expected draft
        round and root. `NextStep.state` is CONFIRMED if the step runs with these trees.

        If the trees were selected on the device but the drafter did not confirm them, the step is not
        confirmed either.
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
                return
            trees.append(draft.tree)
        if self.selected is None:
            if trees:
                self._step.launch_drafts(trees)
        elif self.selected.confirmed:
            self._step.confirm(trees)

    def _following(self, places_of_segments: Sequence[object]) -> list[TreeSegment]:
        """Return the tree segments of the next frame, each with a tree of its root only. Return [] if a tree
        has no outcome, if an outcome has no new token, or if the next frame would have another order.
        Sequences that end are left out. So are prompt chunks without an outcome, which are not the last ones
        of their prompts or belong to a prefix: no tree follows them, but at most prompts, which may share the
        next frame with the trees.

        places_of_segments: For each segment of the frame, the pair by which trees are sorted.

        For example:

            # tree at committed 12, accepted (0, 2), tokens (x, y) -> root y at committed 14, keep (0, 2)

        Each segment's draft round is the outcome's plus one, and its root the newest token.
        """
        following = list[TreeSegment]()
        places = list[Any]()
        find_outcome = self._outcomes.get
        for segment, place in zip(self._frame.segments, places_of_segments):
            outcome = find_outcome(segment.sequence)
            tree = isinstance(segment, TreeSegment)
            if outcome is None:
                if tree:
                    return []
                continue
            if outcome.end:
                continue
            if not outcome.tokens:
                return []
            accepted = outcome.accepted
            committed = segment.committed if tree else segment.start + len(segment.tokens)
            following.append(
                TreeSegment(
                    segment.sequence,
                    outcome.draft_round + 1,
                    committed + len(accepted),
                    accepted,
                    single(outcome.tokens[-1]),
                )
            )
            places.append(place)
        return following if all(map(le, places, places[1:])) else []


class ColocatedDrafts:
    """Caller of the drafter on this thread: asks it for trees, and launches the next step with them.

    drafter: The drafter on this thread. None if the drafter is elsewhere, or if there is none. The worker
        sets it.
    """

    def __init__(self, stage: OverlapsSteps | None, places: Places, is_quiet: Callable[[], bool]) -> None:
        """Start without a drafter.

        stage: Launches steps. None if no stage can.
        places: Returns each segment's place among a frame's trees if its sequence's next tree is the
            drafter's, whatever tokens it generates; otherwise None.
        is_quiet: Returns whether the next frame carries the trees of just the sequences that are verified.
        """
        self.drafter: ColocatedDrafter | None = None
        self._stage = stage
        self._places = places
        self._is_quiet = is_quiet
        # The drafts that follow the frame that is being verified, if they were started before the host has
        # read the result.
        self._handle: DraftHandle | None = None
        # The segments for which `_places` was called last, and what it returned; see `_places_of`.
        self._placed: tuple[Sequence[Segment], Sequence[tuple[int, int] | None]] = ((), ())

    def _places_of(self, segments: Sequence[Segment]) -> Sequence[tuple[int, int] | None]:
        """Return what the constructor's `places` returns for these segments. The result is cached until other
        segments are asked for, because `start` and `predict` ask for those of the same frame. It stays valid
        that long, because places change only between the verifications of two frames: when a grammar is set,
        and when a sequence is opened or forgotten.

        segments: All segments of the frame that is being verified: the tuple itself, because the cached
            segments are recognised by identity.
        """
        if self._placed[0] is not segments:
            self._placed = segments, self._places(segments)
        return self._placed[1]

    def start(self, frame: Frame, targets: Payload) -> None:
        """Let the drafter start the next drafts from a verification whose results are still on the device.

        frame: The frame that is being verified, with its fused features if the drafter reads features.
        targets: Target token ids of its logits, int32 [num_tokens] on the device, see `DeviceVerification`.

        Nothing is started without a drafter on this thread, while drafting is paused or catching up, for
        frame number 0, and unless the frame consists of at least one tree followed by prompt chunks alone.
        Nor is anything started if the next tree of any of these sequences may not be the drafter's. Drafts
        that were started before are dropped in any case.
        """
        self._handle = None
        if self.drafter is None or frame.paused or frame.catching_up or not frame.number:
            return
        placed = zip(frame.segments, self._places_of(frame.segments))
        trees = [segment for segment, place in placed if place and isinstance(segment, TreeSegment)]
        # A tree that has no place is not among `trees`, so that a tree remains after the first len(trees)
        # segments, and nothing is started.
        others = frame.segments[len(trees) :]
        if trees and not [segment for segment in others if not isinstance(segment, PromptChunk)]:
            verification = DeviceVerification(frame.epoch, tuple(trees), targets, frame.fused)
            self._handle = self.drafter.start_drafts(verification)

    def discard(self, sequence: int) -> None:
        """Record that the host has found other target tokens for a sequence than the device, so that the
        drafts that were started are not used. Nothing happens if no drafts were started.

        sequence: Id of the sequence.
        """
        if self._handle:
            self._handle.discard(sequence)

    def predict(self, frame: Frame, outcomes: Mapping[int, Outcome]) -> DraftedStep | None:
        """Return the step that follows a verified frame, launched already if the device selects its trees.
        Return None if the next frame cannot be predicted, or without a drafter.

        frame: The verified frame.
        outcomes: Its outcomes by sequence.

        None is also returned without a stage that launches steps, for frame number 0, if the next tree of a
        sequence that has a tree or an outcome is not certain to be the drafter's, and if `is_quiet` returns
        False. The step is launched here only if the drafts run on the device.
        """
        step = self._stage.next_step if self._stage else None
        if not (frame.number and step and self.drafter and self._is_quiet()):
            return None
        places = self._places_of(frame.segments)
        if not all(places) and any(
            place is None and (segment.sequence in outcomes or isinstance(segment, TreeSegment))
            for segment, place in zip(frame.segments, places)
        ):
            return None
        ahead = DraftedStep(step, frame, outcomes, places)
        if self._handle and self._handle.state is OverlapState.LAUNCHED:
            ahead.launch_selected(self._handle)
        return ahead

    def draft(
        self, features: Sequence[Features], ahead: DraftedStep | None = None
    ) -> tuple[Drafts, ...] | None:
        """Have the drafter grow trees, and launch or confirm the step that verifies them. Return the
        drafter's messages for stage 0.

        features: Messages for the drafter, in order.
        ahead: The step that follows, from `predict`. None if it cannot be predicted.

        Return None if the drafter is on another thread, if there are no features, or if the drafter accepts
        none this way now; the features must then be sent to it as messages.

        The step is launched or confirmed only if it has been launched with trees of the device, or if
        `is_quiet` returns True. Drafts that `start` has begun are used up.
        """
        handle = self._handle
        self._handle = None
        if self.drafter is None or not features:
            return None
        handle = handle or self.drafter.start_drafts()
        drafts = handle.result(features, ahead.prepare if ahead else lambda: None) if handle else None
        if drafts and ahead and (ahead.selected or self._is_quiet()):
            ahead.launch_or_confirm(drafts[0])
        return drafts
