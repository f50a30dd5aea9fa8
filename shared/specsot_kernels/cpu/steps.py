"""Products in few bits and whole decoder layers (of Llama and Qwen) over KV pages, run by a team of threads.

Tables of 64-bit integers say where everything is in memory; every field's constant is its offset in bytes.
All numbers are fp32 except weights, and keys and values in their pages. A row's result is the same bits in
every batch: its sums are integers, or run in one order, and its columns are read in the order of its
sequence.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numba import types

from specsot_kernels.cpu import tiles
from specsot_kernels.cpu import vectors as v
from specsot_kernels.cpu.attending import KV_ITEM_BYTES, gather, score, soften
from specsot_kernels.cpu.compiling import source_digest
from specsot_kernels.cpu.layout import (
    AMX,
    ATTENDED,
    BARRIER,
    BEST,
    BIAS,
    COLUMNS_AT_ONCE,
    CORRECTIONS,
    COUNT,
    DOWN,
    EPS,
    FIRST_COLUMNS,
    FIRST_COUNT,
    FIRST_SUMS,
    FORMAT,
    GATE_UP,
    GROUP,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    INPUT_NORM,
    INPUTS,
    K_NORM,
    KEYS,
    KV_HEADS,
    LANES,
    LATER_COLUMNS,
    LATER_COUNT,
    LAYER_FIELDS,
    LAYERS_APART,
    LOG_PROBABILITIES,
    LONG_GROUP,
    MLP_NORM,
    NEXT_COLUMNS,
    NEXT_COUNT,
    NORM,
    NORMED_ROW,
    OFFSETS,
    OUT,
    OUTPUT,
    OUTPUT_SCALES,
    OUTPUTS,
    PAGE_ROWS,
    PANEL_BYTES,
    POSITIONS,
    PROJECTED,
    Q6_K,
    Q_NORM,
    QKV,
    QUANTIZED,
    QUERY,
    QUERY_SCALE,
    QUERY_TABLE_BYTES,
    QUERY_TABLES,
    ROTATED,
    ROTATIONS,
    ROW_SCALES,
    ROWS,
    ROWS_AT_ONCE,
    ROWS_OF_TWO,
    SCORES,
    SCORES_APART,
    SECOND_SUMS,
    SLOTS,
    STEP_BYTES,
    STORE_KV,
    SYSTEM,
    TAPS,
    THREAD,
    THREADS,
    TILE_ROWS,
    TOKENS,
    TOP_K,
    VALUE_SUMS,
    VALUES,
    VISIBLE_COLUMNS,
    VISIBLE_HEADS,
    WEIGHT,
    WEIGHTS,
    WIDE_INPUTS,
    X,
)
from specsot_kernels.cpu.tiles import HEIGHTS, LONG_STEPS, STEPS, TALL_PANELS, WIDE_PANELS

# Rows. Up to so many are computed in one pass. Chosen by the time of 8-bit products on an Intel Xeon with
# AVX-512 VNNI and one thread: 3 and 4 rows in one pass take 1.11 and 1.13 times as long as one row, in two
# passes 1.23 and 1.29.
ROWS_OF_ONE = 4 if HEIGHTS[0] > 4 else 2


@v.inlined_part
def none():
    """Return 0 as a variable: a function that is called with the literal 0 is compiled once more for it."""
    return numba.int64(0)


@v.inlined_part
def wait(frame, threads):
    """Wait until all threads of the team have arrived.

    frame: address of the frame's table.
    threads: number of threads; one thread does not wait.
    """
    if threads > 1:
        v.meet(v.get_long(frame + BARRIER), threads, v.get_long(frame + SYSTEM))


@v.part
def normalise(x, weight, size, eps, out):
    """Write x / sqrt(mean(x^2) + eps) * weight.

    x: address of the row, fp32.
    weight: address of the norm's weight, fp32.
    size: numbers of the row, a multiple of 16.
    eps: epsilon of the norm.
    out: address of the result; may be `x`.
    """
    squares = v.splat(0.0)
    for at in range(0, 4 * size, 64):
        part = v.load(x + at)
        squares = v.fma(part, part, squares)
    scale = v.splat(
        numba.float32(1.0)
        / numba.float32((v.total(squares) / numba.float32(size) + eps) ** numba.float32(0.5))
    )
    for at in range(0, 4 * size, 64):
        v.store(out + at, v.mul(v.mul(v.load(x + at), scale), v.load(weight + at)))


@v.part
def quantize_row(x, size, bits, out, scales, sums, across):
    """Quantize a row to 8 bits, each group of inputs with a scale, and write a correction for each group.

    8-bit weights are stored plus 128, so the correction in `sums` is -128 * the sum of the group's numbers;
    for 4-bit weights it is scale * the sum, which multiplies the group's minimum value. For 6-bit weights,
    which are stored plus 32, there are two corrections, -32 * the sum of each half. A group with a number
    that is not finite gets a scale that is not finite. For 8-bit weights a group is LONG_GROUP inputs, of
    which missing ones count as 0; for others it is GROUP inputs. A group of zeros gets scale 0.

    x: address of the row, fp32.
    size: numbers of the row, a multiple of 32.
    bits: the format of the weight that the row is multiplied with; see `layout.FORMAT`.
    out: address of the quantized row, as many bytes as `short_bytes` returns.
    scales: address that receives the first group's scale.
    sums: address that receives the first group's correction.
    across: bytes from one group's scale (and correction) to the next one's.
    """
    short = WIDE_INPUTS and bits == 8
    further = v.splat(0.0)
    last = v.splat(0.0)
    for first in range(0, size, LONG_GROUP if bits == 8 else GROUP):
        at = x + 4 * first
        to = out + (2 if short else 1) * first
        low, high = v.load(at), v.load(at + 64)
        if bits == 8:
            whole_group = first + GROUP < size  # else zeros follow
            further = v.load(at + 128) if whole_group else v.splat(0.0)
            last = v.load(at + 192) if whole_group else v.splat(0.0)
        peak = v.peak(low, high, further, last)
        inverse = v.splat(numba.float32(127.0) / peak if peak > 0 else numba.float32(0.0))
        scale = peak / numba.float32(127.0)
        low, high = v.mul(low, inverse), v.mul(high, inverse)
        whole = v.put_shorts(to, low, high) if short else v.put_bytes(to, low, high)
        v.put(scales, scale)
        if bits == 8:
            further = v.mul(further, inverse)
            last = v.mul(last, inverse)
            second_half = to + (2 if short else 1) * GROUP
            whole += (
                v.put_shorts(second_half, further, last) if short else v.put_bytes(second_half, further, last)
            )
            v.put_int(sums, -128 * whole)
        elif bits == Q6_K:
            first_half = v.put_bytes(to, low, v.splat(0.0))
            v.put_int(sums, -32 * first_half)
            sums = sums + across
            v.put_int(sums, -32 * (v.put_bytes(to, low, high) - first_half))
        else:
            v.put(sums, scale * numba.float32(whole))
        scales = scales + across
        sums = sums + across


@v.part
def short_bytes(inputs, bits):
    """Return the bytes of a quantized row, whole groups.

    inputs: numbers of the row.
    bits: the format of the weight that the row is multiplied with; see `layout.FORMAT`.
    """
    return -(-inputs // LONG_GROUP) * LONG_GROUP * (STEP_BYTES // 4) if bits == 8 else inputs


@v.part
def quantize_into(frame, product, x, row):
    """Quantize a row into the frame's memory.

    Its scales and corrections are written too, where `multiply` reads them.

    frame: address of the frame's table.
    product: address of the product's table.
    x: address of the row, fp32.
    row: number of the row.
    """
    inputs = v.get_long(product + INPUTS)
    bits = v.get_long(product + FORMAT)
    out = v.get_long(frame + QUANTIZED) + row * short_bytes(inputs, bits)
    scales = v.get_long(frame + ROW_SCALES) + 4 * row
    sums = v.get_long(frame + CORRECTIONS) + 4 * row
    quantize_row(x, inputs, bits, out, scales, sums, 4 * v.get_long(frame + ROWS))


@v.part
def multiply(thread, threads, frame, product, prior, prior_stride, out):
    """Compute this thread's outputs for all rows: out = prior + x W^T, for the quantized rows of the frame.

    Panels of 16 outputs are divided evenly among the threads; a thread may get none.

    thread: number of this thread, from 0.
    threads: number of threads.
    frame: address of the frame's table.
    product: address of the product's table.
    prior: address of what the product is added to, fp32.
    prior_stride: bytes from one row of `prior` to the next; 0: the same row is added to all.
    out: address of the result, fp32 [rows, outputs]; may be `prior`.
    """
    inputs, outputs, bits = (
        v.get_long(product + INPUTS), v.get_long(product + OUTPUTS), v.get_long(product + FORMAT),
    )  # fmt: skip
    eight = bits == 8
    rows = v.get_long(frame + ROWS)
    short = v.get_long(frame + QUANTIZED)
    scales = v.get_long(frame + ROW_SCALES)
    sums = v.get_long(frame + CORRECTIONS)
    weight = v.get_long(product + WEIGHT)
    factors = v.get_long(product + OUTPUT_SCALES)
    groups = -(-inputs // LONG_GROUP) if eight else inputs // GROUP
    panels = outputs // LANES
    steps = LONG_STEPS if eight else STEPS
    stride = short_bytes(inputs, bits)
    across = 4 * rows
    apart = v.get_long(product + PANEL_BYTES)
    # With AMX, 16 rows of 8-bit products take as long as 6 rows without it. The sums are integers, so that
    # the result is the same.
    tiled = AMX and rows > HEIGHTS[0]
    if tiled:
        tiles.configure(bits)
    # Up to ROWS_OF_TWO rows wait for memory. Beyond ROWS_OF_ONE rows, two passes fetch weights sooner than
    # one taller pass does.
    height = min(rows if rows <= ROWS_OF_ONE else (rows + 1) // 2, HEIGHTS[0])
    height = HEIGHTS[0] if rows > ROWS_OF_TWO else height
    height = TILE_ROWS if tiled else height
    passes = (rows + height - 1) // height
    lines = (apart // groups + 64 * passes - 1) // (64 * passes)
    pace = (apart + groups * steps * passes - 1) // (groups * steps * passes)
    panel = panels * thread // threads
    last = panels * (thread + 1) // threads
    while panel < last:
        width = WIDE_PANELS if rows == 1 else TALL_PANELS
        width = width if last - panel >= width else 1
        w = weight + panel * apart
        shift = panel * 64
        row = 0
        ahead = w + width * apart
        while row < rows:
            x = short + row * stride
            scale = scales + 4 * row
            total = sums + 4 * row
            left = rows - row
            before = prior + row * prior_stride + shift
            to = out + row * outputs * 4 + shift
            if tiled and left > HEIGHTS[0]:
                for at in range(width):
                    tiles.matrix(
                        bits, left, x, stride, w + at * apart, groups, scale, total, across,
                        factors + shift + 64 * at, before + 64 * at, prior_stride, to + 64 * at, outputs * 4,
                        ahead, lines,
                    )  # fmt: skip
                    ahead += groups * lines * 64
                row += TILE_ROWS
                continue
            given = (
                x, stride, w, apart, groups, scale, total, across, factors + shift,
                before, prior_stride, to, outputs * 4, ahead, pace,
            )  # fmt: skip
            left = min(left, height)
            few = passes <= tiles.FEW_PASSES
            row += tiles.multiply(bits, width, left, given, few)
            ahead += groups * steps * width * pace
        panel += width
    if tiled:
        tiles.release()


@v.inlined_part
def own_rows(thread, threads, frame):
    """Return this thread's range of rows.

    The rows are adjacent, because threads whose scales share a cache line would wait for one another.

    thread: number of this thread, from 0.
    threads: number of threads.
    frame: address of the frame's table.
    """
    rows = v.get_long(frame + ROWS)
    return rows * thread // threads, rows * (thread + 1) // threads


@v.part
def project(thread, threads, frame, product, x, stride, norm, out):
    """Multiply rows, normed first if there is a norm, with a weight, and add its bias.

    All threads of the team must call it: they wait for one another between the quantized rows and the
    product. This thread's outputs are complete when it returns, other threads' perhaps not.

    thread: number of this thread, from 0.
    threads: number of threads.
    frame: address of the frame's table.
    product: address of the product's table.
    x: address of the rows, fp32.
    stride: bytes from one row of `x` to the next.
    norm: address of the norm's weight, or 0.
    out: address of the result, fp32 [rows, outputs].
    """
    inputs = v.get_long(product + INPUTS)
    wide = v.get_long(frame + NORMED_ROW) + thread * 4 * inputs
    first, last = own_rows(thread, threads, frame)
    for row in range(first, last):
        source = x + row * stride
        if norm:
            normalise(source, norm, inputs, v.get(frame + EPS), wide)
            source = wide
        quantize_into(frame, product, source, row)
    wait(frame, threads)
    multiply(thread, threads, frame, product, v.get_long(product + BIAS), none(), out)


@v.part
def turn(frame, head, norm, position, scale):
    """Norm (if there is a norm) and rotate a head in place, then scale it. Rotated pairs are adjacent
    numbers.

    frame: address of the frame's table.
    head: address of the head, fp32.
    norm: address of the head norm's weight, or 0.
    position: the row's position in its sequence.
    scale: factor of the result.
    """
    dim = v.get_long(frame + HEAD_DIM)
    if norm:
        normalise(head, norm, dim, v.get(frame + EPS), head)
    table = v.get_long(frame + ROTATIONS) + position * 8 * dim
    for at in range(0, 4 * dim, 64):
        x = v.load(head + at)
        turned = v.fma(v.swap(x), v.load(table + 4 * dim + at), v.mul(x, v.load(table + at)))
        v.store(head + at, v.mul(turned, v.splat(scale)))


@v.part
def rotate_and_store(frame, layer, row):
    """Rotate a row's queries and keys, and store its keys and values in their page unless the slot is
    negative.

    Head norms are applied if the layer has them. Queries are also multiplied by the frame's QUERY_SCALE.

    frame: address of the frame's table.
    layer: address of the layer's table.
    row: number of the row.
    """
    heads, kv_heads, dim = (
        v.get_long(frame + HEADS), v.get_long(frame + KV_HEADS), v.get_long(frame + HEAD_DIM),
    )  # fmt: skip
    at = v.get_long(frame + PROJECTED) + row * (heads + 2 * kv_heads) * dim * 4
    position = v.get_long(v.get_long(frame + POSITIONS) + 8 * row)
    scale = v.get(frame + QUERY_SCALE)
    for head in range(heads):
        turn(frame, at + head * dim * 4, v.get_long(layer + Q_NORM), position, scale)
    slot = v.get_long(v.get_long(frame + SLOTS) + 8 * row)
    page_rows = v.get_long(frame + PAGE_ROWS)
    for head in range(kv_heads):
        key = at + (heads + head) * dim * 4
        turn(frame, key, v.get_long(layer + K_NORM), position, numba.float32(1.0))
        if slot >= 0:
            place = (
                ((slot // page_rows * kv_heads + head) * page_rows + slot % page_rows) * dim * KV_ITEM_BYTES
            )
            for first in range(0, dim, LANES):
                to = place + KV_ITEM_BYTES * first
                source = key + 4 * first
                v.store_half(v.get_long(frame + KEYS) + to, v.load(source))
                v.store_half(v.get_long(frame + VALUES) + to, v.load(source + kv_heads * dim * 4))


@v.part
def turn_back(frame, query, steps, out):
    """Write a query rotated by some positions towards the first columns.

    frame: address of the frame's table.
    query: address of the query, fp32.
    steps: number of positions, at least 0.
    out: address of the result.
    """
    dim = v.get_long(frame + HEAD_DIM)
    table = v.get_long(frame + ROTATIONS) + steps * 8 * dim
    for at in range(0, 4 * dim, 64):
        x = v.load(query + at)
        sine = v.sub(v.splat(0.0), v.load(table + 4 * dim + at))
        v.store(out + at, v.fma(v.swap(x), sine, v.mul(x, v.load(table + at))))


@v.part
def fill_query_table(thread, frame, first, last, pair):
    """Fill in a thread's table with the queries of some rows that share a KV head, and return its extent.

    The result is the address where the table begins, the address where it ends, and the largest number of
    first columns that a row sees. The sums of values at these rows' places are set to 0. Queries with steps
    of 0 stay unrotated for the first columns.

    thread: number of this thread.
    frame: address of the frame's table.
    first: number of the first row.
    last: number of the last row + 1.
    pair: number of the KV head.
    """
    rows = v.get_long(frame + ROWS)
    seen_from = v.get_long(frame + VISIBLE_COLUMNS)
    heads, kv_heads, size = (
        v.get_long(frame + HEADS), v.get_long(frame + KV_HEADS), 4 * v.get_long(frame + HEAD_DIM),
    )  # fmt: skip
    group = heads // kv_heads
    seen_by = v.get_long(frame + VISIBLE_HEADS)
    apart = v.get_long(frame + SCORES_APART)
    own = thread * ROWS_AT_ONCE
    start = v.get_long(frame + QUERY_TABLES) + own * QUERY_TABLE_BYTES
    at = start
    turned = v.get_long(frame + ROTATED) + own * group * size
    even = v.get_long(frame + VALUE_SUMS) + own * group * size
    scores = v.get_long(frame + SCORES) + own * group * apart
    longest = 0
    before = 0
    for row in range(first, last):
        sight = seen_from + (row * seen_by + pair % seen_by) * 40
        longest = max(longest, v.get_long(sight + 8))
        steps = v.get_long(sight + 32)
        query = v.get_long(frame + PROJECTED) + (row * (heads + 2 * kv_heads) + pair * group) * size
        odd = v.get_long(frame + ATTENDED) + (row * heads + pair * group) * size
        for part in range(0, group * size, 64):
            v.store(odd + part, v.splat(0.0))
            v.store(even + part, v.splat(0.0))
        if steps:
            for head in range(group):
                turn_back(frame, query + head * size, steps, turned + head * size)
        v.put_long(at, turned if steps else query)
        for field in range(0, 32, 8):
            v.put_long(at + FIRST_COLUMNS + field, v.get_long(sight + field))
        v.put_long(at + QUERY, query)
        v.put_long(at + WEIGHTS, scores)
        v.put_long(at + FIRST_SUMS, odd)
        v.put_long(at + SECOND_SUMS, even)
        after, further = (row + ROWS_AT_ONCE, pair) if last < rows else (row - first, pair + 1)
        fresh = 0
        if after < rows and further < kv_heads:
            following = seen_from + (after * seen_by + further % seen_by) * 40
            lead = v.get_long(following)
            v.put_long(at + NEXT_COLUMNS, lead)
            if (further > pair or lead != v.get_long(sight)) and lead != before:
                fresh = v.get_long(following + 8)
            before = lead
        v.put_long(at + NEXT_COUNT, fresh)
        at = at + QUERY_TABLE_BYTES
        turned = turned + group * size
        even = even + group * size
        scores = scores + group * apart
    return start, at, longest


@v.part
def attend(thread, frame, first, pair):
    """Compute softmax attention of up to ROWS_AT_ONCE rows' queries of one KV head, over the columns that
    each row sees.

    Each row's columns are read in the order of its sequence. First columns are read COLUMNS_AT_ONCE at a time
    for all rows, since rows share them. What is read next is prefetched: values while keys are read, and the
    next rows' keys while values are read. The result is written to the rows' places in the field ATTENDED.

    thread: number of this thread.
    frame: address of the frame's table.
    first: number of the first row.
    pair: number of the KV head.
    """
    dim = v.get_long(frame + HEAD_DIM)
    last = min(first + ROWS_AT_ONCE, v.get_long(frame + ROWS))
    group = v.get_long(frame + HEADS) // v.get_long(frame + KV_HEADS)
    apart = v.get_long(frame + SCORES_APART)
    shift = pair * v.get_long(frame + PAGE_ROWS) * dim * KV_ITEM_BYTES
    keys, values = v.get_long(frame + KEYS) + shift, v.get_long(frame + VALUES) + shift
    coming = keys + (
        v.get_long(frame + PAGE_ROWS) * dim * KV_ITEM_BYTES if last == v.get_long(frame + ROWS) else 0
    )
    begin, end, longest = fill_query_table(thread, frame, first, last, pair)
    for start in range(0, longest, COLUMNS_AT_ONCE):
        for at in range(begin, end, QUERY_TABLE_BYTES):
            count = min(v.get_long(at + FIRST_COUNT) - start, COLUMNS_AT_ONCE)
            if count > 0:
                places = v.get_long(at + FIRST_COLUMNS) + 8 * start
                out = v.get_long(at + WEIGHTS) + 4 * start
                read = at > begin and v.get_long(at - QUERY_TABLE_BYTES + FIRST_COLUMNS) == v.get_long(
                    at + FIRST_COLUMNS
                )
                then = none() if read else values
                score(v.get_long(at), group, keys, places, count, dim, out, apart, then)
    for at in range(begin, end, QUERY_TABLE_BYTES):
        scores = v.get_long(at + WEIGHTS)
        before = v.get_long(at + FIRST_COUNT)
        tail_count = v.get_long(at + LATER_COUNT)
        query = v.get_long(at + QUERY)
        places = v.get_long(at + LATER_COLUMNS)
        score(query, group, keys, places, tail_count, dim, scores + 4 * before, apart, none())
        for head in range(group):
            own = scores + head * apart
            v.put(own + apart - 4, soften(own, before + tail_count))
    for start in range(0, longest, COLUMNS_AT_ONCE):
        for at in range(begin, end, QUERY_TABLE_BYTES):
            count = min(v.get_long(at + FIRST_COUNT) - start, COLUMNS_AT_ONCE)
            if count > 0:
                places = v.get_long(at + FIRST_COLUMNS) + 8 * start
                weights = v.get_long(at + WEIGHTS) + 4 * start
                odd, even = v.get_long(at + FIRST_SUMS), v.get_long(at + SECOND_SUMS)
                soon = coming if start < v.get_long(at + NEXT_COUNT) else none()
                then = v.get_long(at + NEXT_COLUMNS) + 8 * start
                gather(weights, apart, group, values, places, count, dim, odd, even, soon, then)
    for at in range(begin, end, QUERY_TABLE_BYTES):
        odd = v.get_long(at + FIRST_SUMS)
        even = v.get_long(at + SECOND_SUMS)
        before = v.get_long(at + FIRST_COUNT)
        one, two = (even, odd) if before % 2 else (odd, even)
        scores = v.get_long(at + WEIGHTS)
        places = v.get_long(at + LATER_COLUMNS)
        tail_count = v.get_long(at + LATER_COUNT)
        gather(scores + 4 * before, apart, group, values, places, tail_count, dim, one, two, none(), none())
        for head in range(group):
            scale = v.splat(v.get(scores + head * apart + apart - 4))
            for part in range(4 * head * dim, 4 * (head + 1) * dim, 64):
                v.store(odd + part, v.mul(v.add(v.load(odd + part), v.load(even + part)), scale))


@v.part
def gate(inner, size):
    """Write silu(first half) * second half into the first half.

    inner: address of the row, fp32 [2 * size].
    size: numbers of a half, a multiple of 16.
    """
    for at in range(0, 4 * size, 64):
        x = v.load(inner + at)
        sigmoid = v.div(v.splat(1.0), v.add(v.splat(1.0), v.exp(v.sub(v.splat(0.0), x))))
        v.store(inner + at, v.mul(v.mul(x, sigmoid), v.load(inner + 4 * size + at)))


@v.part
def before_attention(thread, threads, frame, layer):
    """Compute queries, keys and values of all rows, and store keys and values in their pages.

    A layer without an input norm reads the field X instead of the hidden rows. A row with a negative slot
    stores nothing.

    thread: number of this thread, from 0.
    threads: number of threads.
    frame: address of the frame's table.
    layer: address of the layer's table.
    """
    norm = v.get_long(layer + INPUT_NORM)
    (first, last) = own_rows(thread, threads, frame)
    inputs = v.get_long(frame + HIDDEN) if norm else v.get_long(frame + X)
    stride = v.get_long(layer + QKV + INPUTS) * 4
    project(thread, threads, frame, layer + QKV, inputs, stride, norm, v.get_long(frame + PROJECTED))
    wait(frame, threads)
    for row in range(first, last):
        rotate_and_store(frame, layer, row)


@v.part
def after_attention(thread, threads, frame, layer):
    """Apply the output projection and the MLP to all rows.

    Both updates are added to the hidden rows, in place.

    thread: number of this thread, from 0.
    threads: number of threads.
    frame: address of the frame's table.
    layer: address of the layer's table.
    """
    hidden = v.get_long(frame + HIDDEN)
    (first, last) = own_rows(thread, threads, frame)
    width = v.get_long(layer + OUT + INPUTS)
    size = v.get_long(layer + DOWN + INPUTS)
    stride = v.get_long(layer + OUT + OUTPUTS) * 4
    for row in range(first, last):
        quantize_into(frame, layer + OUT, v.get_long(frame + ATTENDED) + row * width * 4, row)
    wait(frame, threads)
    multiply(thread, threads, frame, layer + OUT, hidden, stride, hidden)
    wait(frame, threads)
    inner = v.get_long(frame + INNER)
    project(thread, threads, frame, layer + GATE_UP, hidden, stride, v.get_long(layer + MLP_NORM), inner)
    wait(frame, threads)
    for row in range(first, last):
        gate(inner + row * size * 8, size)
        quantize_into(frame, layer + DOWN, inner + row * size * 8, row)
    wait(frame, threads)
    multiply(thread, threads, frame, layer + DOWN, hidden, stride, hidden)


@v.part
def tap(thread, threads, frame, product, out):
    """Multiply the hidden rows, without a norm, with a weight.

    The product's bias is added. The team waits until all threads have finished.

    thread: number of this thread, from 0.
    threads: number of threads.
    frame: address of the frame's table.
    product: address of the product's table.
    out: address of the result, fp32 [rows, outputs].
    """
    stride = v.get_long(product + INPUTS) * 4
    project(thread, threads, frame, product, v.get_long(frame + HIDDEN), stride, none(), out)
    wait(frame, threads)


@v.part
def team(frame):
    """Return this thread's number, and the number of threads; (0, 1) without a team.

    frame: address of the frame's table.
    """
    if v.get_long(frame + BARRIER):
        thread = v.call_int(v.get_long(frame + THREAD))
        threads = v.call_int(v.get_long(frame + THREADS))
        return numba.int64(thread), numba.int64(threads)
    return numba.int64(0), numba.int64(1)


@v.part
def choose(logits, size, count, chances, tokens, offsets):
    """Write the best of a row's logits in falling order: log-probabilities and token ids. Ties keep their
    order.

    The log-probabilities are those of a softmax over all `size` logits.

    logits: address of the logits, fp32.
    size: number of logits, a multiple of 16.
    count: how many to choose, at most `size`.
    chances: address of fp32 [count], receives log-probabilities.
    tokens: address of int64 [count], receives token ids.
    offsets: address of int64 [size], added to an output's number to get its token id, or 0.
    """
    num_chosen = 0
    smallest = numba.float32(-np.inf)
    for at in range(0, 4 * size, 64):
        if num_chosen < count or v.largest(v.load(logits + at)) > smallest:
            for one in range(at, min(at + 64, 4 * size), 4):
                value = v.get(logits + one)
                if num_chosen < count or value > smallest:
                    place = num_chosen if num_chosen < count else count - 1
                    num_chosen = min(num_chosen + 1, count)
                    while place > 0 and v.get(chances + 4 * place - 4) < value:
                        v.put(chances + 4 * place, v.get(chances + 4 * place - 4))
                        v.put_long(tokens + 8 * place, v.get_long(tokens + 8 * place - 8))
                        place -= 1
                    v.put(chances + 4 * place, value)
                    v.put_long(tokens + 8 * place, one // 4)
                    smallest = v.get(chances + 4 * num_chosen - 4)
    peak = v.splat(v.get(chances))
    sum_ = v.splat(0.0)
    for at in range(0, 4 * size, 64):
        sum_ = v.add(sum_, v.exp(v.sub(v.load(logits + at), peak)))
    whole = v.get(chances) + numba.float32(math.log(v.total(sum_)))
    for place in range(num_chosen):
        v.put(chances + 4 * place, v.get(chances + 4 * place) - whole)
        token = v.get_long(tokens + 8 * place)
        v.put_long(tokens + 8 * place, token + (v.get_long(offsets + 8 * token) if offsets else 0))


@v.part
def run_layer(thread, threads, frame, layer):
    """Run one layer on all threads.

    The keys' and values' addresses in the frame's table then point to the next layer.

    thread: number of this thread, from 0.
    threads: number of threads.
    frame: address of the frame's table.
    layer: address of the layer's table.
    """
    before_attention(thread, threads, frame, layer)
    wait(frame, threads)
    parts = (v.get_long(frame + ROWS) + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    tasks = parts * v.get_long(frame + KV_HEADS)
    for task in range(tasks * thread // threads, tasks * (thread + 1) // threads):
        attend(thread, frame, task % parts * ROWS_AT_ONCE, task // parts)
    wait(frame, threads)
    after_attention(thread, threads, frame, layer)
    # No thread reads these fields before the next `wait` has ended.
    if thread == 0:
        for field in (KEYS, VALUES):
            v.put_long(frame + field, v.get_long(frame + field) + v.get_long(frame + LAYERS_APART))
    wait(frame, threads)


def _run(tables):
    """Run the work of one call on this thread: a product, the choice of its best outputs, keys and values
    alone, or some layers.

    A product (MULTIPLY or TOP_K) reads the field X and writes OUTPUT. Before each of several layers its tap
    is computed if it has one.

    tables: address of three int64 numbers: the addresses of a frame's table and of a layer's or product's
        table, and what is computed: MULTIPLY, TOP_K, STORE_KV, or a number of layers.
    """
    frame = v.get_long(tables)
    layer = v.get_long(tables + 8)
    work = v.get_long(tables + 16)
    thread, threads = team(frame)
    if work == STORE_KV:
        before_attention(thread, threads, frame, layer)
        return
    taps = v.get_long(frame + TAPS)
    for number in range(work):
        place = taps + 16 * number
        if taps and v.get_long(place):
            tap(thread, threads, frame, v.get_long(place), v.get_long(place + 8))
        run_layer(thread, threads, frame, layer + number * LAYER_FIELDS * 8)
    if work > 0:
        return
    stride = v.get_long(layer + INPUTS) * 4
    out = v.get_long(frame + OUTPUT)
    project(thread, threads, frame, layer, v.get_long(frame + X), stride, v.get_long(frame + NORM), out)
    if work == TOP_K:
        wait(frame, threads)
        count = v.get_long(frame + COUNT)
        size = v.get_long(frame + BEST)
        chances = v.get_long(frame + LOG_PROBABILITIES)
        tokens = v.get_long(frame + TOKENS)
        for row in range(thread, v.get_long(frame + ROWS), threads):
            logits = out + row * v.get_long(layer + OUTPUTS) * 4
            own = row * count
            choose(logits, size, count, chances + 4 * own, tokens + 8 * own, v.get_long(frame + OFFSETS))


def compile_run() -> tuple[int, str, bytes | None]:
    """Compile `_run` as a C function of one int64 that returns nothing. Return its address, the name of the
    function, and its machine code as an ELF object; None if Numba had kept it and does not have its code.

    Numba is asked not to cache it if there is no folder to which a cache can be written. The function is
    never unloaded.
    """
    _run.__qualname__ = f"run_{source_digest()}{'_amx' * AMX}"
    kind = types.void(types.int64)
    try:
        compiled = numba.cfunc(kind, cache=True, error_model="numpy")(_run)
    # Numba finds no folder that it can write a cache to.
    except RuntimeError:
        compiled = numba.cfunc(kind, error_model="numpy")(_run)
    _held.append(compiled)
    # Numba has no public way to the machine code.
    code: bytes | None = getattr(getattr(compiled, "_library", None), "_compiled_object", None)
    assert compiled.address is not None
    return compiled.address, compiled.native_name, code


# Compiled functions, which must not be deleted.
_held: list[object] = []
