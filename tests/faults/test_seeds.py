"""Random faults by fixed seeds: whatever happens to whom, the rules hold. `make faults SEED=n` tells one."""

from __future__ import annotations

import pytest

from tests.faults.campaign import draw, judge

pytestmark = pytest.mark.slow

SEEDS = (1, 4, 6, 10, 14, 23)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rule_holds(seed: int) -> None:
    assert judge(draw(seed), seed) == []
