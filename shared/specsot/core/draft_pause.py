"""Pausing, catching up and resuming of drafts: one table for stage 0 and for the drafter.

Theory of operation. A drafter whose trees are not profitable pauses for a number of trees. During the pause,
stage 0 requests no trees and the last stage sends no features, so that a step costs what it costs without a
drafter. Meanwhile the last stage keeps the features of the newest FEATURE_RING_ROWS tokens. When the pause is
over, it sends those that the drafter missed, at most a bounded number of hidden states with every step; after
a longer pause, the drafter skips the tokens whose features were overwritten. Stage 0 does not wait for trees
until the drafter reports that it has caught up.

    DRAFTING --PAUSE_BEGAN--> PAUSED --PAUSE_ENDED--> CATCHING_UP --CAUGHT_UP--> DRAFTING

Stage 0 and the drafter each keep a `DraftPause` and apply the same events to it: stage 0 when it launches
frames and when a message of the drafter arrives, the drafter when results of steps arrive. All functions are
pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

# Steps. A pause with less left is over, because steps are quotients of trees and sequences, whose
# floating-point sum is inexact. Untuned.
STEP_EPSILON: Final = 1e-6
# Hidden states. The last stage keeps the features of so many newest tokens of all sequences together, on its
# device: 16 MiB for a model with 4,096 numbers of 16 bits per feature. Given by the design.
FEATURE_RING_ROWS: Final = 2048


class PauseState(Enum):
    """Whether drafting is running, paused, or about to resume."""

    # Enum's own hash is a Python function, which every step would call. Members are compared by identity.
    __hash__ = object.__hash__

    # There is no drafter.
    ABSENT = auto()
    # Stage 0 requests trees and waits for them.
    DRAFTING = auto()
    # The drafter is sent neither features nor requests.
    PAUSED = auto()
    # The drafter is sent the features that it missed. Stage 0 does not wait for trees.
    CATCHING_UP = auto()


class PauseEvent(Enum):
    """What may change the state of drafting."""

    # See `PauseState`.
    __hash__ = object.__hash__

    # The first message of a drafter arrived where there was no drafter.
    JOINED = auto()
    # The drafter is lost or has left.
    LEFT = auto()
    # The drafter announced that it will draft nothing for a number of trees.
    PAUSE_BEGAN = auto()
    # The pause's trees have passed, or more than half of the sequences with which it began have ended.
    PAUSE_ENDED = auto()
    # A sequence that was migrated from the previous epoch continues, and the drafter never saw its tokens.
    MISSED = auto()
    # The drafter reported that it has caught up, or the time for catching up is over.
    CAUGHT_UP = auto()


# The state after an event, by state. An event that is missing from a state's row leaves the state unchanged:
# CAUGHT_UP may arrive twice, and tokens that are missed during a pause are sent after it like all others.
TRANSITIONS: Mapping[PauseState, Mapping[PauseEvent, PauseState]] = {
    PauseState.ABSENT: {
        PauseEvent.JOINED: PauseState.DRAFTING,
    },
    PauseState.DRAFTING: {
        PauseEvent.LEFT: PauseState.ABSENT,
        PauseEvent.PAUSE_BEGAN: PauseState.PAUSED,
        PauseEvent.MISSED: PauseState.CATCHING_UP,
    },
    PauseState.PAUSED: {
        PauseEvent.LEFT: PauseState.ABSENT,
        PauseEvent.PAUSE_BEGAN: PauseState.PAUSED,
        PauseEvent.PAUSE_ENDED: PauseState.CATCHING_UP,
    },
    PauseState.CATCHING_UP: {
        PauseEvent.LEFT: PauseState.ABSENT,
        PauseEvent.PAUSE_BEGAN: PauseState.PAUSED,
        PauseEvent.CAUGHT_UP: PauseState.DRAFTING,
    },
}


def next_state(state: PauseState, event: PauseEvent) -> PauseState:
    """Return the state after an event; the same state if `TRANSITIONS` has no entry for the event.

    state: the state before the event.
    event: what happened.
    """
    return TRANSITIONS[state].get(event, state)


@dataclass(frozen=True, slots=True)
class DraftPause:
    """The state of drafting (running, paused or resuming), and how much of a pause is left. Immutable:
    methods return a new value.

    A pause is a number of trees. It also ends after the number of steps that these trees would have taken
    when it began, and when fewer than half of its sequences are left, because drafting that is not profitable
    for eight sequences may be profitable for the last three of them.

    state: whether drafting is running, paused, or about to resume.
    trees_left: number of trees that the pause still lasts.
    steps_left: number of steps that the pause still lasts.
    sequences: number of drafted sequences when the pause began, at least 1.
    passed_trees: number of trees without drafts since the pause began, or since the number was last reported.

    >>> DraftPause().begin(80, sequences=8).passed(8, sequences=8).steps_left  # one of ten steps has passed
    9.0
    """

    state: PauseState = PauseState.DRAFTING
    trees_left: int = 0
    steps_left: float = 0.0
    sequences: int = 1
    passed_trees: int = 0

    @property
    def paused(self) -> bool:
        """True while the drafter is sent nothing."""
        return self.state is PauseState.PAUSED

    @property
    def max_steps_left(self) -> int:
        """Number of steps that the pause lasts at most, rounded up; 0 outside a pause."""
        return math.ceil(self.steps_left - STEP_EPSILON) if self.paused else 0

    def on(self, event: PauseEvent) -> DraftPause:
        """Return the value after an event that changes only the state, not the length of the pause.

        event: what happened. If it does not change the state, as in most steps, this value is returned.
        """
        state = next_state(self.state, event)
        return self if state is self.state else replace(self, state=state)

    def begin(self, trees: int, sequences: int) -> DraftPause:
        """Return the value at the beginning of a pause.

        The pause lasts `trees` trees, and at most `trees` / `sequences` steps, which is how many steps these
        trees take while every sequence has one tree per step. Where there is no drafter (state ABSENT), the
        state stays ABSENT.

        trees: number of trees for which nothing will be drafted, over all sequences.
        sequences: number of drafted sequences that decode now. 0 counts as 1.

        A pause that runs already is replaced.
        """
        sequences = max(sequences, 1)
        started = DraftPause(self.state, trees, trees / sequences, sequences)
        return started.on(PauseEvent.PAUSE_BEGAN)

    def passed(self, trees: int, sequences: int) -> DraftPause:
        """Return the value after `trees` trees of `sequences` sequences were verified without drafts.

        The pause ends when no trees or no steps are left, and when fewer than half of the sequences are left
        with which it began. Outside a pause, the value is returned unchanged.

        trees: number of trees that this step verified without drafts.
        sequences: number of drafted sequences that decode now.

        The counts of trees and steps that are left fall, and `passed_trees` rises by `trees`. When the pause
        ends, the state becomes CATCHING_UP, with 0 trees and steps left.
        """
        if not self.paused:
            return self
        steps_left = self.steps_left - trees / max(sequences, 1)
        trees_left = max(self.trees_left - trees, 0)
        updated = replace(
            self, trees_left=trees_left, steps_left=steps_left, passed_trees=self.passed_trees + trees
        )
        most_ended = 2 * sequences < self.sequences
        return updated.end() if most_ended or not trees_left or steps_left < STEP_EPSILON else updated

    def end(self) -> DraftPause:
        """Return the value after the pause is ended, even if trees or steps of it are left.

        The state becomes CATCHING_UP if it was PAUSED, and stays as it is otherwise.
        """
        return replace(self, trees_left=0, steps_left=0.0).on(PauseEvent.PAUSE_ENDED)
