"""`specsot_kernels` stands alone, and its statistics count what they say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specsot_kernels import compute_tree_statistics
from specsot_kernels.errors import InvalidArguments

ALONE = """
import sys
from specsot_kernels import organize_draft_results, build_tree_structure, verify_tree_greedy
chosen = organize_draft_results([[[[0.6, 0.4]]]], [[[5, 6]]], [[[-1, 0, 1]]], 3)
tree = build_tree_structure([9], *chosen, [4], 2, 1, 3)
found = verify_tree_greedy(tree.draft_tokens.reshape(1, 3), [[6, 0, 8]], *tree[2:5])
assert found.predicts.tolist() == [6, -1, 8], found
heavy = {"torch", "grpc", "transformers", "google", "specsot", "specsot_app"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.processes
def test_the_functions_need_nothing_but_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_statistics_count_drafts_alone() -> None:
    told = compute_tree_statistics([0, 3, 1, 0], num_draft_tokens=8, num_steps=4)
    assert (told.trees, told.total_accepted, told.total_proposed) == (4, 4, 28)
    assert (told.mean_accept_length, told.max_accept_length, told.min_accept_length) == (1.0, 3, 0)
    assert told.acceptance_rate == 4 / 28
    assert told.depth_rates == (0.5, 0.25, 0.25, 0.0)


def test_without_a_number_of_steps_a_tree_may_be_a_chain() -> None:
    given = compute_tree_statistics([5, 0], num_draft_tokens=6)
    assert (given.max_accept_length, len(given.depth_rates)) == (5, 5)
    with pytest.raises(InvalidArguments, match="accept_lengths"):
        compute_tree_statistics([6], num_draft_tokens=6)


@pytest.mark.parametrize("lengths", [[], [-1], [4], [1, 9]])
def test_lengths_that_no_tree_can_have_are_refused(lengths: list[int]) -> None:
    with pytest.raises(InvalidArguments, match="accept_lengths"):
        compute_tree_statistics(lengths, num_draft_tokens=8, num_steps=3)
