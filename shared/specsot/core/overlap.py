"""States of work that a device is given before the host has read the result which the work depends on.

Theory of operation. A GPU idles while the host reads a result, decides what follows from it and launches
that. So the host prepares the work that most likely follows, and launches it early. Later the host reads the
result. Work that does follow from it is confirmed: its outputs count as if it had been launched then. Any
other work is discarded: its outputs are never used, its reservations are undone, and the device overwrites
what it wrote. Tokens therefore never depend on whether work overlapped.

                 WRITTEN             LAUNCHED             MATCHED
        IDLE ------------> PREPARED -----------> LAUNCHED ----------> CONFIRMED
          ^                    |                     |                    |
          |                    +----- DIFFERED ------+----- DIFFERED -----+-- RELEASED --> IDLE
          |                                          v
          +--------------- RELEASED ------------ DISCARDED

Three kinds of work have these states:

* the next step of a stage (`specsot_worker.overlap`): it depends on which tokens the running step accepts;
* the next draft trees (`specsot_drafter.overlap`): they depend on the same;
* the selection of tree nodes by the device: it depends on which trees the drafter sends.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class OverlapState(Enum):
    """How far a piece of overlapped work has come."""

    # Enum's own hash is a Python function, which a step would call some dozen times. Members are compared by
    # identity.
    __hash__ = object.__hash__

    # Nothing is reserved. At most it is known what would be computed.
    IDLE = auto()
    # Memory is reserved and the inputs are written, except for those that are not known yet.
    PREPARED = auto()
    # The device has the work. The host does not know yet whether its outputs can be used.
    LAUNCHED = auto()
    # The device has the work, and what the host has read so far agrees with it.
    CONFIRMED = auto()
    # The host has read that something else follows. The outputs must not be used.
    DISCARDED = auto()


class OverlapEvent(Enum):
    """What happens to a piece of overlapped work."""

    # See `OverlapState`.
    __hash__ = object.__hash__

    # Memory was reserved and the inputs were written.
    WRITTEN = auto()
    # The device was given the work.
    LAUNCHED = auto()
    # The host has read a result, and the work follows from it.
    MATCHED = auto()
    # The host has read a result, and other work follows from it; or the work is no longer wanted.
    DIFFERED = auto()
    # The outputs were used, or what a discarded piece of work had reserved was given back.
    RELEASED = auto()


# The state after an event, by state. An event that is missing from a state's row is a defect of the caller:
# for example, outputs of work that was discarded must not be confirmed.
TRANSITIONS: Mapping[OverlapState, Mapping[OverlapEvent, OverlapState]] = {
    OverlapState.IDLE: {
        OverlapEvent.WRITTEN: OverlapState.PREPARED,
    },
    OverlapState.PREPARED: {
        OverlapEvent.LAUNCHED: OverlapState.LAUNCHED,
        OverlapEvent.DIFFERED: OverlapState.DISCARDED,
    },
    OverlapState.LAUNCHED: {
        OverlapEvent.MATCHED: OverlapState.CONFIRMED,
        OverlapEvent.DIFFERED: OverlapState.DISCARDED,
    },
    OverlapState.CONFIRMED: {
        # A confirmed step is discarded if a message changes the next frame before it is composed.
        OverlapEvent.DIFFERED: OverlapState.DISCARDED,
        OverlapEvent.RELEASED: OverlapState.IDLE,
    },
    OverlapState.DISCARDED: {
        OverlapEvent.DIFFERED: OverlapState.DISCARDED,
        OverlapEvent.RELEASED: OverlapState.IDLE,
    },
}


def next_state(state: OverlapState, event: OverlapEvent) -> OverlapState:
    """Return the state after an event. Raises KeyError if the event is impossible in this state.

    state: the state before the event.
    event: what happened to the work.
    """
    return TRANSITIONS[state][event]


@dataclass(slots=True)
class OverlappedWork:
    """The state of one piece of work that a device is given before the host has read what the work depends
    on.

    state: how far the work has come. IDLE at the beginning; only `apply` changes it.

    >>> work = OverlappedWork()
    >>> work.apply(OverlapEvent.WRITTEN, OverlapEvent.LAUNCHED)
    >>> (work.state.name, work.on_device)
    ('LAUNCHED', True)
    """

    state: OverlapState = field(default=OverlapState.IDLE, init=False)

    @property
    def on_device(self) -> bool:
        """True if the device was given the work, and it was not discarded."""
        return self.state in (OverlapState.LAUNCHED, OverlapState.CONFIRMED)

    @property
    def confirmed(self) -> bool:
        """True if what the host has read agrees with the work."""
        return self.state is OverlapState.CONFIRMED

    def apply(self, *events: OverlapEvent) -> None:
        """Change the state by some events, in order. Raises KeyError at the first event that is impossible;
        the events before it have been applied.

        events: what happened to the work. Without events, the state stays.
        """
        for event in events:
            self.state = next_state(self.state, event)
