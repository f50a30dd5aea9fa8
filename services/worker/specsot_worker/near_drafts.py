"""Drafts by a drafter in the verifier's own thread, and the lap that takes them, begun as early as can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from specsot.core.frames import Drafts, Features, Frame, Outcome, Payload, PromptChunk, Segment, TreeSegment
from specsot.core.tree import Tree, single
from specsot.core.verdict import UnreadTrees, UnreadVerdict
from specsot.transport.links import NearDrafter


class RunsAhead(Protocol):
    """A stage that can begin the next frame; see `DecoderStage`."""

    def go_on(self, tokens: list[int]) -> bool: ...

    def foresee(self, segments: Sequence[TreeSegment]) -> bool: ...

    def grow_on(self, trees: Sequence[Tree]) -> bool: ...

    def go_unread(self, segments: Sequence[TreeSegment], trees: UnreadTrees) -> bool: ...

    def read(self, trees: Sequence[Tree]) -> bool: ...


Place = Callable[[Segment], tuple[int, int] | None]


class DraftedLap:
    """What follows a frame that was judged, if trees come for all in it that go on, and for nobody else. Who
    has written its first token comes behind those, with its root alone.

    unread: trees that only a device knows, and with which it runs already.
    """

    def __init__(
        self, stage: RunsAhead, frame: Frame, outcomes: Mapping[int, Outcome], places: Sequence[object]
    ) -> None:
        """places: of the frame's segments, see `NearDrafts`."""
        self._stage = stage
        self._frame = frame
        self._outcomes = outcomes
        self._segments = self._following(places)
        self.unread: UnreadTrees | None = None

    def launch(self, drafter: NearDrafter) -> None:
        """Before anything is made of the verdict, if a device chooses the trees: not where a form forces
        tokens, which the host hangs into them.
        """
        forced = any(one.forced for one in self._outcomes.values())
        trees = drafter.choose_early(self._segments) if self._segments and not forced else None
        if trees and self._stage.go_unread(self._segments, trees):
            self.unread = trees

    def arrange(self) -> None:
        """With the trees of that frame, while others grow."""
        if self._segments and not self.unread:
            segments = self._frame.segments
            trees = {one.sequence: one.tree for one in segments if isinstance(one, TreeSegment)}
            alike = [replace(one, tree=trees.get(one.sequence, one.tree)) for one in self._segments]
            if not self._stage.foresee(alike):
                self._segments = []

    def begin(self, drafts: Drafts) -> bool:
        """Whether trees came for all, and it runs."""
        found = {draft.sequence: draft for draft in drafts.drafts}
        trees = list[Tree]()
        for segment in self._segments:
            draft = found.get(segment.sequence)
            if draft is None or draft.step != segment.step or draft.tree.tokens[0] != segment.tree.tokens[0]:
                return False
            trees.append(draft.tree)
        if self.unread:
            return self.unread.taken and self._stage.read(trees)
        return bool(trees) and self._stage.grow_on(trees)

    def _following(self, every: Sequence[object]) -> list[TreeSegment]:
        """Roots of what comes; none at all, where not all that go on have trees, or others go between."""
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
            step = outcome.step + 1
            root = single(outcome.tokens[-1])
            following.append(TreeSegment(segment.sequence, step, committed, outcome.accepted, root))
            places.append(place)
        return following if places == sorted(places) else []


class NearDrafts:
    """Asks it, and goes on with what comes of it. drafter: None where it is elsewhere, or nothing drafts.

    place: of a sequence whose next tree is the drafter's, whatever it writes, among those of a frame; else
    None. quiet: nothing has come that would change the next frame.
    """

    def __init__(self, stage: RunsAhead | None, place: Place, quiet: Callable[[], bool]) -> None:
        self.drafter: NearDrafter | None = None
        self._stage = stage
        self._place = place
        self._quiet = quiet
        self._begun: tuple[int, UnreadVerdict] | None = None  # the frame that `begin` was asked for last

    def begin(self, frame: Frame, targets: Payload) -> None:
        """Of a frame whose verdict is there on the device, before the host has it."""
        self._begun = None
        if self.drafter is None or frame.fused is None or frame.resting or frame.waking or not frame.number:
            return
        trees = [one for one in frame.segments if isinstance(one, TreeSegment) and self._place(one)]
        if trees and all(isinstance(one, PromptChunk) for one in frame.segments[len(trees) :]):
            verdict = UnreadVerdict(frame.epoch, tuple(trees), targets, frame.fused)
            self._begun = frame.number, verdict
            self.drafter.begin_early(verdict)

    def went_astray(self, sequence: int) -> None:
        """The verdict of `begin` is not what the host has found of it."""
        if self._begun:
            self._begun[1].astray.add(sequence)

    def follow(self, frame: Frame, outcomes: Mapping[int, Outcome]) -> DraftedLap | None:
        """What comes behind a frame that was judged, begun if a device chooses its trees; None where other
        things may come.
        """
        if not (frame.number and self._stage and self.drafter):
            return None
        places = [*map(self._place, frame.segments)]
        if not all(places):
            return None
        ahead = DraftedLap(self._stage, frame, outcomes, places)
        number, verdict = self._begun or (0, None)
        if verdict and number == frame.number and not verdict.astray and self._quiet():
            ahead.launch(self.drafter)
        return ahead

    def draft(
        self, features: Sequence[Features], ahead: DraftedLap | None = None
    ) -> tuple[tuple[Drafts, ...] | None, bool]:
        """Have trees grown at once; None: the drafter is told in another way. And whether what comes behind
        the frame runs with them.
        """
        if self.drafter is None or not features:
            return None, False
        drafts = self.drafter.draft(features, ahead.arrange if ahead else lambda: None)
        goes_on = drafts and ahead and (ahead.unread or self._quiet()) and ahead.begin(drafts[0])
        return drafts, bool(goes_on)
