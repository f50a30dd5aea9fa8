"""Chooses on the GPU the best nodes of trees that were grown there, and writes them as rows of the verifying
step.

The rule is that of `selection.best_each` and `selection.build_trees` in the drafter.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

import triton.language as tl

from specsot_kernels.gpu.growing import order_of
from specsot_kernels.gpu.launching import kernel_of_any, kinds_of, launch, on_device_of, power_of_two
from specsot_kernels.growing import WORD, CandidatePool, ChoiceNumbers, TreeRows


def choose_rows(
    pool: CandidatePool, numbers: ChoiceNumbers, rows: TreeRows, nodes: int, vocabulary: int
) -> None:
    """Write the rows of all trees, `nodes` rows for each tree, tree after tree.

    The root's row must be there already; its position determines those of the other nodes. The candidates
    with the highest scores are chosen after the trust of each one's depth is added and the sum limited to at
    most 0; of equal ones the lower number wins. AssertionError is raised if the trees have more nodes than
    there are candidates, or than 2 * WORD. `numbers.ranks` and `numbers.chosen` are overwritten.

    pool: all candidates of the trees.
    numbers: which trees, and the arrays in which nodes are chosen; see `ChoiceNumbers`.
    rows: the rows that are written.
    nodes: number of nodes of each tree, at most 2 * WORD.
    vocabulary: number of token ids; ids beyond it are fed as its last id.

    Chosen candidates 0, 2, 5 of a tree become its nodes 1, 2, 3, in ascending candidate order.
    """
    trees = len(numbers.chosen)
    candidates = pool.tokens.shape[1]
    assert nodes - 1 <= min(candidates, 2 * WORD - 1), "as many as there are, and bits for all"
    arrays = (*rows, pool.tokens, pool.scores, pool.parents, *numbers)
    wide = power_of_two(candidates)
    with on_device_of(pool.scores):
        launch(
            _choose, (trees, 1, 1), (*kinds_of(*arrays), wide),
            (*arrays, pool.tokens.stride(0), pool.scores.stride(0), candidates, nodes, vocabulary,
             rows.bits.stride(0), numbers.trust.numel(), wide, WORD), num_warps=8 if wide > 256 else 4,
        )  # fmt: skip


@kernel_of_any(
    "pool_tokens",
    "pool_scores",
    "pool_parents",
    numbers=("from_pool", "from_scores", "candidates", "nodes", "vocabulary", "words", "levels"),
)
def _choose(
    tokens, positions, bits, pool_tokens, pool_scores, pool_parents, places, depths, trust, ranks, chosen,
    from_pool, from_scores, candidates, nodes, vocabulary, words, levels,
    wide: tl.constexpr, word: tl.constexpr,
):  # fmt: skip
    """Choose the nodes of one tree. A candidate's rank is its node number in the tree, or 0 if it is not
    chosen.

    A binary search keeps this invariant: at least `wanted` candidates have order `low` or more, fewer have
    order `high` or more.

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
    chosen: int32 [trees, nodes - 1], receives the chosen candidates in node order.
    from_pool: numbers from one tree to the next in the pool's tokens and parents.
    from_scores: numbers from one tree to the next in the pool's scores.
    candidates: number of candidates of a tree.
    wide: `candidates`, rounded up to a power of two.
    nodes: nodes of each tree.
    vocabulary: number of token ids.
    words: mask words of a row.
    levels: largest number of levels of a tree.
    word: bits of a mask word.
    """
    tree = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, wide)
    there = number < candidates
    place = tl.load(places + tree).to(tl.int64)
    depth = tl.load(depths + number, mask=there, other=1)
    value = tl.load(pool_scores + place * from_scores + number, mask=there, other=0.0)
    order = order_of(tl.minimum(value + tl.load(trust + depth - 1, mask=there, other=0.0), 0.0))
    wanted = nodes - 1
    low = tl.full((), -2147483648, tl.int64)
    high = tl.full((), 2147483648, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        enough = tl.sum((there & (order >= middle)).to(tl.int32), 0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    better = there & (order > low)
    level = there & (order == low)
    spare = wanted - tl.sum(better.to(tl.int32), 0)
    taken = better | (level & (tl.cumsum(level.to(tl.int32), 0) <= spare))
    rank = tl.where(taken, tl.cumsum(taken.to(tl.int32), 0), 0)
    tl.store(ranks + tree * candidates + number, rank, mask=there)
    tl.debug_barrier()
    first = tree * nodes
    row = first + rank
    token = tl.load(pool_tokens + place * from_pool + number, mask=taken, other=0)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1).to(tl.int32)
    tl.store(tokens + row, token, mask=taken)
    tl.store(positions + row, tl.load(positions + first) + depth, mask=taken)
    tl.store(chosen + tree * wanted + rank - 1, number, mask=taken)
    # One more than a candidate's number; 0 is the root. Starting at each candidate itself, the loop sets the
    # bits of the candidate and its ancestors.
    above = (number + 1).to(tl.int64)
    seen = tl.full((wide,), 1, tl.int64)
    for _ in range(levels):
        here = taken & (above > 0)
        mine = tl.load(ranks + tree * candidates + above - 1, mask=here, other=0).to(tl.int64)
        seen |= tl.full((wide,), 1, tl.int64) << mine
        above = tl.load(pool_parents + place * from_pool + above - 1, mask=here, other=0)
    tl.store(bits + row * words, seen.to(tl.int32), mask=taken)
    if nodes > word:
        tl.store(bits + row * words + 1, (seen >> word).to(tl.int32), mask=taken)
