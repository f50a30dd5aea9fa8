"""`EagleConfig` refuses what cannot be, and says the same to drafter and target."""

from __future__ import annotations

from typing import Any

import pytest

from specsot.errors import InvalidRequest
from specsot.members import TreeShape
from specsot.params import Sampling
from specsot_bench.core.eagle_inputs import EagleConfig

pytestmark = pytest.mark.torch  # the room's endpoint opens onto torch


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (dict(topk=0), "topk"),
        (dict(topk=2.5), "topk"),
        (dict(topk=True), "topk"),
        (dict(num_steps=0), "num_steps"),
        (dict(num_draft_tokens=1), "num_draft_tokens"),
        (dict(num_draft_tokens="8"), "num_draft_tokens"),
        (dict(topk=4, num_steps=1, num_draft_tokens=6), "num_draft_tokens"),
        (dict(topk=1, num_steps=3, num_draft_tokens=5), "num_draft_tokens"),
        (dict(temperature=-0.1), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(top_p=1.2), "top_p"),
        (dict(top_k=-1), "top_k"),
        (dict(min_p=1.5), "min_p"),
        (dict(tree_mask_mode=3), "tree_mask_mode"),
        (dict(tree_mask_mode=2, num_steps=4, num_draft_tokens=33), "tree_mask_mode"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=field) as told:
        EagleConfig(**change)
    assert told.value.field == field


def test_the_largest_tree_is_all_that_is_offered() -> None:
    for topk, steps, most in ((4, 1, 5), (1, 3, 4), (4, 3, 37), (2, 2, 7)):
        assert EagleConfig(topk, steps, most).num_draft_tokens == most
        with pytest.raises(InvalidRequest, match=rf"in \[1, {most}\]"):
            EagleConfig(topk, steps, most + 1)


def test_the_same_tree_in_the_drafters_words() -> None:
    assert EagleConfig(4, 3, 8).shape == TreeShape(depth=2, top_k=4, nodes=8, fixed=True)
    warm = EagleConfig(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05)
    assert warm.sampling == Sampling(0.7, 0.9, 20, 0.05)
    assert EagleConfig().sampling == Sampling()
