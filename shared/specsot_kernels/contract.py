"""The arrays of EAGLE's tree functions: names, shapes, element types, the mask's three layouts, and checks.

bs requests, each with a tree of n nodes, the root (its newest token, not fed yet) included; k candidates
below each node that was drafted from, S levels of drafting, V tokens. Candidates are numbered flat:
0 .. k - 1 below the root, then k * k of each further level. -1 means none in every index array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from specsot_kernels.errors import InvalidArguments

Array = Any  # numpy.ndarray or torch.Tensor

MOST_PACKED = 32  # nodes whose bits fit the largest word


class TreeMaskMode(IntEnum):
    """How the attention mask of the trees is laid out; true, or a set bit, means: attends.

    FULL_MASK: flat bool; request b's rows, one after the other, seq_lens[b] columns of its text and
               then n columns of its tree each.
    QLEN_ONLY: flat bool [bs * n * n], the trees' columns alone.
    QLEN_ONLY_BITPACKING: one word a row, [bs * n]: bit j says whether node j is attended. Little-endian
               uint8 up to 8 nodes, uint16 up to 16, uint32 up to 32; more do not fit.
    """

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


MODES = frozenset(TreeMaskMode)


class DraftResults(NamedTuple):
    """The best candidates of every request.

    parent_list:      int64 [bs, k * (S - 1) + 1]; entry t is the flat number of the parent that
                      candidates t * k .. t * k + k - 1 share, -1 for the root.
    top_scores_index: int64 [bs, n - 1], flat numbers of the best, ascending.
    draft_tokens:     int64 [bs, n - 1], their tokens.
    """

    parent_list: Array
    top_scores_index: Array
    draft_tokens: Array


class TreeArrays(NamedTuple):
    """Trees of bs requests, ready to be fed and verified.

    tree_mask:             by TreeMaskMode.
    positions:             int64 [bs * n], sequence length plus depth.
    retrieve_index:        int64 [bs, n], the row of each node in the batch: b * n + node.
    retrieve_next_token:   int64 [bs, n], the first child.
    retrieve_next_sibling: int64 [bs, n], the next child of the same parent.
    draft_tokens:          int64 [bs * n], the root's token first.
    """

    tree_mask: Array
    positions: Array
    retrieve_index: Array
    retrieve_next_token: Array
    retrieve_next_sibling: Array
    draft_tokens: Array


class Verified(NamedTuple):
    """What was accepted of bs trees. New tokens of request b: predicts[accept_index[b, : num + 1]].

    predicts:         int32 [bs * n], the token behind each row of the walk; -1 elsewhere.
    accept_index:     int32 [bs, S + 1], rows of the accepted nodes, the root first, then -1.
    accept_token_num: int32 [bs], how many drafts were accepted; the root is none.
    """

    predicts: Array
    accept_index: Array
    accept_token_num: Array


def check_mode(mode: int, nodes: int) -> TreeMaskMode:
    """The mode, if trees of so many nodes can be told in it. Raises InvalidArguments."""
    if mode not in MODES:
        named = ", ".join(f"{one.name} ({one.value})" for one in TreeMaskMode)
        raise InvalidArguments(f"tree_mask_mode must be one of {named}, got {mode!r}", "tree_mask_mode")
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING and nodes > MOST_PACKED:
        raise InvalidArguments(
            f"tree_mask_mode QLEN_ONLY_BITPACKING holds {MOST_PACKED} nodes, the trees have {nodes}",
            "tree_mask_mode",
        )
    return TreeMaskMode(mode)


def count_candidates(topk: int, steps: int) -> int:
    """How many candidates `steps` levels of drafting offer: topk, then topk * topk a level."""
    return topk + (steps - 1) * topk * topk


def check_candidates(
    score_list: Sequence[Array], token_list: Sequence[Array], parents_list: Sequence[Array], nodes: int
) -> None:
    """The three lists of one drafting fit each other, and offer enough. Raises InvalidArguments."""
    steps = len(score_list)
    if not steps or len(token_list) != steps or len(parents_list) != steps:
        raise InvalidArguments(
            f"score_list, token_list and parents_list must have one entry a step, "
            f"got {steps}, {len(token_list)} and {len(parents_list)}",
            "score_list",
        )
    batch = score_list[0].shape[0]
    k = score_list[0].shape[-1]
    for step in range(steps):
        rows = k if step else 1
        check_shape(f"score_list[{step}]", score_list[step], batch, rows, k)
        check_shape(f"token_list[{step}]", token_list[step], batch, rows * k)
        check_shape(f"parents_list[{step}]", parents_list[step], batch, k if step else k + 1)
    check_nodes(k, steps, nodes)


def check_nodes(topk: int, steps: int, nodes: int) -> None:
    """So much drafting offers a tree of so many nodes. Raises InvalidArguments."""
    most = 1 + count_candidates(topk, steps)
    if not 1 <= nodes <= most:
        raise InvalidArguments(
            f"num_draft_tokens must be in [1, {most}] (the root, and what topk {topk} and "
            f"{steps} steps offer), got {nodes}",
            "num_draft_tokens",
        )


def check_shape(name: str, array: Array, *wanted: int) -> None:
    """Raises InvalidArguments naming both shapes."""
    if array.shape != wanted:
        raise InvalidArguments(f"{name} must have shape {list(wanted)}, got {list(array.shape)}", name)


def check_steps(num_steps: int | None, nodes: int) -> int:
    """How many levels a walk may go down; None: as many as a tree of so many nodes can have."""
    if num_steps is None:
        return nodes - 1
    if num_steps < 0:
        raise InvalidArguments(f"num_steps must be >= 0, got {num_steps}", "num_steps")
    return num_steps


def check_threshold(name: str, value: float) -> None:
    """Raises InvalidArguments unless it is a share."""
    if not 0 <= value <= 1:
        raise InvalidArguments(f"{name} must be in [0, 1], got {value!r}", name)


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
    Raises InvalidArguments when there is none, or one that no such tree can have.
    """
    lengths = [int(length) for length in accept_lengths]
    most = min(num_steps, num_draft_tokens - 1)
    if not lengths or not all(0 <= length <= most for length in lengths):
        raise InvalidArguments(
            f"accept_lengths must be one or more numbers in [0, {most}], got {lengths}", "accept_lengths"
        )
    return summarize(lengths, (num_draft_tokens - 1) * len(lengths), num_steps)


def summarize(lengths: list[int], proposed: int, num_steps: int) -> TreeStatistics:
    """Statistics of trees that may differ in size; `lengths` may be empty."""
    trees = len(lengths)
    accepted = sum(lengths)
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
