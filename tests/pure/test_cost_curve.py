"""Measured points in, seconds out: one reading of a curve for stages, drafters, forecasts and placement."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from specsot.core import cost_curve
from specsot.core.cost_curve import CostCurve
from specsot.members import Curve


@pytest.mark.parametrize(
    ("points", "tokens", "seconds"),
    [
        (((1, 1.0), (3, 2.0)), 2, 1.5),
        (((3, 2.0), (1, 1.0)), 2, 1.5),
        (((1, 1.0), (3, 2.0)), 5, 3.0),
        (((4, 1.0), (8, 2.0)), 1, 1.0),
        (((1, 2.0), (2, 1.0), (4, 4.0)), 2, 2.0),
        (((1, 2.0), (2, 1.0)), 9, 2.0),
        (((2, 1.0),), 4, 2.0),
        ((), 9, 0.0),
    ],
)
def test_seconds_between_and_outside_of_the_measured_points(
    points: Curve, tokens: int, seconds: float
) -> None:
    curve = CostCurve(points)
    assert curve.at(tokens) == pytest.approx(seconds)
    assert curve.at_each([[tokens], [tokens]]) == pytest.approx(np.full((2, 1), seconds))
    assert curve.at_each(tokens) == curve.at_each([tokens])[0]
    assert bool(curve) == bool(points)


def test_observations_scale_the_curve_near_them_and_hold_at_their_own_sizes() -> None:
    """Small steps took as long as measured, large ones twice as long."""
    curve = CostCurve([(1, 1.0), (16, 2.0), (64, 4.0)]).corrected([(1, 1.0), (32, 6.0)])
    assert curve.at(1) == 1.0
    assert curve.at(32) == 6.0
    assert curve.at(64) == pytest.approx(2.25 * 4.0), "the ratio of the nearest observation"


def test_a_curve_that_was_never_measured_is_what_was_observed() -> None:
    assert CostCurve().corrected([(2, 3.0)]).at(2) == 3.0
    assert CostCurve([(1, 1.0)]).corrected([]).at(1) == 1.0


def test_the_examples_of_its_docstrings_hold() -> None:
    assert doctest.testmod(cost_curve).failed == 0
