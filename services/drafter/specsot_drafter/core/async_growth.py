"""What is known of trees that grow while the host has not read the verification result that they follow."""

from __future__ import annotations

from dataclasses import dataclass, field

from specsot.core.overlap import OverlapEvent, OverlappedWork


@dataclass(slots=True)
class AsyncGrowth(OverlappedWork):
    """Trees that grow after trees whose verification result the host has not read.

    States: LAUNCHED while they grow, CONFIRMED once `Proposer.begin` continues this growth, DISCARDED if the
    host has found another verification result, or if trees of other sequences are requested.

    sequences: Ids of the sequences that have a tree here.
    mispredicted: Ids of the sequences for which the host has found another verification result than the
        device. Empty until `discard` names one.
    """

    sequences: frozenset[int]
    mispredicted: set[int] = field(default_factory=set[int], init=False)

    def __post_init__(self) -> None:
        """Record that the growth was just launched."""
        self.apply(OverlapEvent.WRITTEN, OverlapEvent.LAUNCHED)

    def discard(self, sequence: int | None = None) -> None:
        """Declare that none of the trees is used.

        sequence: Id of the sequence for which the host has found another verification result, so that its
            features on the device are wrong, too. None: the trees are not needed, but all stored features are
            right.
        """
        if sequence is not None:
            self.mispredicted.add(sequence)
        self.apply(OverlapEvent.DIFFERED)
