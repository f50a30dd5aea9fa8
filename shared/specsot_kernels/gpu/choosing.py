"""Chooses on the GPU the best nodes of trees that were grown on the GPU, and writes them as rows of the step
that verifies the trees.

The rule is that of `selection.best_each` and `selection.build_trees` in the drafter.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from collections.abc import Callable

import triton.language as tl

from specsot_kernels.gpu.growing import order_of
from specsot_kernels.gpu.launching import (
    array_specialization,
    kernel_of_any,
    kind_of,
    launch,
    on_device_of,
    power_of_two,
)
from specsot_kernels.growing import WORD, CandidatePool, ChoiceNumbers, TreeRows


def prepare_choose_rows(
    pool: CandidatePool, numbers: ChoiceNumbers, rows: TreeRows, nodes: int, vocabulary: int
) -> Callable[[], None]:
    """Return a function that chooses the nodes of all trees and writes their rows, tree after tree: `nodes`
    rows for each tree, its root first.

    The selections of many steps lie in the same arrays. So the addresses, types and alignments of these
    arrays, which a launch needs, are looked up here once. The function may be called again after the contents
    of the arrays have changed. If one of them lies at another address or has another shape, prepare another
    function. The function launches the kernel without waiting for it.

    The root's row must have been written before the call; its position determines those of the other nodes. A
    candidate's value is its score plus the trust of its depth, at most 0. The `nodes` - 1 candidates with the
    highest values are chosen; of candidates with equal values, the one with the lower number.
    `numbers.ranks`, `numbers.chosen` and `numbers.masses` are overwritten.

    pool: all candidates of the trees.
    numbers: which trees, and the arrays in which nodes are chosen; see `ChoiceNumbers`.
    rows: the rows that are written.
    nodes: number of nodes of each tree, its root included.
    vocabulary: number of token ids. In `rows.tokens`, a negative id is written as 0, and one beyond the
        vocabulary as the last id. `numbers.chosen` receives the ids of the candidates as they are.

    Raises AssertionError if the trees have more nodes than a root and all candidates, or more than 2 * WORD.

    Chosen candidates 0, 2, 5 of a tree become its nodes 1, 2, 3, in ascending candidate order.
    """
    trees = len(numbers.chosen)
    candidates = pool.tokens.shape[1]
    assert nodes - 1 <= min(candidates, 2 * WORD - 1), "too many nodes"
    arrays = (*rows, pool.tokens, pool.scores, pool.parents, *numbers)
    wide = power_of_two(candidates)
    kind = kind_of(*array_specialization(*arrays), wide)
    addresses = tuple([array.data_ptr() for array in arrays])
    sizes = (
        *(pool.tokens.stride(0), pool.scores.stride(0), candidates, nodes, vocabulary),
        *(rows.bits.stride(0), numbers.masses.shape[1], wide, WORD),
    )

    def choose_rows() -> None:
        """Launch the kernel, without waiting for it."""
        with on_device_of(pool.scores):
            launch(
                _choose, (trees, 1, 1), (kind,), (*arrays, *sizes), addresses,
                num_warps=8 if wide > 256 else 4,
            )  # fmt: skip

    return choose_rows


@kernel_of_any(
    "pool_tokens",
    "pool_scores",
    "pool_parents",
    numbers=("pool_stride", "score_stride", "candidates", "nodes", "vocabulary", "words", "levels"),
)
def _choose(
    tokens, positions, bits, pool_tokens, pool_scores, pool_parents, places, depths, trust, ranks, chosen,
    masses, pool_stride, score_stride, candidates, nodes, vocabulary, words, levels,
    wide: tl.constexpr, word: tl.constexpr,
):  # fmt: skip
    """Choose the nodes of one tree. A candidate's rank is its node number in the tree, or 0 if it is not
    chosen.

    A binary search over the values, as integers of the same order, finds the lowest value that is chosen. It
    keeps this invariant: at least `wanted` candidates have order `low` or more, fewer have order `high` or
    more.

    tokens: int32 [rows], receives the token of each node but the roots.
    positions: int32 [rows], the position of each row; those of the roots are read, the others are written.
    bits: int32 [rows, words], receives which rows of its tree each row sees; see `TreeRows`.
    pool_tokens: int64 [trees of the pool, candidates], the token of each candidate; see `CandidatePool`.
    pool_scores: fp32, of the same shape, the score of each candidate.
    pool_parents: int64, of the same shape, the parent of each candidate.
    places: int32 [trees], each tree's row in the pool; see `ChoiceNumbers`.
    depths: int32 [n], depth of each candidate.
    trust: fp32 [levels], what is added to a score at each depth.
    ranks: int32 [trees, n], scratch: receives each candidate's node number, 0 if it is not chosen.
    chosen: int32 [trees, 2, nodes - 1], receives the tokens of the chosen candidates in node order, and the
        node numbers of their parents.
    masses: fp32 [trees, levels], receives the probability of the chosen candidates, summed per depth. The
        probability of a candidate is the exponential of its score.
    pool_stride: elements from one tree to the next in the pool's tokens and parents.
    score_stride: elements from one tree to the next in the pool's scores.
    candidates: number of candidates of a tree.
    nodes: number of nodes of each tree, its root included.
    vocabulary: number of token ids.
    words: number of mask words of a row.
    levels: number of levels of the candidates.
    wide: `candidates`, rounded up to a power of two.
    word: number of bits of a mask word.
    """
    tree = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, wide)
    is_candidate = number < candidates
    place = tl.load(places + tree).to(tl.int64)
    depth = tl.load(depths + number, mask=is_candidate, other=1)
    value = tl.load(pool_scores + place * score_stride + number, mask=is_candidate, other=0.0)
    order = order_of(tl.minimum(value + tl.load(trust + depth - 1, mask=is_candidate, other=0.0), 0.0))
    wanted = nodes - 1
    low = tl.full((), -2147483648, tl.int64)
    high = tl.full((), 2147483648, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        enough = tl.sum((is_candidate & (order >= middle)).to(tl.int32), 0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    better = is_candidate & (order > low)
    equal = is_candidate & (order == low)
    num_equal_taken = wanted - tl.sum(better.to(tl.int32), 0)
    taken = better | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= num_equal_taken))
    rank = tl.where(taken, tl.cumsum(taken.to(tl.int32), 0), 0)
    tl.store(ranks + tree * candidates + number, rank, mask=is_candidate)
    tl.debug_barrier()
    first = tree * nodes
    row = first + rank
    token = tl.load(pool_tokens + place * pool_stride + number, mask=taken, other=0)
    tl.store(tokens + row, tl.minimum(tl.maximum(token, 0), vocabulary - 1).to(tl.int32), mask=taken)
    tl.store(positions + row, tl.load(positions + first) + depth, mask=taken)
    parent = tl.load(pool_parents + place * pool_stride + number, mask=taken, other=0)
    below_node = taken & (parent > 0)
    parent_node = tl.load(ranks + tree * candidates + parent - 1, mask=below_node, other=0)
    own = chosen + tree * 2 * wanted + rank - 1
    tl.store(own, token.to(tl.int32), mask=taken)
    tl.store(own + wanted, parent_node, mask=taken)
    for level in range(levels):
        at_level = taken & (depth == level + 1)
        tl.store(masses + tree * levels + level, tl.sum(tl.where(at_level, tl.exp(value), 0.0), 0))
    # One more than a candidate's number; 0 is the root. Starting at each candidate itself, the loop sets the
    # bits of the candidate and its ancestors.
    above = (number + 1).to(tl.int64)
    seen = tl.full((wide,), 1, tl.int64)
    for _ in range(levels):
        below_root = taken & (above > 0)
        node = tl.load(ranks + tree * candidates + above - 1, mask=below_root, other=0).to(tl.int64)
        seen |= tl.full((wide,), 1, tl.int64) << node
        above = tl.load(pool_parents + place * pool_stride + above - 1, mask=below_root, other=0)
    tl.store(bits + row * words, seen.to(tl.int32), mask=taken)
    if nodes > word:
        tl.store(bits + row * words + 1, (seen >> word).to(tl.int32), mask=taken)
