"""Runs that were recorded once go as they went, byte for byte.

Who changes one on purpose runs `python -m tests.golden --write`, and shows the diff.
"""

from __future__ import annotations

import pytest

from tests.conftest import some
from tests.golden import runs

pytestmark = pytest.mark.timeout(120)


# `make check` replays every fourth.
MASTERS = [pytest.param(name, marks=[pytest.mark.slow] * (n % 4 > 0)) for n, name in enumerate(runs.PURE)]


@pytest.mark.parametrize("name", MASTERS)
def test_the_master_orders_and_tells_what_it_did(name: str) -> None:
    assert runs.RUNS[name]() == runs.recorded(name)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", some(runs.HEAVY, 0, 1, 2, 3, 5))  # a drafter brings the same answers
def test_messages_and_answers_are_what_they_were(name: str) -> None:
    assert runs.RUNS[name]() == runs.recorded(name)
