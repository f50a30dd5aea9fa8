"""Runs that were recorded once go as they went, byte for byte.

Who changes one on purpose runs `python -m tests.golden --write`, and shows the diff.
"""

from __future__ import annotations

import pytest

from tests.golden import runs

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("name", runs.PURE)
def test_the_master_orders_and_tells_what_it_did(name: str) -> None:
    assert runs.RUNS[name]() == runs.recorded(name)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", runs.HEAVY)
def test_messages_and_answers_are_what_they_were(name: str) -> None:
    assert runs.RUNS[name]() == runs.recorded(name)
