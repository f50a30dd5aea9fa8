"""What a lesson says of the tree that was sent: how deep, whose nodes, and what would have come anyway."""

from __future__ import annotations

import pytest

from specsot.core.frames import FeatureBatch
from specsot.core.tree import Tree
from specsot_drafter.core.sequences import common_prefix
from specsot_drafter.speculator import ROOT_ONLY, PendingTree

# 5 -> 6 -> 7 are the drafter's own; 8 below 7 and 9 below the root came from elsewhere.
TREE = Tree((5, 6, 7, 8, 9), (0, 0, 1, 2, 0))
FLIGHT = PendingTree(10, TREE, 2, (0.9, 0.5), own_nodes=3)


def landed(flight: PendingTree, *written: int, start: int = 10, bonus: int | None = 1) -> object:
    return flight.resolve(FeatureBatch(4, start, written, bonus, 3))


@pytest.mark.parametrize(
    ("written", "accepted", "own"),
    [((5,), 0, 0), ((5, 6), 1, 1), ((5, 6, 7), 2, 2), ((5, 6, 7, 8), 3, 2), ((5, 9), 1, 0)],
)
def test_how_deep_it_was_accepted_and_how_much_of_that_was_the_drafters(
    written: tuple[int, ...], accepted: int, own: int
) -> None:
    back = landed(FLIGHT, *written)
    assert (back.accepted, back.own, back.rows, back.grown) == (accepted, own, 5, 2)  # type: ignore[attr-defined]


def test_what_was_forced_would_have_come_without_a_drafter() -> None:
    forced = PendingTree(10, TREE, 2, (0.9, 0.5), own_nodes=3, forced=(6, 4))
    back = landed(forced, 5, 6, 7)
    assert (back.accepted, back.own) == (1, 2)  # type: ignore[attr-defined]


def test_a_result_that_does_not_match_the_flight_gives_the_root_only() -> None:
    assert landed(FLIGHT, 5, 6, start=11) is ROOT_ONLY
    assert landed(FLIGHT, 5, 6, bonus=None) is ROOT_ONLY


def test_a_common_beginning() -> None:
    assert common_prefix((1, 2, 3), (1, 2, 4)) == 2
    assert common_prefix((1, 2), (1, 2, 3)) == 2
    assert common_prefix((), (1,)) == 0
