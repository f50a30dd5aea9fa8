"""Attention of a few queries over columns of one KV head, in fp32, over fp16 pages.

What is read from the pages is widened to fp32 once for up to three queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from specsot_kernels.cpu import vectors as v
from specsot_kernels.cpu.layout import BYTES, INSTRUCTIONS, LANES
from specsot_kernels.cpu.vectors import (
    F32,
    I64,
    INT,
    SECOND,
    VF,
    VH,
    VI,
    Builder,
    Value,
    address,
    fetch_line,
    fma_of,
    operation,
    read,
    spread,
    variables,
    write,
)

# Bytes of a number in the pages, which hold keys and values in fp16.
KV_ITEM_BYTES = 2


def _widened(b: Builder, at: Value) -> Value:
    """Emit a load of 16 fp16 numbers, widened to fp32.

    b: the LLVM builder into which code is emitted.
    at: address of the first number.
    """
    return b.fpext(read(VH)(b, at), VF)


def _fetch(b: Builder, base: Value, at: Value, vectors: int) -> None:
    """Emit a prefetch of vectors of fp16 numbers at base + the offset that is stored at an address.

    Nothing is returned. As many cache lines are prefetched as hold the vectors.

    b: the LLVM builder into which code is emitted.
    base: address to which the offset is added.
    at: address of the offset, in bytes.
    vectors: number of vectors of LANES numbers.
    """
    place = b.add(base, read(I64)(b, at))
    for line in range(-(-vectors * KV_ITEM_BYTES * LANES // BYTES)):
        fetch_line(b, address(b, place, (line, BYTES)), SECOND)


def _fold(b: Builder, x: Value, y: Value, apart: int) -> Value:
    """Emit a step of a transposing reduction, and return its vector: in each of two vectors, add the lanes
    that are `apart` apart.

    The result has eight sums of x and eight of y. After folds with 8, 4, 2 and 1 over 16 vectors, lane i is
    the total of vector i.

    b: the LLVM builder into which code is emitted.
    x: a vector of LANES floats.
    y: a second one.
    apart: distance of the lanes that are added: 8, 4, 2 or 1.
    """
    kept = [lane for lane in range(2 * LANES) if not lane & apart]
    if apart < 4:  # each group of four lanes holds sums of x and sums of y
        kept.sort(key=lambda lane: lane % LANES // 4)
    lower, upper = (
        b.shuffle_vector(x, y, ir.Constant(VI, [lane + shift for lane in kept])) for shift in (0, apart)
    )
    return b.fadd(lower, upper)


def _scores(vectors: int, queries: int) -> Callable[..., Value]:
    """Return an emitter of the scores of some queries with `count` keys, whose addresses are base +
    offsets[i].

    Scores are added to those already at `out` if `further` is not 0. 16 keys are always computed at a time,
    each summed in the same order; therefore `offsets` and `out` must extend beyond the last key to a multiple
    of 16.

    vectors: number of vectors of a query that are multiplied.
    queries: number of queries, at most 3.
    """

    def emit(
        b: Builder, q: Value, q_apart: Value, base: Value, offsets: Value, count: Value, out: Value,
        out_apart: Value, further: Value, values: Value,
    ) -> None:  # fmt: skip
        """Emit the scores.

        b: the LLVM builder into which code is emitted.
        q: address of the first query, fp32.
        q_apart: bytes from one query to the next.
        base: address to which offsets are added.
        offsets: address of int64 offsets of the keys, in bytes.
        count: number of keys.
        out: address of the first query's scores, fp32.
        out_apart: bytes from one query's scores to the next.
        further: not 0 if scores are added to those at `out`.
        values: address from which values at the same offsets are prefetched; 0: nothing is prefetched.
        """
        asked = [
            [read(VF)(b, address(b, q, (q_apart, query), (part, BYTES))) for part in range(vectors)]
            for query in range(queries)
        ]
        more = b.icmp_signed("!=", further, I64(0))
        with cgutils.for_range(b, b.lshr(b.add(count, I64(LANES - 1)), I64(4))) as loop:
            places = address(b, offsets, (loop.index, 8 * LANES))
            fetched = b.icmp_signed("!=", values, I64(0))
            with b.if_then(fetched), cgutils.for_range(b, I64(LANES)) as column:
                _fetch(b, values, address(b, places, (column.index, 8)), vectors)

            def dots(column: int) -> list[Value]:
                """Emit the products of all queries with one key, summed lane by lane; one vector for each
                query.

                column: number of the key among the 16.
                """
                key = b.add(base, read(I64)(b, address(b, places, (column, 8))))
                first, *others = (
                    _widened(b, address(b, key, (part, KV_ITEM_BYTES * LANES))) for part in range(vectors)
                )
                found = [b.fmul(query[0], first) for query in asked]
                for part, numbers in enumerate(others, 1):
                    found = [fma_of(b, query[part], numbers, one) for query, one in zip(asked, found)]
                return found

            def folded(left: list[Value], right: list[Value], apart: int) -> list[Value]:
                """Emit a fold of each query's pair of vectors; see `_fold`.

                left: one vector for each query.
                right: a second vector for each query.
                apart: distance of the lanes that are added.
                """
                return [_fold(b, x, y, apart) for x, y in zip(left, right)]

            fours = list[list[Value]]()
            for first in range(4):
                x, y = (folded(dots(first + at), dots(first + at + 4), 8) for at in (0, 8))
                fours.append(folded(x, y, 4))
            x, y = (folded(fours[at], fours[at + 1], 2) for at in (0, 2))
            for query, found in enumerate(folded(x, y, 1)):
                at = address(b, out, (out_apart, query), (loop.index, BYTES))
                before = b.select(more, read(VF)(b, at), ir.Constant(VF, None))
                write(VF)(b, at, b.fadd(before, found))

    return emit


def _values(vectors: int, queries: int) -> Callable[..., Value]:
    """Return an emitter that adds weighted values, at base + offsets[i], for some queries.

    Values 0, 2, 4, ... are added to the sum at `odd`, values 1, 3, ... to the sum at `even`; two sums are
    used because each addition waits for the preceding one. Nothing is added for a count of 0.

    vectors: number of vectors of a value that are summed.
    queries: number of queries, at most 3.
    """

    def emit(
        b: Builder, weights: Value, weights_apart: Value, base: Value, offsets: Value, count: Value,
        odd: Value, even: Value, apart: Value, keys: Value, soon: Value,
    ) -> None:  # fmt: skip
        """Emit the additions.

        b: the LLVM builder into which code is emitted.
        weights: address of the first query's weights, fp32.
        weights_apart: bytes from one query's weights to the next.
        base: address to which offsets are added.
        offsets: address of int64 offsets of the values, in bytes.
        count: number of values.
        odd: address of the first query's sum of values 0, 2, 4, ..., fp32.
        even: address of the first query's sum of values 1, 3, 5, ..., fp32.
        apart: bytes from one query's sum to the next.
        keys: address to which the offsets at `soon` are added to prefetch keys; 0: nothing is prefetched.
        soon: address of int64 offsets of as many keys to prefetch.
        """
        every = [(query, part) for query in range(queries) for part in range(vectors)]
        places = [
            [address(b, at, (apart, query), (part, BYTES)) for query, part in every] for at in (odd, even)
        ]
        sums = [variables(b, VF, len(every)) for _ in places]
        for own, at in zip(sums, places):
            for one, place in zip(own, at):
                b.store(read(VF)(b, place), one)

        def gather(column: Value, own: list[Value]) -> None:
            """Emit the addition of one weighted value to the sums of all queries.

            column: number of the value.
            own: variables of the sums, for each query and vector.
            """
            value = b.add(base, read(I64)(b, address(b, offsets, (column, 8))))
            numbers = [
                _widened(b, address(b, value, (part, KV_ITEM_BYTES * LANES))) for part in range(vectors)
            ]
            weight = [
                spread(b, read(F32)(b, address(b, weights, (weights_apart, query), (column, 4))))
                for query in range(queries)
            ]
            for (query, part), one in zip(every, own):
                b.store(fma_of(b, weight[query], numbers[part], b.load(one)), one)

        with cgutils.for_range(b, b.lshr(count, I64(1))) as loop:
            column = b.shl(loop.index, I64(1))
            with b.if_then(b.icmp_signed("!=", keys, I64(0))):
                for more in (0, 1):
                    _fetch(b, keys, address(b, soon, (column, 8), (more, 8)), vectors)
            gather(column, sums[0])
            gather(b.add(column, I64(1)), sums[1])
        with cgutils.for_range(b, b.and_(count, I64(1))):
            gather(b.sub(count, I64(1)), sums[0])
        for own, at in zip(sums, places):
            for one, place in zip(own, at):
                write(VF)(b, place, b.load(one))

    return emit


def _by_three(emitter: Callable[..., Any], vectors: int, num_arguments: int) -> Any:
    """Return a function that computes one tile of 1 to 3 queries, and returns how many queries that were.

        3 queries left -> one tile of 3; 4 left -> two tiles of 2; 5 left -> 3, then 2

    emitter: makes the emitter of a tile from numbers of vectors and queries: `_scores` or `_values`.
    vectors: number of vectors that are computed of each query.
    num_arguments: number of the emitter's arguments, all int64.
    """
    one, two, three = (
        operation(types.void, (INT,) * num_arguments, emitter(vectors, count)) for count in (1, 2, 3)
    )

    @v.part
    def fit(num_left: Any, arguments: Any) -> Any:
        """Compute 1 to 3 queries, and return how many.

        num_left: number of queries that are left, at least 1.
        arguments: the arguments of the emitter, for the first of these queries.
        """
        if num_left == 3 or num_left > 4:
            three(*arguments)
            return 3
        if num_left > 1:
            two(*arguments)
            return 2
        one(*arguments)
        return 1

    return fit


# Numbers of a value that are summed at a time: as many as the registers hold.
_AT_ONCE = 4 * LANES if INSTRUCTIONS == "avx512vnni" else LANES
_score4, _score1 = (_by_three(_scores, vectors, 9) for vectors in (4, 1))
_value4, _value1 = (_by_three(_values, vectors, 10) for vectors in (_AT_ONCE // LANES, 1))


@v.part
def score(queries, group, keys, offsets, count, dim, out, apart, values):
    """Compute the scores of adjacent queries of one row.

    `offsets` and `out` must extend beyond the last column to a multiple of 16, up to which scores are
    written; those of surplus columns mean nothing. With a count of 0 nothing is written.

    queries: address of the first query, fp32; the others follow it.
    group: number of queries.
    keys: address to which offsets are added.
    offsets: address of int64 offsets of the columns, in bytes.
    count: number of columns.
    dim: numbers of a head, a multiple of 16.
    out: address of the first query's scores, fp32.
    apart: bytes from one query's scores to the next.
    values: address from which values of the same columns are prefetched; 0: nothing is prefetched.
    """
    first = 0
    while first < dim:
        wide = first + 64 <= dim
        head = 0
        while head < group:
            query = queries + 4 * (head * dim + first)
            to = out + head * apart
            later = 0 if head or not values else values + KV_ITEM_BYTES * first
            given = query, 4 * dim, keys + KV_ITEM_BYTES * first, offsets, count, to, apart, first, later
            left = group - head
            head += _score4(left, given) if wide else _score1(left, given)
        first += 64 if wide else LANES


@v.part
def gather(weights, apart, group, values, offsets, count, dim, odd, even, keys, soon):
    """Add weighted values of some columns for adjacent queries of one row, to two sums each.

    The columns 0, 2, 4, ... are added to the sum at `odd`, the others to the sum at `even`. With a count of 0
    nothing changes.

    weights: address of the first query's weights, fp32.
    apart: bytes from one query's weights to the next.
    group: number of queries.
    values: address to which offsets are added.
    offsets: address of int64 offsets of the columns, in bytes.
    count: number of columns.
    dim: numbers of a head, a multiple of 16.
    odd: address of the first query's sum of values 0, 2, 4, ..., fp32.
    even: address of the first query's sum of values 1, 3, 5, ..., fp32.
    keys: address to which the offsets at `soon` are added to prefetch keys; 0: nothing is prefetched.
    soon: address of int64 offsets of as many columns to prefetch.
    """
    first = 0
    while first < dim:
        wide = first + _AT_ONCE <= dim
        head = 0
        while head < group:
            at = 4 * (head * dim + first)
            own = weights + head * apart
            later = 0 if head or not keys else keys + KV_ITEM_BYTES * first
            one = odd + at
            two = even + at
            base = values + KV_ITEM_BYTES * first
            given = own, apart, base, offsets, count, one, two, 4 * dim, later, soon
            left = group - head
            head += _value4(left, given) if wide else _value1(left, given)
        first += _AT_ONCE if wide else LANES


@v.part
def soften(scores, count):
    """Replace scores by exponentials (softmax without division), pad them to whole vectors, and return 1 /
    their sum.

    Padding is e ** -87 at most, that is, nothing compared with the largest weight of 1. The largest score
    becomes 1.

    scores: address of the scores, fp32, with room for a whole last vector.
    count: number of scores, at least 1.
    """
    end = (count + LANES - 1) // LANES * 64
    for at in range(4 * count, end, 4):
        v.put(scores + at, numba.float32(-1e30))
    highest = v.splat(-1e30)
    for at in range(0, end, 64):
        highest = v.maximum(highest, v.load(scores + at))
    peak = v.splat(v.largest(highest))
    sum_ = v.splat(0.0)
    for at in range(0, end, 64):
        weight = v.exp(v.sub(v.load(scores + at), peak))
        sum_ = v.add(sum_, weight)
        v.store(scores + at, weight)
    return numba.float32(1.0) / v.total(sum_)
