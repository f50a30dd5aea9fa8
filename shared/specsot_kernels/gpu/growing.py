"""Grows one level of draft trees in two launches; tests compare the result with the same in plain torch.

Scores become integers of the same order, with the column in the lower 32 bits, so that one maximum finds a
value and its place, and a tie goes to the lower place.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.gpu.launching import (
    await_preceding_kernel,
    kernel,
    kernel_of_any,
    let_next_begin,
    on_device_of,
    pdl_options,
    power_of_two,
)
from specsot_kernels.growing import CandidatePool, LevelFrontier, LevelPlace

# Columns. Range of a row of logits that one program reads. Untuned.
WIDE = 4096
# A key below all others: the smallest int64.
LOWEST_KEY = tl.constexpr(-9223372036854775808)


def grow(
    logits: Tensor,
    k: int,
    place: LevelPlace,
    words: int,
    pool: CandidatePool,
    before: LevelFrontier | None,
    offsets: Tensor | None,
) -> LevelFrontier:
    """Add the k best children of every node of a level to the pool, and return the best of them as the next
    frontier.

    logits: [B * nodes, draft vocabulary], the head's output for the roots (one node each) or the preceding
        frontier.
    k: children of each node.
    place: where the new level lies.
    words: mask words of a row.
    pool: receives k * nodes candidates of each tree from place.first on.
    before: the preceding frontier; None if the rows are roots.
    offsets: int64 [draft vocabulary], added to a draft token id to get the base model's id; None if they are
        the same.

    A tie goes to the lower token id, or the lower number in the pool.

    With 2 nodes and k = 3, the candidates first .. first + 2 are children of node 0, first + 3 .. first + 5
    of node 1.
    """
    (rows, columns) = logits.shape
    trees = pool.tokens.shape[0]
    wide = min(power_of_two(columns), WIDE)
    nodes = rows // trees
    width = place.width
    chunks = -(-columns // wide)
    keys = logits.new_empty((rows, chunks, k), dtype=torch.int64)
    sums = logits.new_empty((rows, chunks, 2), dtype=torch.float32)
    tokens, numbers, origins = logits.new_empty((3, trees, width), dtype=torch.int64).unbind()
    after = LevelFrontier(
        logits.new_empty((trees, width), dtype=torch.float32),
        tokens,
        numbers,
        origins,
        logits.new_empty((trees * width, words), dtype=torch.int32),
    )
    old = after if before is None else before
    with on_device_of(logits):
        _find[(rows, chunks)](
            logits, keys, sums, columns, logits.stride(0), k, wide, num_warps=8, **pdl_options(logits)
        )
        _choose[(trees,)](
            keys, sums, pool.scores, pool.tokens, pool.parents, old.scores, old.numbers, old.bits,
            after.scores, after.tokens, after.numbers, after.origins, after.bits,
            keys if offsets is None else offsets, place.first, place.fed, pool.tokens.stride(0),
            pool.scores.stride(0), chunks, k, nodes, width, words, power_of_two(nodes), power_of_two(k),
            power_of_two(chunks * k), power_of_two(chunks), before is None, offsets is not None,
            num_warps=8, **pdl_options(logits),
        )  # fmt: skip
    return after


@kernel
def order_of(values):
    """Map floats to int64 numbers of the same order; NaN becomes -infinity, and negative zero
    becomes zero.

    values: floats of any shape.
    """
    values = tl.where(values == values, values, float("-inf")) + 0.0  # no NaN, no negative zero
    short = values.to(tl.int32, bitcast=True)
    return (short ^ ((short >> 31) & 0x7FFFFFFF)).to(tl.int64)


@kernel
def _key(values, column):
    """Return keys: the order in the upper 32 bits, the inverted column in the lower: of equal values, the
    lower column wins.

    values: floats of any shape.
    column: their columns, of the same shape.
    """
    return (order_of(values) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@kernel
def _value(key):
    """Return the value of a key, fp32.

    key: what `_key` returned.
    """
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@kernel
def _column(key):
    """Return the column of a key, int32.

    key: what `_key` returned.
    """
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@kernel
def _find(logits, keys, sums, columns, from_row, k: tl.constexpr, wide: tl.constexpr, early: tl.constexpr):
    """Find the k best columns in a range of a row, its maximum, and its sum of exponentials.

    logits: [rows, columns], `from_row` numbers from one row to the next.
    keys: int64 [rows, chunks, k], receives the keys of the best columns.
    sums: fp32 [rows, chunks, 2], receives the maximum and the sum of exponentials.
    columns: columns of a row.
    from_row: numbers from one row to the next.
    k: how many to find.
    wide: columns of a range.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * wide + tl.arange(0, wide)
    there = column < columns
    await_preceding_kernel(early)
    values = tl.load(logits + row * from_row + column, mask=there, other=float("-inf")).to(tl.float32)
    highest = tl.max(values, 0)
    floor = tl.where(highest > float("-inf"), highest, 0.0)
    place = row * tl.num_programs(1) + chunk
    tl.store(sums + place * 2, floor)
    tl.store(sums + place * 2 + 1, tl.sum(tl.exp(values - floor), 0))
    key = tl.where(there, _key(values, column), LOWEST_KEY)
    for found in range(k):
        best = tl.max(key, 0)
        tl.store(keys + place * k + found, best)
        key = tl.where(key == best, LOWEST_KEY, key)


# One compiled form for all levels and pools, instead of one for each alignment of numbers and addresses: the
# stores are few and short, and each form takes half a second of a core to compile.
@kernel_of_any(
    *("pool_scores", "pool_tokens", "pool_parents", "old_numbers", "tokens", "numbers", "origins"),
    numbers=("first", "fed", "from_pool", "from_scores", "chunks"),
)
def _choose(
    keys, sums, pool_scores, pool_tokens, pool_parents, old_scores, old_numbers, old_bits,
    scores, tokens, numbers, origins, bits, offsets, first, fed, from_pool, from_scores, chunks,
    k: tl.constexpr, nodes: tl.constexpr, width: tl.constexpr, words: tl.constexpr, high: tl.constexpr,
    across: tl.constexpr, many: tl.constexpr, pieces: tl.constexpr, roots: tl.constexpr,
    moved: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Merge the k best of each of a tree's `nodes` rows, and choose the `width` best of all as the next
    frontier.

    keys: int64 [rows, chunks, k], the keys of the best columns that `_find` found.
    sums: fp32 [rows, chunks, 2], the maximum and the sum of exponentials that `_find` found.
    pool_scores: fp32 [trees, candidates], receives the scores of the new candidates; see `CandidatePool`.
    pool_tokens: int64, of the same shape, receives their tokens.
    pool_parents: int64, of the same shape, receives their parents.
    old_scores: fp32 [trees, nodes], the scores of the preceding frontier, unless `roots`; see
        `LevelFrontier`.
    old_numbers: int64 [trees, nodes], its numbers in the pool.
    old_bits: int32 [trees * nodes, words], its mask words.
    scores: fp32 [trees, width], receives the scores of the next frontier; see `LevelFrontier`.
    tokens: int64 [trees, width], receives its tokens.
    numbers: int64 [trees, width], receives its numbers in the pool.
    origins: int64 [trees, width], receives the rows of the head's outputs whose features it is fed with.
    bits: int32 [trees * width, words], receives its mask words.
    offsets: int64, added to a draft token id, if `moved`.
    first: number in the pool of the level's first candidate.
    fed: number of the tree's rows that are fed before the level's frontier.
    from_pool: numbers from one tree to the next in the pool's tokens and parents.
    from_scores: numbers from one tree to the next in the pool's scores.
    chunks: ranges of a row.
    k: children of a node.
    nodes: nodes of the level.
    width: nodes of the next frontier.
    words: mask words of a row.
    high: `nodes`, rounded up to a power of two.
    across: `k`, rounded up to a power of two.
    many: `chunks` * `k`, rounded up to a power of two.
    pieces: `chunks`, rounded up to a power of two.
    roots: whether the rows are roots.
    moved: whether there are offsets.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    tree = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, high)
    found = tl.arange(0, many)
    piece = tl.arange(0, pieces)
    slot = tl.arange(0, across)
    live = row < nodes
    await_preceding_kernel(early)
    at = (tree * nodes + row) * chunks
    held = live[:, None] & (piece < chunks)[None, :]
    tops = tl.load(sums + (at[:, None] + piece[None, :]) * 2, mask=held, other=float("-inf"))
    parts = tl.load(sums + (at[:, None] + piece[None, :]) * 2 + 1, mask=held, other=0.0)
    highest = tl.where(live, tl.max(tops, 1), 0.0)
    whole = highest + tl.log(tl.where(live, tl.sum(parts * tl.exp(tops - highest[:, None]), 1), 1.0))
    held = live[:, None] & (found < chunks * k)[None, :]
    key = tl.load(keys + at[:, None] * k + found[None, :], mask=held, other=LOWEST_KEY)
    values = tl.zeros((high, across), tl.float32)
    columns = tl.zeros((high, across), tl.int32)
    for turn in range(k):
        best = tl.max(key, 1)
        key = tl.where(key == best[:, None], LOWEST_KEY, key)
        here = slot[None, :] == turn
        values = tl.where(here, (_value(best) - whole)[:, None], values)
        columns = tl.where(here, _column(best)[:, None], columns)
    there = live[:, None] & (slot < k)[None, :]
    above = tl.zeros((high,), tl.int64)
    if not roots:
        values += tl.load(old_scores + tree * nodes + row, mask=live, other=0.0)[:, None]
        above = tl.load(old_numbers + tree * nodes + row, mask=live, other=0) + 1
    named = columns.to(tl.int64)
    if moved:
        named += tl.load(offsets + columns, mask=there, other=0)
    number = row[:, None] * k + slot[None, :]
    place = tree * from_pool + first + number
    tl.store(pool_tokens + place, named, mask=there)
    tl.store(pool_parents + place, tl.broadcast_to(above[:, None], (high, across)), mask=there)
    tl.store(pool_scores + tree * from_scores + first + number, values, mask=there)
    # A candidate's rank is the number of better ones: rank 0 is the best, ranks below `width` join the
    # frontier.
    size: tl.constexpr = high * across
    flat = tl.reshape(tl.where(there, _key(values, number), LOWEST_KEY), (size,))
    better = tl.sum((flat[None, :] > flat[:, None]).to(tl.int32), 1)
    taken = (better < width) & (flat > LOWEST_KEY)
    chosen = _column(flat)
    goal = tree * width + better
    tl.store(scores + goal, tl.reshape(values, (size,)), mask=taken)
    tl.store(tokens + goal, tl.reshape(named, (size,)), mask=taken)
    tl.store(numbers + goal, (first + chosen).to(tl.int64), mask=taken)
    parent = tree * nodes + chosen // k
    tl.store(origins + goal, parent, mask=taken)
    own = fed + better
    for word in range(words):
        seen = tl.where(own // 32 == word, tl.full((size,), 1, tl.int32) << (own % 32), 0)
        if not roots:
            seen |= tl.load(old_bits + parent * words + word, mask=taken, other=0)
        tl.store(bits + goal * words + word, seen, mask=taken)
