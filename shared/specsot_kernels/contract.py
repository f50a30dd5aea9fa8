"""Defines the arrays of EAGLE's tree functions: names, shapes, element types, the mask's layouts, and checks.

There are bs requests, each with a tree of n nodes. The root counts as a node; its token is the newest token
of the request, which has not been fed to the target yet. Drafting has S levels; each node that was drafted
from offers k candidates; the vocabulary has V tokens. Candidates have flat numbers: 0 .. k - 1 below the
root, then k * k numbers for each further level. In every index array, -1 means none.

With k = 2, candidates 0 and 1 hang below the root; 2, 3 below the first node of level 1's frontier and 4, 5
below its second node; then come 6, 7, 8, 9 of level 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from specsot_kernels.errors import InvalidArguments

Array = Any  # numpy.ndarray or torch.Tensor

# Nodes. Largest tree whose visibility bits fit into one word of QLEN_ONLY_BITPACKING.
MAX_PACKED_NODES = 32


class TreeMaskMode(IntEnum):
    """How the attention mask of the trees is laid out. True, or a set bit, means that the row attends to the
    column.

    FULL_MASK: flat bool; the rows of request 0, then of request 1 and so on. A row of request b has
        seq_lens[b] columns for the sequence so far, then n columns for the tree.
    QLEN_ONLY: flat bool [bs * n * n], the trees' columns alone.
    QLEN_ONLY_BITPACKING: one word a row, [bs * n]: bit j says whether node j is attended to. The words are
        little-endian: uint8 up to 8 nodes, uint16 up to 16, uint32 up to 32; larger trees do not fit.

    A chain root -> 1 -> 2 has the QLEN_ONLY rows [1 0 0], [1 1 0], [1 1 1], and the words 0b001, 0b011,
    0b111.
    """

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


# The numbers that are layouts of a mask.
MODES = frozenset(TreeMaskMode)


class DraftResults(NamedTuple):
    """The best candidates of every request.

    parent_list: int64 [bs, k * (S - 1) + 1]; entry t is the flat number of the parent that the candidates t *
        k .. t * k + k - 1 share, -1 for the root.
    top_scores_index: int64 [bs, n - 1], flat numbers of the best candidates, ascending.
    draft_tokens: int64 [bs, n - 1], the tokens of these candidates.
    """

    parent_list: Array
    top_scores_index: Array
    draft_tokens: Array


class TreeArrays(NamedTuple):
    """Trees of bs requests, ready to be fed to the target and verified.

    tree_mask: laid out by TreeMaskMode.
    positions: int64 [bs * n], sequence length plus depth of the node.
    retrieve_index: int64 [bs, n], the row of each node in the batch: b * n + node.
    retrieve_next_token: int64 [bs, n], the first child of each node.
    retrieve_next_sibling: int64 [bs, n], the next child of the same parent.
    draft_tokens: int64 [bs * n], the root's token first.

    A root with the children 1 and 2, and 3 below 1: next_token [1, 3, -1, -1], next_sibling [-1, 2, -1, -1].
    """

    tree_mask: Array
    positions: Array
    retrieve_index: Array
    retrieve_next_token: Array
    retrieve_next_sibling: Array
    draft_tokens: Array


class Verified(NamedTuple):
    """What was accepted of bs trees. New tokens of request b are predicts[accept_index[b, : num + 1]].

    predicts: int32 [bs * n], the token after each row on the accepted path; -1 elsewhere.
    accept_index: int32 [bs, S + 1], rows of the accepted nodes, the root first, then -1.
    accept_token_num: int32 [bs], number of accepted drafts; the root does not count.
    """

    predicts: Array
    accept_index: Array
    accept_token_num: Array


def check_mode(mode: int, nodes: int) -> TreeMaskMode:
    """Return the mode as a TreeMaskMode.

    mode: number of the mode.
    nodes: number of nodes of each tree.

    Raises InvalidArguments if the mode is unknown or too small for so many nodes.
    """
    if mode not in MODES:
        known = ", ".join(f"{mode.name} ({mode.value})" for mode in TreeMaskMode)
        raise InvalidArguments(f"tree_mask_mode must be one of {known}, got {mode!r}", "tree_mask_mode")
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING and nodes > MAX_PACKED_NODES:
        raise InvalidArguments(
            f"tree_mask_mode QLEN_ONLY_BITPACKING holds {MAX_PACKED_NODES} nodes, the trees have {nodes}",
            "tree_mask_mode",
        )
    return TreeMaskMode(mode)


def count_candidates(topk: int, steps: int) -> int:
    """Return how many candidates some levels of drafting offer: topk, then topk * topk a level.

    topk: candidates below each node that was drafted from.
    steps: number of levels, at least 1.
    """
    return topk + (steps - 1) * topk * topk


def check_candidates(
    score_list: Sequence[Array], token_list: Sequence[Array], parents_list: Sequence[Array], nodes: int
) -> None:
    """Check that the three lists of one drafting fit each other and offer enough candidates for `nodes`
    nodes.

    Raises InvalidArguments if they do not. Each list must have one entry per level, at least one, in shapes
    that fit the batch and k of the first scores.

    score_list: scores of each level, [bs, 1, k], then [bs, k, k].
    token_list: tokens of each level, [bs, k], then [bs, k * k].
    parents_list: parents of each level, [bs, k + 1], then [bs, k].
    nodes: number of nodes of each tree, the root included.
    """
    steps = len(score_list)
    if not steps or len(token_list) != steps or len(parents_list) != steps:
        raise InvalidArguments(
            f"score_list, token_list and parents_list must have one entry per drafting step, "
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
    """Check that drafting offers enough candidates for a tree.

    topk: candidates below each node that was drafted from.
    steps: number of levels of drafting.
    nodes: number of nodes of the tree, the root included.

    Raises InvalidArguments if not, or if there is no node.
    """
    max_nodes = 1 + count_candidates(topk, steps)
    if not 1 <= nodes <= max_nodes:
        raise InvalidArguments(
            f"num_draft_tokens must be in [1, {max_nodes}] (the root, and what topk {topk} and "
            f"{steps} steps offer), got {nodes}",
            "num_draft_tokens",
        )


def check_shape(name: str, array: Array, *sizes: int) -> None:
    """Check an array's shape.

    name: name of the argument, for the error.
    array: the array, whose shape is checked.
    sizes: the size that each dimension must have.

    Raises InvalidArguments with both shapes.
    """
    if array.shape != sizes:
        raise InvalidArguments(f"{name} must have shape {list(sizes)}, got {list(array.shape)}", name)


def check_steps(num_steps: int | None, nodes: int) -> int:
    """Return how many levels a path may go down; for None, as many as a tree can have.

    num_steps: number of levels, or None.
    nodes: number of nodes of each tree, the root included.

    Raises InvalidArguments if num_steps is negative.
    """
    if num_steps is None:
        return nodes - 1
    if num_steps < 0:
        raise InvalidArguments(f"num_steps must be >= 0, got {num_steps}", "num_steps")
    return num_steps


def check_threshold(name: str, value: float) -> None:
    """Check that a threshold is in [0, 1].

    name: name of the argument, for the error.
    value: the threshold.

    Raises InvalidArguments if it is not.
    """
    if not 0 <= value <= 1:
        raise InvalidArguments(f"{name} must be in [0, 1], got {value!r}", name)


@dataclass(frozen=True, slots=True)
class TreeStatistics:
    """Statistics of `trees` trees. An accept length counts accepted drafts, without the root and the bonus
    token.

    trees: number of trees.
    mean_accept_length: mean of the accept lengths.
    max_accept_length: largest accept length.
    min_accept_length: smallest accept length.
    acceptance_rate: accepted drafts divided by proposed drafts.
    total_proposed: drafts in all trees.
    total_accepted: accepted drafts in all trees.
    depth_rates: shares of the trees that were accepted at least 1, 2, ... num_steps deep.
    """

    trees: int
    mean_accept_length: float
    max_accept_length: int
    min_accept_length: int
    acceptance_rate: float
    total_proposed: int
    total_accepted: int
    depth_rates: tuple[float, ...]


def compute_tree_statistics(
    accept_lengths: Array, num_draft_tokens: int, num_steps: int | None = None
) -> TreeStatistics:
    """Return statistics of trees of num_draft_tokens nodes each, the root included.

    accept_lengths: accepted drafts of each tree: numbers, or an array [trees].
    num_draft_tokens: nodes of each tree, the root included.
    num_steps: largest number of drafts that one path can have; None for all drafts, as in a chain.

    Raises InvalidArguments if there are no lengths, or if such a tree cannot have one of them.
    """
    lengths = [int(length) for length in accept_lengths]
    num_steps = num_draft_tokens - 1 if num_steps is None else num_steps
    max_length = min(num_steps, num_draft_tokens - 1)
    if not lengths or not all(0 <= length <= max_length for length in lengths):
        raise InvalidArguments(
            f"accept_lengths must be one or more numbers in [0, {max_length}], got {lengths}",
            "accept_lengths",
        )
    return summarize(lengths, (num_draft_tokens - 1) * len(lengths), num_steps)


def summarize(lengths: list[int], proposed: int, num_steps: int) -> TreeStatistics:
    """Return statistics of trees that may differ in size; without trees, all numbers are 0.

    lengths: accepted drafts of each tree.
    proposed: number of drafts in all trees.
    num_steps: how many entries `depth_rates` gets.
    """
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
