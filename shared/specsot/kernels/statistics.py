"""Statistics of a batch of verified trees: accepted drafts, mean, histogram."""

from __future__ import annotations

from dataclasses import dataclass

from specsot.errors import InvalidRequest
from specsot.kernels.contract import Array


@dataclass(frozen=True, slots=True)
class TreeStatistics:
    """Of `trees` trees. An accept length counts accepted drafts; the root and the bonus token are none.

    mean, max and min are of accept lengths. total_proposed: drafts in all trees.
    acceptance_rate: accepted drafts of those proposed.
    depth_rates: share of the trees that were accepted at least 1, 2, ... num_steps deep.
    """

    trees: int
    mean_accept_length: float
    max_accept_length: int
    min_accept_length: int
    acceptance_rate: float
    total_proposed: int
    total_accepted: int
    depth_rates: tuple[float, ...]


def compute_tree_statistics(accept_lengths: Array, num_draft_tokens: int, num_steps: int) -> TreeStatistics:
    """Statistics of trees of num_draft_tokens nodes each, the root included.

    accept_lengths: accepted drafts of each tree: numbers, or an array [trees].
    Raises InvalidRequest when there is none, or one that no such tree can have.
    """
    lengths = [int(length) for length in accept_lengths]
    most = min(num_steps, num_draft_tokens - 1)
    if not lengths or not all(0 <= length <= most for length in lengths):
        raise InvalidRequest(
            f"accept_lengths must be one or more numbers in [0, {most}], got {lengths}", "accept_lengths"
        )
    return summarize(lengths, (num_draft_tokens - 1) * len(lengths), num_steps)


def summarize(lengths: list[int], proposed: int, num_steps: int) -> TreeStatistics:
    """Statistics of trees that may differ in size; `lengths` may be empty."""
    trees, accepted = len(lengths), sum(lengths)
    return TreeStatistics(
        trees=trees,
        mean_accept_length=accepted / max(trees, 1),
        max_accept_length=max(lengths, default=0),
        min_accept_length=min(lengths, default=0),
        acceptance_rate=accepted / max(proposed, 1),
        total_proposed=proposed,
        total_accepted=accepted,
        depth_rates=tuple(
            sum(length >= depth for length in lengths) / max(trees, 1) for depth in range(1, num_steps + 1)
        ),
    )
