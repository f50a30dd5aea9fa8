"""Pausing, catching up and resuming of drafts: one table for stage 0 and for the drafter.

Theory of operation. A drafter whose trees do not pay pauses for a number of trees. Meanwhile stage 0 asks it
for nothing and the last stage sends it nothing, so that a step costs what it costs without a drafter. When
the pause is over the last stage sends what the drafter missed, at most a bounded number of hidden states with
every step, and stage 0 does not wait for trees before the drafter says that it has caught up.

    DRAFTING --PAUSE_BEGAN--> PAUSED --PAUSE_ENDED--> CATCHING_UP --CAUGHT_UP--> DRAFTING

Both ends keep a `DraftPause` of their own and apply the same events to it: stage 0 when it launches frames
and when the drafter speaks, the drafter when steps come back. Values in, values out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

# Steps. A pause with less left is over: steps are trees divided by sequences, whose sum is inexact. Untuned.
STEP_EPSILON: Final = 1e-6


class PauseState(Enum):
    """ABSENT: there is no drafter. DRAFTING: trees are asked for, and waited for. PAUSED: the drafter is sent
    nothing. CATCHING_UP: the drafter is sent what it missed, and not waited for.
    """

    ABSENT = auto()
    DRAFTING = auto()
    PAUSED = auto()
    CATCHING_UP = auto()


class PauseEvent(Enum):
    """JOINED: a drafter speaks where there was none. LEFT: the drafter is gone. PAUSE_BEGAN: the drafter says
    that it will draft nothing for a number of trees. PAUSE_ENDED: those have passed, or the sequences that
    the pause began with have ended, or as much is unsent as may be. MISSED: a sequence continues whose tokens
    the drafter never saw, after a handover. CAUGHT_UP: the drafter says so, or was given long enough.
    """

    JOINED = auto()
    LEFT = auto()
    PAUSE_BEGAN = auto()
    PAUSE_ENDED = auto()
    MISSED = auto()
    CAUGHT_UP = auto()


# The state after an event. Events that a state does not name leave it as it is: a drafter that catches up may
# be told once more that it has, and what is missed during a pause is sent after it like everything else.
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
    """Return the state after `event`."""
    return TRANSITIONS[state].get(event, state)


@dataclass(frozen=True, slots=True)
class DraftPause:
    """A state, and how much of a pause is left.

    A pause is a number of trees. It also ends after as many steps as those trees were when it began: what
    does not pay for eight sequences may pay for the one that is left of them.

    >>> DraftPause().begin(80, sequences=8).passed(8, sequences=8).steps_left
    9.0
    """

    state: PauseState = PauseState.DRAFTING
    # Trees that the pause still lasts.
    trees_left: int = 0
    # Steps that the pause still lasts.
    steps_left: float = 0.0
    # Trees that went without drafts since the pause began, or since they were last reported.
    passed_trees: int = 0

    @property
    def paused(self) -> bool:
        return self.state is PauseState.PAUSED

    def on(self, event: PauseEvent) -> DraftPause:
        """Return the value after an event that carries nothing else."""
        return replace(self, state=next_state(self.state, event))

    def begin(self, trees: int, sequences: int) -> DraftPause:
        """Return the value when the drafter pauses for so many trees, which `sequences` write."""
        begun = DraftPause(self.state, trees, trees / max(sequences, 1))
        return begun.on(PauseEvent.PAUSE_BEGAN)

    def passed(self, trees: int, sequences: int) -> DraftPause:
        """Return the value after so many trees of `sequences` sequences went without drafts. The pause ends
        with its trees, with its steps, or when no drafted sequence is left.
        """
        if not self.paused:
            return self
        steps_left = self.steps_left - trees / max(sequences, 1)
        trees_left = max(self.trees_left - trees, 0)
        now = replace(
            self, trees_left=trees_left, steps_left=steps_left, passed_trees=self.passed_trees + trees
        )
        return now.end() if not sequences or not trees_left or steps_left < STEP_EPSILON else now

    def end(self) -> DraftPause:
        """Return the value when the pause ends, whatever is left of it."""
        return replace(self, trees_left=0, steps_left=0.0).on(PauseEvent.PAUSE_ENDED)
