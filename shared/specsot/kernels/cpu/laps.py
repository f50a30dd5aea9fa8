"""Products in few bits and whole layers (as Llama and Qwen have them) over KV pages, by a team of threads.

Tables of 64-bit numbers say where everything is; every field is its offset in bytes. All numbers are fp32
but weights. A row's result is the same, bit for bit, in any company: its sums are whole numbers, or run in
one order, and its columns are read in the order of its text.
"""

# pyright: basic, reportMissingTypeStubs=false

from __future__ import annotations

import hashlib
from pathlib import Path

import numba
from numba import types

from specsot.kernels.cpu import tiles
from specsot.kernels.cpu import vectors as v
from specsot.kernels.cpu.tiles import TALL, TALL_BLOCKS, WIDE_BLOCKS
from specsot.kernels.cpu.vectors import GROUP, GROUP_BYTES, LANES, WIDE_INPUTS

# Of a product. factors: scales of outputs, of 8 bits. bias: zeros where there is none.
WEIGHT, FACTORS, BIAS, INPUTS, OUTPUTS, BITS = range(0, 48, 8)
PRODUCT = 6
# Of a layer: four products, weights of norms; those of heads may be 0.
QKV, OUT, GATE_UP, DOWN = range(0, 4 * 8 * PRODUCT, 8 * PRODUCT)
INPUT_NORM, MLP_NORM, Q_NORM, K_NORM = range(DOWN + 48, DOWN + 80, 8)
LAYER = DOWN // 8 + PRODUCT + 4
# Of a frame, or of a single product (the first nine). `SIGHT`: for each row (and each of `SEEN_BY` heads)
# where the offsets of the first columns that it sees lie, how many there are, both of those behind them, and
# how many positions nearer it is to the first ones than its own says. `TURNED`: a query of each thread.
(ROWS, EPS, THREAD, THREADS, BARRIER, SHORT, SCALES, SUMS, WIDE,
 HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE_ROWS, KEYS, VALUES, SLOTS, POSITIONS, TURNS, SIGHT, SEEN_BY,
 TURNED, SCORES, SCORES_APART, PROJECTED, ATTENDED, INNER, X, OUTPUT, NORM) = range(0, 30 * 8, 8)  # fmt: skip
FRAME = 30
WORD = 8 if WIDE_INPUTS else 4  # bytes of four inputs of 8-bit products


@numba.njit(forceinline=True)
def wait(frame, threads):
    if threads > 1:
        v.call(v.get_long(frame + BARRIER))


@numba.njit
def normalise(x, weight, size, eps, out):
    """x / sqrt(mean(x^2) + eps) * weight."""
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


@numba.njit
def shorten(x, size, bits, out, scales, sums):
    """A row in 8 bits, each group of inputs with a scale and the sum of its numbers (for 4-bit weights times
    that scale). What is not finite gets a scale that is not.
    """
    short = WIDE_INPUTS and bits == 8
    for group in range(size // GROUP):
        at, to = x + 4 * GROUP * group, out + (2 if short else 1) * GROUP * group
        low, high = v.load(at), v.load(at + 64)
        peak = v.largest(v.most(v.size(low), v.size(high)))
        inverse = v.splat(numba.float32(127.0) / peak if peak > 0 else numba.float32(0.0))
        scale = peak / numba.float32(127.0) + v.total(v.mul(v.add(low, high), v.splat(0.0)))
        low, high = v.mul(low, inverse), v.mul(high, inverse)
        if short:
            whole = v.put_shorts(to, low) + v.put_shorts(to + 2 * LANES, high)
        else:
            whole = v.put_bytes(to, low) + v.put_bytes(to + LANES, high)
        v.put(scales + 4 * group, scale)
        if bits == 8:
            v.put_int(sums + 4 * group, whole)
        else:
            v.put(sums + 4 * group, scale * numba.float32(whole))


@numba.njit
def shorten_row(frame, product, x, row):
    inputs, bits = v.get_long(product + INPUTS), v.get_long(product + BITS)
    wide = WORD // 4 if bits == 8 else 1
    out = v.get_long(frame + SHORT) + row * inputs * wide
    shift = row * (inputs // GROUP) * 4
    shorten(x, inputs, bits, out, v.get_long(frame + SCALES) + shift, v.get_long(frame + SUMS) + shift)


@numba.njit
def multiply(thread, threads, frame, product, prior, prior_stride, out):
    """This thread's outputs of all rows: out = prior + x W^T."""
    inputs, outputs, bits = (
        v.get_long(product + INPUTS), v.get_long(product + OUTPUTS), v.get_long(product + BITS),
    )  # fmt: skip
    rows, short = v.get_long(frame + ROWS), v.get_long(frame + SHORT)
    scales, sums = v.get_long(frame + SCALES), v.get_long(frame + SUMS)
    weight, factors = v.get_long(product + WEIGHT), v.get_long(product + FACTORS)
    eight = bits == 8
    stride = inputs * (WORD // 4) if eight else inputs
    each = 4 * (inputs // GROUP)  # bytes of a row's scales
    apart = inputs * LANES if eight else inputs // GROUP * GROUP_BYTES
    blocks, out_stride = outputs // LANES, 4 * outputs
    block, last = blocks * thread // threads, blocks * (thread + 1) // threads
    while block < last:
        width = WIDE_BLOCKS if last - block >= WIDE_BLOCKS else 1
        row = 0
        while row < rows:
            tall = rows - row >= TALL and width >= TALL_BLOCKS
            step = TALL_BLOCKS if tall else width
            x, scale, sum_ = short + row * stride, scales + row * each, sums + row * each
            for first in range(block, block + width, step):
                w, factor, shift = weight + first * apart, factors + first * 64, first * 64
                before, after = prior + row * prior_stride + shift, out + row * out_stride + shift
                if eight:
                    if tall:
                        tiles.tall8(
                            x, stride, w, inputs, scale, sum_, factor, before, prior_stride, after, out_stride
                        )
                    elif width > 1:
                        tiles.wide8(
                            x, stride, w, inputs, scale, sum_, factor, before, prior_stride, after, out_stride
                        )
                    else:
                        tiles.one8(
                            x, stride, w, inputs, scale, sum_, factor, before, prior_stride, after, out_stride
                        )
                elif tall:
                    tiles.tall4(
                        x, stride, w, inputs, scale, sum_, factor, before, prior_stride, after, out_stride
                    )
                elif width > 1:
                    tiles.wide4(
                        x, stride, w, inputs, scale, sum_, factor, before, prior_stride, after, out_stride
                    )
                else:
                    tiles.one4(
                        x, stride, w, inputs, scale, sum_, factor, before, prior_stride, after, out_stride
                    )
            row += TALL if tall else 1
        block += width


@numba.njit
def project(thread, threads, frame, product, x, stride, norm, out):
    """Rows at x, normalised where there is a norm, times a weight, plus its bias."""
    inputs = v.get_long(product + INPUTS)
    wide = v.get_long(frame + WIDE) + thread * 4 * inputs
    for row in range(thread, v.get_long(frame + ROWS), threads):
        source = x + row * stride
        if norm:
            normalise(source, norm, inputs, v.get(frame + EPS), wide)
            source = wide
        shorten_row(frame, product, source, row)
    wait(frame, threads)
    multiply(thread, threads, frame, product, v.get_long(product + BIAS), 0, out)


@numba.njit
def turn(frame, head, norm, position, scale):
    """Normalise and rotate a head in place; interleaved pairs."""
    dim = v.get_long(frame + HEAD_DIM)
    if norm:
        normalise(head, norm, dim, v.get(frame + EPS), head)
    table = v.get_long(frame + TURNS) + position * 8 * dim
    for at in range(0, 4 * dim, 64):
        x = v.load(head + at)
        turned = v.fma(v.swap(x), v.load(table + 4 * dim + at), v.mul(x, v.load(table + at)))
        v.store(head + at, v.mul(turned, v.splat(scale)))


@numba.njit
def keep(frame, layer, row):
    """Turn a row's queries and keys; its keys and values go to their page."""
    heads, kv_heads, dim = (
        v.get_long(frame + HEADS), v.get_long(frame + KV_HEADS), v.get_long(frame + HEAD_DIM),
    )  # fmt: skip
    at = v.get_long(frame + PROJECTED) + row * (heads + 2 * kv_heads) * dim * 4
    position = v.get_long(v.get_long(frame + POSITIONS) + 8 * row)
    scale = numba.float32(1.0) / numba.float32(numba.float32(dim) ** numba.float32(0.5))
    for head in range(heads):
        turn(frame, at + head * dim * 4, v.get_long(layer + Q_NORM), position, scale)
    slot, page_rows = v.get_long(v.get_long(frame + SLOTS) + 8 * row), v.get_long(frame + PAGE_ROWS)
    for head in range(kv_heads):
        key = at + (heads + head) * dim * 4
        turn(frame, key, v.get_long(layer + K_NORM), position, numba.float32(1.0))
        if slot >= 0:
            place = ((slot // page_rows * kv_heads + head) * page_rows + slot % page_rows) * dim * 4
            for part in range(0, 4 * dim, 64):
                v.store(v.get_long(frame + KEYS) + place + part, v.load(key + part))
                v.store(v.get_long(frame + VALUES) + place + part, v.load(key + kv_heads * dim * 4 + part))


@numba.njit
def turn_back(frame, thread, query, steps):
    """A query as so many positions nearer to the first columns."""
    if steps == 0:
        return query
    dim = v.get_long(frame + HEAD_DIM)
    table, out = v.get_long(frame + TURNS) + steps * 8 * dim, v.get_long(frame + TURNED) + thread * 4 * dim
    for at in range(0, 4 * dim, 64):
        x, sine = v.load(query + at), v.sub(v.splat(0.0), v.load(table + 4 * dim + at))
        v.store(out + at, v.fma(v.swap(x), sine, v.mul(x, v.load(table + at))))
    return out


@numba.njit
def score(query, keys, offsets, count, dim, out):
    further = 0
    for part in range(0, dim // 64):
        tiles.score4(query + 256 * part, keys + 256 * part, offsets, count, out, further)
        further = 1
    for part in range(dim // 64 * 4, dim // 16):
        tiles.score1(query + 64 * part, keys + 64 * part, offsets, count, out, further)
        further = 1


@numba.njit
def gather(weights, values, offsets, count, dim, out):
    for part in range(0, dim // 64):
        tiles.value4(weights, values + 256 * part, offsets, count, out + 256 * part)
    for part in range(dim // 64 * 4, dim // 16):
        tiles.value1(weights, values + 64 * part, offsets, count, out + 64 * part)


@numba.njit
def attend(thread, frame, row, head):
    """Softmax attention of one query head over the columns that its row sees, in their order."""
    heads, kv_heads, dim = (
        v.get_long(frame + HEADS), v.get_long(frame + KV_HEADS), v.get_long(frame + HEAD_DIM),
    )  # fmt: skip
    query = v.get_long(frame + PROJECTED) + (row * (heads + 2 * kv_heads) + head) * dim * 4
    out = v.get_long(frame + ATTENDED) + (row * heads + head) * dim * 4
    shift = head // (heads // kv_heads) * v.get_long(frame + PAGE_ROWS) * dim * 4
    keys, values = v.get_long(frame + KEYS) + shift, v.get_long(frame + VALUES) + shift
    scores = v.get_long(frame + SCORES) + thread * v.get_long(frame + SCORES_APART)
    seen_by = v.get_long(frame + SEEN_BY)
    sight = v.get_long(frame + SIGHT) + (row * seen_by + head // (heads // kv_heads) % seen_by) * 40
    lead, before = v.get_long(sight), v.get_long(sight + 8)
    tail, behind = v.get_long(sight + 16), v.get_long(sight + 24)
    count = before + behind
    near = turn_back(frame, thread, query, v.get_long(sight + 32))
    score(near, keys, lead, before, dim, scores)
    score(query, keys, tail, behind, dim, scores + 4 * before)
    end = (count + LANES - 1) // LANES * 64
    for at in range(4 * count, end, 4):
        v.put(scores + at, numba.float32(-1e30))
    most = v.splat(-1e30)
    for at in range(0, end, 64):
        most = v.most(most, v.load(scores + at))
    peak, sum_ = v.splat(v.largest(most)), v.splat(0.0)
    for at in range(0, end, 64):
        weight = v.exp(v.sub(v.load(scores + at), peak))
        sum_ = v.add(sum_, weight)
        v.store(scores + at, weight)
    for at in range(0, 4 * dim, 64):
        v.store(out + at, v.splat(0.0))
    gather(scores, values, lead, before, dim, out)
    gather(scores + 4 * before, values, tail, behind, dim, out)
    scale = v.splat(numba.float32(1.0) / v.total(sum_))
    for at in range(0, 4 * dim, 64):
        v.store(out + at, v.mul(v.load(out + at), scale))


@numba.njit
def gate(inner, size):
    """silu(first half) * second half, into the first half."""
    for at in range(0, 4 * size, 64):
        x = v.load(inner + at)
        sigmoid = v.div(v.splat(1.0), v.add(v.splat(1.0), v.exp(v.sub(v.splat(0.0), x))))
        v.store(inner + at, v.mul(v.mul(x, sigmoid), v.load(inner + 4 * size + at)))


@numba.njit
def before_attention(thread, threads, frame, layer):
    rows, hidden = v.get_long(frame + ROWS), v.get_long(frame + HIDDEN)
    stride = v.get_long(layer + QKV + INPUTS) * 4
    out = v.get_long(frame + PROJECTED)
    project(thread, threads, frame, layer + QKV, hidden, stride, v.get_long(layer + INPUT_NORM), out)
    wait(frame, threads)
    for row in range(thread, rows, threads):
        keep(frame, layer, row)


@numba.njit
def after_attention(thread, threads, frame, layer):
    rows, hidden = v.get_long(frame + ROWS), v.get_long(frame + HIDDEN)
    width, size = v.get_long(layer + OUT + INPUTS), v.get_long(layer + DOWN + INPUTS)
    stride = v.get_long(layer + OUT + OUTPUTS) * 4
    for row in range(thread, rows, threads):
        shorten_row(frame, layer + OUT, v.get_long(frame + ATTENDED) + row * width * 4, row)
    wait(frame, threads)
    multiply(thread, threads, frame, layer + OUT, hidden, stride, hidden)
    wait(frame, threads)
    inner = v.get_long(frame + INNER)
    project(thread, threads, frame, layer + GATE_UP, hidden, stride, v.get_long(layer + MLP_NORM), inner)
    wait(frame, threads)
    for row in range(thread, rows, threads):
        gate(inner + row * size * 8, size)
        shorten_row(frame, layer + DOWN, inner + row * size * 8, row)
    wait(frame, threads)
    multiply(thread, threads, frame, layer + DOWN, hidden, stride, hidden)


@numba.njit
def team(frame):
    if v.get_long(frame + BARRIER):
        thread, threads = v.call_int(v.get_long(frame + THREAD)), v.call_int(v.get_long(frame + THREADS))
        return numba.int64(thread), numba.int64(threads)
    return numba.int64(0), numba.int64(1)


def _run(tables):
    """tables: addresses of a frame's table and of a layer's, and whether it is that or a product's."""
    frame, layer, whole = v.get_long(tables), v.get_long(tables + 8), v.get_long(tables + 16)
    thread, threads = team(frame)
    if not whole:
        x, stride = v.get_long(frame + X), v.get_long(layer + INPUTS) * 4
        project(
            thread, threads, frame, layer, x, stride, v.get_long(frame + NORM), v.get_long(frame + OUTPUT)
        )
        return
    before_attention(thread, threads, frame, layer)
    wait(frame, threads)
    heads = v.get_long(frame + HEADS)
    tasks = v.get_long(frame + ROWS) * heads
    for task in range(tasks * thread // threads, tasks * (thread + 1) // threads):
        attend(thread, frame, task // heads, task % heads)
    wait(frame, threads)
    after_attention(thread, threads, frame, layer)


def _compile():
    """Kept between runs where that can be, as long as the files of this folder are the same."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    _run.__qualname__ = f"run_{digest[:16]}"
    kind = types.void(types.int64)
    try:
        return numba.cfunc(kind, cache=True)(_run)
    except RuntimeError:  # no folder can be written to
        return numba.cfunc(kind)(_run)


run = _compile()
