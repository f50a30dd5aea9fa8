"""The ring of features: what it holds, and what it has overwritten."""

from __future__ import annotations

import random

import pytest
import torch

from specsot_worker.feature_ring import FeatureRing


def numbered(first: int, count: int) -> torch.Tensor:
    """Features that are their own numbers."""
    return torch.arange(first, first + count).float()[:, None]


@pytest.mark.parametrize("unwritten", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_every_feature_from_the_oldest_on_is_loaded_as_it_was_appended(seed: int, unwritten: int) -> None:
    """However many are appended at a time, also more than the ring holds."""
    rng, size = random.Random(seed), 16
    ring = FeatureRing(1, torch.float32, "cpu", size, unwritten)
    for _ in range(60):
        count = rng.choice((1, 2, 5, 15, 16, 17, 40))
        step = numbered(ring.appended, count)
        if rng.random() < 0.5:
            ring.append(step)
        else:
            # Rejected nodes lie between the accepted ones.
            ring.append(torch.stack([step, step - 99], 1).flatten(0, 1), [*range(0, 2 * count, 2)])
        assert ring.oldest == max(ring.appended - max(size, count), 0)
        present = range(ring.oldest, ring.appended)
        for numbers in (
            [*present],
            [*present[-count:]],
            rng.sample(present, rng.randint(1, len(present))),
        ):
            assert ring.load(numbers)[:, 0].tolist() == numbers


def test_what_one_step_appended_is_loaded_without_a_copy() -> None:
    ring = FeatureRing(1, torch.float32, "cpu", 8)
    step = numbered(0, 3)
    ring.append(step)
    assert ring.load([0, 1, 2]) is step


def test_features_that_nobody_reads_are_not_gathered() -> None:
    """But what a step's features keep in memory is bounded: those of rejected nodes count."""
    ring = FeatureRing(1, torch.float32, "cpu", 8, unwritten=4)
    ring.append(numbered(0, 3), [0, 2])
    newest = ring.newest
    assert (newest.rows, newest.shape) == ([0, 2], (2, 1))
    assert newest.to(torch.float64)[:, 0].tolist() == [0, 2]
    ring.append(numbered(10, 3), [1])
    assert ring.newest.rows == [1]
    assert len(ring._unwritten) == 2
    ring.append(numbered(20, 3), [0])
    assert not ring._unwritten, "nine features were in memory, the ring has room for eight"
    assert ring.load([0, 1, 2, 3])[:, 0].tolist() == [0, 2, 11, 20]


def test_some_features_of_a_step_are_loaded_without_gathering_the_others() -> None:
    ring = FeatureRing(1, torch.float32, "cpu", 8, unwritten=4)
    ring.append(numbered(0, 6), [0, 2, 5])
    assert ring.load([2, 1])[:, 0].tolist() == [5, 2]
    assert ring.newest.rows == [0, 2, 5]
