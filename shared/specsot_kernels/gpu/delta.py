"""Runs the gated delta rule over a frame's rows: inputs of each row, the walk through states, the gated norm.

Each program walks a few columns of one head's state. It goes row by row, or chunk by chunk for the rows of a
long prompt, so a row's output is the same bits, whichever kept state a walk began with and whatever else is
in the batch. Chunks are solved in the WY form of arXiv 2412.06464, as in `specsot_model.delta`.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.gpu.launching import (
    await_preceding_kernel,
    kernel,
    kernel_for_any,
    let_next_begin,
    on_device_of,
    pdl_options,
    power_of_two,
)

# Epsilon of the L2 norms of queries and keys.
EPS = tl.constexpr(1e-6)
# Columns of a state that one program walks row by row. Chosen on an H100: 8 and 32 were no faster for one
# row, trees and prompts.
COLUMNS = 16
# Warps of such a program. Chosen on an H100: more were slower.
WARPS = 1
# Sequences. Maximum number that are walked concurrently; equals `specsot_model.core.walks.LANES`. Untuned.
LANES = 16
# Rows. Maximum number that are prepared concurrently. Untuned.
ROWS = 1024
# Rows of a chunk; equals `specsot_model.core.replays.CHUNK`.
CHUNK = 64
# Columns of a state that one program walks by chunks. Chosen on an H100: 32 took a fifth longer.
WIDE = 16
# Warps of the programs that solve chunks and that walk them. Chosen on an H100: 2 and 8 were slower.
SOLVING_WARPS = 4
CHUNK_WARPS = 4
# Rows of a block. A block is solved row by row; the blocks of a chunk are solved concurrently.
BLOCK = tl.constexpr(16)
# Precision of products: EXACT has the errors of fp32 (three tensor-core products), SHORT is one product and
# is used where pages hold 16-bit numbers.
EXACT, SHORT = tl.constexpr("tf32x3"), tl.constexpr("tf32")
# Heads of one program of the gated norm. Untuned.
TOGETHER = 8
# Places of the fields that follow a row's sources; see `specsot_model.core.walks.Walk`.
TAKEN, ASIDE, KEPT, OUTPUT = map(tl.constexpr, range(4))
FIELDS = 4
# Numbers of each row and head: the factor by which the state decays, the rate at which it takes up the row,
# and the logarithm of the factor.
GATES = tl.constexpr(3)


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Sizes and weights of one layer.

    key_heads: heads of queries and keys.
    value_heads: heads of values, each with a state of its own.
    key_dim: numbers of a query or key head.
    value_dim: numbers of a value head.
    half: numbers of one of the two page rows that store a row's inputs.
    taps: fp32 [kernel, 2 * keys + values], weights of the causal convolution.
    decay: fp32 [value_heads], factors of the decay's logarithm.
    bias: fp32 [value_heads], added to the decay's input.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    half: int
    taps: Tensor
    decay: Tensor
    bias: Tensor

    @property
    def mixed(self) -> int:
        """Return how many numbers the queries, keys and values of a row have together."""
        return self.taps.shape[1]


@dataclass(frozen=True, slots=True)
class WalkTables:
    """A `specsot_model.core.walks.Walk` on the device; `counts` says how much of the tables is in use.

    counts: int32 [4]: sequences, rows, sequences with chunks, chunks.
    aside: for how many states that are set aside there is room.
    many_chunks: for how many chunks there is room.
    starts: int32 [sequences + 1], the rows of each sequence that runs row by row; see `Walk.starts`.
    chunks: int32 [chunked + 1], the chunks of each sequence with chunks; see `Walk.chunks`.
    rows: int32 [lines, sources and fields], one table row per token; see `Walk.rows`.
    """

    counts: Tensor
    starts: Tensor
    chunks: Tensor
    rows: Tensor
    aside: int
    many_chunks: int

    @property
    def sequences(self) -> int:
        """Return for how many sequences there is room."""
        return len(self.starts) - 1

    @property
    def lines(self) -> int:
        """Return for how many rows there is room."""
        return len(self.rows)

    @property
    def chunked(self) -> int:
        """Return for how many sequences with chunks there is room."""
        return len(self.chunks) - 1


def run_delta(
    inputs: Tensor, slots: Tensor, pages: Tensor, states: Tensor, walks: Sequence[WalkTables], rule: DeltaRule
) -> Tensor:
    """Store a frame's inputs in pages, walk, and return the outputs, fp32 [rows, value_heads, value_dim].

    Rows that are in no walk get undefined outputs. AssertionError is raised if the walks have room for so
    many rows that their numbers exceed 32 bits.

    inputs: [rows, ...]: queries, keys and values, then b and a of all heads.
    slots: [rows], the slot of each row; a row with a negative slot is not stored.
    pages: [2, pages, 1, page_rows, half], contiguous, the stored inputs of the layer.
    states: fp32 [states, value_heads, key_dim, value_dim], contiguous; states that the walks keep are written
        there.
    walks: the walks of the frame, at least one, run one after another; a state carried from one to the next
        is in memory that all share.
    rule: sizes and weights of the layer.
    """
    lines = max(walk.lines for walk in walks)
    assert lines * rule.mixed < 1 << 31, "kernels count numbers of rows that are read in 32 bits"
    mixed = inputs.new_empty((lines, rule.mixed), dtype=torch.float32)
    gates = inputs.new_empty((lines, GATES.value * rule.value_heads), dtype=torch.float32)
    out = inputs.new_empty((len(inputs), rule.value_heads, rule.value_dim), dtype=torch.float32)
    aside = states.new_empty((max(walk.aside for walk in walks), *states.shape[1:]))
    sizes = rule.key_heads, rule.value_heads, rule.key_dim, rule.value_dim
    kernel_rows = len(rule.taps)
    chunks = max(walk.many_chunks for walk in walks)
    precision = EXACT if pages.dtype == torch.float32 else SHORT
    known = states.new_empty((chunks * CHUNK, rule.value_heads, rule.key_dim))
    pairs = states.new_empty((chunks, rule.value_heads, CHUNK, CHUNK))
    with on_device_of(inputs):
        for walk in walks:
            _prepare[(min(len(inputs) + 8, walk.lines, ROWS), 2 * rule.key_heads + rule.value_heads)](
                inputs, pages, slots, rule.taps, rule.decay, rule.bias, walk.counts, walk.rows, mixed, gates,
                inputs.stride(0), pages.stride(0), rule.half, rule.key_dim**-0.5, *sizes, kernel_rows,
                kernel_rows + FIELDS, power_of_two(max(rule.key_dim, rule.value_dim)), num_warps=1,
                **pdl_options(inputs),
            )  # fmt: skip
            if walk.many_chunks:
                room, wide = (max(power_of_two(size), 16) for size in (rule.key_dim, rule.value_dim))
                _solve[(walk.many_chunks, rule.value_heads)](
                    mixed, gates, walk.counts, known, pairs, *sizes, room, wide, CHUNK,
                    precision.value, num_warps=SOLVING_WARPS, num_stages=1, **pdl_options(inputs),
                )  # fmt: skip
                _walk_chunks[(min(walk.chunked, LANES), rule.value_heads, -(-rule.value_dim // WIDE))](
                    mixed, gates, walk.counts, walk.chunks, walk.rows, known, pairs, states, aside, out,
                    *sizes, kernel_rows, kernel_rows + FIELDS, room, WIDE, CHUNK, precision.value,
                    num_warps=CHUNK_WARPS, num_stages=1, **pdl_options(inputs),
                )  # fmt: skip
            _walk[(min(walk.sequences, LANES), rule.value_heads, -(-rule.value_dim // COLUMNS))](
                mixed, gates, walk.counts, walk.starts, walk.rows, states, aside, out, *sizes, kernel_rows,
                kernel_rows + FIELDS, power_of_two(rule.key_dim), COLUMNS, num_warps=WARPS,
                **pdl_options(inputs),
            )  # fmt: skip
    return out


def norm_gated(mixed: Tensor, gates: Tensor, slots: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each head times silu of its gate, [rows, heads * size]; zeros for negative slots.

    mixed: fp32 [rows, heads, size], the outputs of the delta rule.
    gates: [rows, heads * size], the numbers of a row are adjacent; the result has its type.
    slots: [rows]; rows with a negative slot are surplus rows of a captured graph.
    weight: [size], weight of the norm.
    eps: epsilon of the norm.
    """
    rows, heads, size = mixed.shape
    out = gates.new_empty((rows, heads * size))
    with on_device_of(mixed):
        _norm_gated[(rows, -(-heads // TOGETHER))](
            mixed, gates, slots, weight, out, gates.stride(0), eps, heads, size, power_of_two(size), TOGETHER,
            **pdl_options(mixed),
        )  # fmt: skip
    return out


@kernel_for_any("from_input", "other_half")
def _prepare(
    inputs, pages, slots, taps, decay, bias, counts, rows, mixed, gates, from_input, other_half, half, scale,
    key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    taps_of: tl.constexpr, columns: tl.constexpr, room: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Compute one head of queries, keys or values of every n-th row: convolution, silu, L2 norm of queries
    and keys.

    For a value head, compute its decay and rate, too. A source s >= 0 is a slot, and -2 - i is row i of the
    frame: source -5 is row 3. The inputs of the frame's own rows are stored in the pages, unless a row's slot
    is negative.

    inputs: [rows, ...], queries, keys and values, then b and a of all heads.
    pages: [2, pages, 1, page_rows, half], the stored inputs.
    slots: [rows], the slot of each row of the frame.
    taps: fp32 [kernel, mixed], weights of the convolution.
    decay: fp32 [value_heads], factors of the decay's logarithm.
    bias: fp32 [value_heads], added to the decay's input.
    counts: int32 [4], of which [1] is the number of table rows.
    rows: the table; see `Walk.rows`.
    mixed: fp32 [lines, mixed], receives queries, keys and values of each table row.
    gates: fp32 [lines, GATES * value_heads], receives decay, rate and the decay's logarithm.
    from_input: numbers from one row of inputs to the next.
    other_half: numbers from the first half of a row's inputs to the second half in the pages.
    half: numbers of one half.
    scale: factor of the queries.
    key_heads: number of heads of queries and keys.
    value_heads: number of heads of values.
    key_dim: numbers of a query or key head.
    value_dim: numbers of a value head.
    taps_of: rows that the convolution reads, the row itself included.
    columns: numbers of a table row: `taps_of` sources, then FIELDS fields.
    room: numbers of a head, rounded up to a power of two.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    head = tl.program_id(1)
    column = tl.arange(0, room)
    width: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    of_values = head >= 2 * key_heads
    own = head - 2 * key_heads
    number = tl.where(of_values, 2 * key_heads * key_dim + own * value_dim, head * key_dim) + column
    inside = column < tl.where(of_values, value_dim, key_dim)
    place = _place(number, half, other_half)
    many = tl.load(counts + 1)
    await_preceding_kernel(early)
    for line in range(tl.program_id(0), many, tl.num_programs(0)):
        total = tl.zeros((room,), tl.float32)
        for back in tl.static_range(taps_of):
            source = tl.load(rows + line * columns + back).to(tl.int64)
            stored = pages + tl.maximum(source, 0) * half + place
            given = inputs + tl.maximum(-2 - source, 0) * from_input + number
            old = tl.load(stored, mask=inside & (source >= 0), other=0.0)
            new = tl.load(given, mask=inside & (source <= -2), other=0.0)
            tap = tl.load(taps + back * width + number, mask=inside, other=0.0)
            total += tl.where(source >= 0, old, new).to(tl.float32) * tap
        # A row's last source is the row itself, so `source` and `new` are its own here.
        slot = tl.load(slots + tl.maximum(-2 - source, 0), mask=source <= -2, other=-1).to(tl.int64)
        tl.store(pages + slot * half + place, new, mask=inside & (slot >= 0))
        total = total / (1 + tl.exp(-total))
        if of_values:
            _gate_row(
                inputs + tl.maximum(-2 - source, 0) * from_input, pages, source, slot, half, other_half,
                decay, bias, gates + line * GATES * value_heads, own, width, value_heads,
            )  # fmt: skip
        else:
            total *= tl.rsqrt(tl.sum(tl.where(inside, total * total, 0.0), 0) + EPS)
            total *= tl.where(head < key_heads, scale, 1.0)
        tl.store(mixed + line * width + number, total, mask=inside)


@kernel
def _place(number, half, other_half):
    """Return where a number of a row lies in the pages, relative to the row's slot: the second half has its
    own page row.

    number: number within the row's inputs.
    half: numbers of one half.
    other_half: numbers from the first to the second half of a row in the pages.
    """
    return tl.where(number < half, number, number - half + other_half)


@kernel
def _gate_row(
    row_inputs, pages, source, slot, half, other_half, decay, bias, gates, head, width: tl.constexpr,
    value_heads: tl.constexpr,
):  # fmt: skip
    """Compute one head's gates of a row: the state's decay, the rate at which it takes up the row, the
    decay's logarithm.

    row_inputs: address of the row in the frame's inputs.
    pages: address of the stored inputs.
    source: where the row's inputs come from: a slot, or -2 - row of the frame.
    slot: the row's slot, at which b and a are stored; negative: they are not.
    half: numbers of one half of a row's inputs.
    other_half: numbers from the first half to the second half in the pages.
    decay: fp32 [value_heads], factors of the decay's logarithm.
    bias: fp32 [value_heads], added to the decay's input.
    gates: address of the row's gates, which are written.
    head: number of the value head.
    width: numbers of queries, keys and values.
    value_heads: number of value heads.
    """
    rate_at = width + head
    step_at = width + value_heads + head
    stored = pages + tl.maximum(source, 0) * half
    old_rate = tl.load(stored + _place(rate_at, half, other_half), mask=source >= 0, other=0.0)
    old_step = tl.load(stored + _place(step_at, half, other_half), mask=source >= 0, other=0.0)
    new_rate = tl.load(row_inputs + rate_at, mask=source <= -2, other=0.0)
    new_step = tl.load(row_inputs + step_at, mask=source <= -2, other=0.0)
    tl.store(pages + slot * half + _place(rate_at, half, other_half), new_rate, mask=slot >= 0)
    tl.store(pages + slot * half + _place(step_at, half, other_half), new_step, mask=slot >= 0)
    rate = tl.where(source >= 0, old_rate, new_rate).to(tl.float32)
    step = tl.where(source >= 0, old_step, new_step).to(tl.float32) + tl.load(bias + head)
    step = tl.maximum(step, 0.0) + tl.log(1 + tl.exp(-tl.abs(step)))
    shrinking = tl.load(decay + head) * step
    tl.store(gates + head, tl.exp(shrinking))
    tl.store(gates + 2 * value_heads + head, shrinking)
    tl.store(gates + value_heads + head, 1 / (1 + tl.exp(-rate)))


@kernel
def _walk(
    mixed, gates, counts, starts, rows, states, aside, out, key_heads: tl.constexpr,
    value_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, taps_of: tl.constexpr,
    columns: tl.constexpr, room: tl.constexpr, wide: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Walk a few columns of one head's state row by row. The next row's inputs are loaded while one row is
    computed.

    Each program walks every n-th sequence. A row's TAKEN says whether the state continues from the row before
    (-1), or is loaded; its output is written, and the state after it set aside or kept, only where OUTPUT,
    ASIDE and KEPT are not negative.

    mixed: fp32 [lines, queries, keys and values], what `_prepare` computed of each table row.
    gates: fp32 [lines, GATES * value_heads], its decays, rates and logarithms of decays.
    counts: int32 [4], how much of the tables is in use; see `WalkTables`.
    starts: int32 [sequences + 1], the table rows of each sequence.
    rows: int32 [lines, columns], the table rows; see `Walk.rows`.
    states: fp32 [states, value_heads, key_dim, value_dim], the stored states.
    aside: fp32 [places, value_heads, key_dim, value_dim], states that are set aside.
    out: fp32 [rows, value_heads, value_dim], receives the outputs.
    key_heads: number of heads of queries and keys.
    value_heads: number of heads of values.
    key_dim: numbers of a query or key head.
    value_dim: numbers of a value head.
    taps_of: rows that the convolution reads, the row itself included.
    columns: numbers of a table row: `taps_of` sources, then FIELDS fields.
    room: key_dim, rounded up to a power of two.
    wide: columns of the state that one program walks.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    head = tl.program_id(1)
    key = tl.arange(0, room)
    column = tl.program_id(2) * wide + tl.arange(0, wide)
    size: tl.constexpr = value_heads * key_dim * value_dim
    width: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    known_key = key < key_dim
    known = column < value_dim
    cell = (head * key_dim + key)[:, None] * value_dim + column[None, :]
    there = known_key[:, None] & known[None, :]
    asks = mixed + (head // (value_heads // key_heads)) * key_dim + key
    values = mixed + 2 * key_heads * key_dim + head * value_dim + column
    fields = rows + taps_of
    sequences = tl.load(counts)
    await_preceding_kernel(early)
    state = tl.zeros((room, wide), tl.float32)
    for sequence in range(tl.program_id(0), sequences, tl.num_programs(0)):
        line = tl.load(starts + sequence)
        stop = tl.load(starts + sequence + 1)
        q = tl.load(asks + line * width, mask=known_key, other=0.0)
        k = tl.load(asks + line * width + key_heads * key_dim, mask=known_key, other=0.0)
        v = tl.load(values + line * width, mask=known, other=0.0)
        decay = tl.load(gates + line * GATES * value_heads + head)
        rate = tl.load(gates + line * GATES * value_heads + value_heads + head)
        taken = tl.load(fields + line * columns + TAKEN)
        for row in range(line, stop):
            ahead = tl.minimum(row + 1, stop - 1)
            next_q = tl.load(asks + ahead * width, mask=known_key, other=0.0)
            next_k = tl.load(asks + ahead * width + key_heads * key_dim, mask=known_key, other=0.0)
            next_v = tl.load(values + ahead * width, mask=known, other=0.0)
            next_decay = tl.load(gates + ahead * GATES * value_heads + head)
            next_rate = tl.load(gates + ahead * GATES * value_heads + value_heads + head)
            next_taken = tl.load(fields + ahead * columns + TAKEN)
            put = tl.load(fields + row * columns + ASIDE)
            kept = tl.load(fields + row * columns + KEPT)
            wanted = tl.load(fields + row * columns + OUTPUT)
            if taken != -1:
                # Another thread of this program may have set the state aside.
                tl.debug_barrier()
                if taken < 0:
                    state = tl.load(states + (-2 - taken).to(tl.int64) * size + cell, mask=there, other=0.0)
                else:
                    state = tl.load(aside + taken.to(tl.int64) * size + cell, mask=there, other=0.0)
            state *= decay
            # The output is that of the state as it was, and what the row adds: both sums at once.
            seen = tl.sum(state * k[:, None], 0)
            found = tl.sum(state * q[:, None], 0)
            new = (v - seen) * rate
            state += k[:, None] * new[None, :]
            if wanted >= 0:
                found += tl.sum(q * k, 0) * new
                place = (wanted.to(tl.int64) * value_heads + head) * value_dim + column
                tl.store(out + place, found, mask=known)
            if put >= 0:
                tl.store(aside + put.to(tl.int64) * size + cell, state, mask=there)
            if kept >= 0:
                tl.store(states + kept.to(tl.int64) * size + cell, state, mask=there)
            q = next_q
            k = next_k
            v = next_v
            decay = next_decay
            rate = next_rate
            taken = next_taken


@kernel
def _solve(
    mixed, gates, counts, known, pairs, key_heads: tl.constexpr, value_heads: tl.constexpr,
    key_dim: tl.constexpr, value_dim: tl.constexpr, room: tl.constexpr, wide: tl.constexpr,
    size: tl.constexpr, precision: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Solve a chunk of one head: what the chunk adds to its state is values - known S, where S is the state
    before it.

    Both `values` and `known` are computed here, and `values` overwrite those of the rows. Nothing is done for
    chunks beyond the number in `counts`.

    mixed: fp32 [lines, queries, keys and values], what `_prepare` computed of each table row; the values are
        overwritten.
    gates: fp32 [lines, GATES * value_heads], its decays, rates and logarithms of decays.
    counts: int32 [4], of which [3] is the number of chunks.
    known: fp32 [chunks * size, value_heads, key_dim], receives what each row takes from the state before the
        chunk.
    pairs: fp32 [chunks, value_heads, size, size], receives how much each row's query takes from each row's
        value.
    key_heads: number of heads of queries and keys.
    value_heads: number of heads of values.
    key_dim: numbers of a query or key head.
    value_dim: numbers of a value head.
    room: `key_dim`, rounded up to a power of two.
    wide: `value_dim`, rounded up to a power of two.
    size: rows of a chunk.
    precision: of products; EXACT or SHORT.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    head = tl.program_id(1)
    line = tl.arange(0, size)
    key = tl.arange(0, room)
    column = tl.arange(0, wide)
    width: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    in_key = (key < key_dim)[None, :]
    in_column = (column < value_dim)[None, :]
    same = line[:, None] == line[None, :]
    below_diagonal = line[:, None] > line[None, :]
    near = line[:, None] // BLOCK == line[None, :] // BLOCK
    await_preceding_kernel(early)
    many = tl.load(counts + 3)
    for one in range(tl.program_id(0), many, tl.num_programs(0)):
        at = one * size + line
        asks = mixed + at[:, None] * width + (head // (value_heads // key_heads)) * key_dim + key[None, :]
        values = mixed + at[:, None] * width + 2 * key_heads * key_dim + head * value_dim + column[None, :]
        gate = gates + at * GATES * value_heads + head
        rate = tl.load(gate + value_heads)
        step = tl.load(gate + 2 * value_heads)
        total = tl.sum(tl.where(same | below_diagonal, step[None, :], 0.0), 1)
        shrunk = tl.exp(tl.where(same | below_diagonal, total[:, None] - total[None, :], 0.0))
        k = tl.load(asks + key_heads * key_dim, mask=in_key, other=0.0)
        system = tl.dot(k, tl.trans(k), input_precision=precision) * shrunk * rate[:, None]
        system = tl.where(below_diagonal, system, 0.0)
        # First invert 1 + system within blocks, row by row. Then iterate across blocks: each iteration makes
        # one more block exact, since a block depends only on the blocks before it.
        inverse = tl.where(same, 1.0, 0.0)
        for row in range(1, BLOCK):
            own = tl.sum(tl.where(near & (line % BLOCK == row)[:, None], system, 0.0), 0)
            less = tl.sum(own[:, None] * inverse, 0)
            inverse -= tl.where(near & (line % BLOCK == row)[:, None], less[None, :], 0.0)
        across = tl.dot(inverse, tl.where(near, 0.0, system), input_precision=EXACT)
        whole = inverse
        for _ in range(1, size // BLOCK):
            whole = inverse - tl.dot(across, whole, input_precision=EXACT)
        v = tl.load(values, mask=in_column, other=0.0)
        tl.store(values, tl.dot(whole, v * rate[:, None], input_precision=precision), mask=in_column)
        taken = tl.dot(whole, k * (rate * tl.exp(total))[:, None], input_precision=precision)
        tl.store(known + (at[:, None] * value_heads + head) * key_dim + key[None, :], taken, mask=in_key)
        q = tl.load(asks, mask=in_key, other=0.0)
        asked = tl.dot(q, tl.trans(k), input_precision=precision) * shrunk
        cell = ((one * value_heads + head) * size + line)[:, None] * size + line[None, :]
        tl.store(pairs + cell, tl.where(same | below_diagonal, asked, 0.0))


@kernel
def _walk_chunks(
    mixed, gates, counts, chunks, rows, known, pairs, states, aside, out, key_heads: tl.constexpr,
    value_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, taps_of: tl.constexpr,
    columns: tl.constexpr, room: tl.constexpr, wide: tl.constexpr, size: tl.constexpr,
    precision: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Walk a few columns of one head's state from chunk to chunk.

    Each program walks every n-th sequence. TAKEN of a chunk's first row says whether the state continues from
    the chunk before (-1), or is loaded; ASIDE and KEPT of its last row say where the state after it is
    written, if they are not negative. Rows with a negative OUTPUT write no output.

    mixed: fp32 [lines, queries, keys and values], what `_prepare` and `_solve` computed of each table row.
    gates: fp32 [lines, GATES * value_heads], its decays, rates and logarithms of decays.
    counts: int32 [4], how much of the tables is in use; see `WalkTables`.
    chunks: int32 [chunked + 1], the chunks of each sequence with chunks.
    rows: int32 [lines, columns], the table rows; see `Walk.rows`.
    known: fp32 [chunks * size, value_heads, key_dim], what each row takes from the state before its chunk;
        `_solve` computed it.
    pairs: fp32 [chunks, value_heads, size, size], how much each row's query takes from each row's value;
        `_solve` computed it.
    states: fp32 [states, value_heads, key_dim, value_dim], the stored states.
    aside: fp32 [places, value_heads, key_dim, value_dim], states that are set aside.
    out: fp32 [rows, value_heads, value_dim], receives the outputs.
    key_heads: number of heads of queries and keys.
    value_heads: number of heads of values.
    key_dim: numbers of a query or key head.
    value_dim: numbers of a value head.
    taps_of: rows that the convolution reads, the row itself included.
    columns: numbers of a table row: `taps_of` sources, then FIELDS fields.
    room: key_dim, rounded up to a power of two.
    wide: columns of the state that one program walks.
    size: rows of a chunk.
    precision: of products; EXACT or SHORT.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    head = tl.program_id(1)
    line = tl.arange(0, size)
    key = tl.arange(0, room)
    column = tl.program_id(2) * wide + tl.arange(0, wide)
    whole: tl.constexpr = value_heads * key_dim * value_dim
    width: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    in_key = (key < key_dim)[None, :]
    in_column = (column < value_dim)[None, :]
    cell = (head * key_dim + key)[:, None] * value_dim + column[None, :]
    there = (key < key_dim)[:, None] & in_column
    before = line[:, None] >= line[None, :]
    fields = rows + taps_of
    await_preceding_kernel(early)
    sequences = tl.load(counts + 2)
    state = tl.zeros((room, wide), tl.float32)
    for sequence in range(tl.program_id(0), sequences, tl.num_programs(0)):
        for one in range(tl.load(chunks + sequence), tl.load(chunks + sequence + 1)):
            at = one * size + line
            taken = tl.load(fields + one * size * columns + TAKEN)
            if taken != -1:
                tl.debug_barrier()
                if taken < 0:
                    state = tl.load(states + (-2 - taken).to(tl.int64) * whole + cell, mask=there, other=0.0)
                else:
                    state = tl.load(aside + taken.to(tl.int64) * whole + cell, mask=there, other=0.0)
            asks = mixed + at[:, None] * width + (head // (value_heads // key_heads)) * key_dim + key[None, :]
            values = (
                mixed + at[:, None] * width + 2 * key_heads * key_dim + head * value_dim + column[None, :]
            )
            step = tl.load(gates + at * GATES * value_heads + 2 * value_heads + head)
            total = tl.sum(tl.where(before, step[None, :], 0.0), 1)
            last = tl.sum(step, 0)
            w = tl.load(
                known + (at[:, None] * value_heads + head) * key_dim + key[None, :], mask=in_key, other=0.0
            )
            new = tl.load(values, mask=in_column, other=0.0) - tl.dot(w, state, input_precision=precision)
            q = tl.load(asks, mask=in_key, other=0.0) * tl.exp(total)[:, None]
            found = tl.dot(q, state, input_precision=precision)
            asked = tl.load(
                pairs + ((one * value_heads + head) * size + line)[:, None] * size + line[None, :]
            )
            found += tl.dot(asked, new, input_precision=precision)
            wanted = tl.load(fields + at * columns + OUTPUT)
            goal = (wanted.to(tl.int64)[:, None] * value_heads + head) * value_dim + column[None, :]
            tl.store(out + goal, found, mask=in_column & (wanted >= 0)[:, None])
            k = tl.load(asks + key_heads * key_dim, mask=in_key, other=0.0) * tl.exp(last - total)[:, None]
            state = state * tl.exp(last) + tl.dot(tl.trans(k), new, input_precision=precision)
            put = tl.load(fields + (one * size + size - 1) * columns + ASIDE)
            kept = tl.load(fields + (one * size + size - 1) * columns + KEPT)
            if put >= 0:
                tl.store(aside + put.to(tl.int64) * whole + cell, state, mask=there)
            if kept >= 0:
                tl.store(states + kept.to(tl.int64) * whole + cell, state, mask=there)


@kernel
def _norm_gated(
    mixed, gates, slots, weight, out, from_gate, eps, heads, size, room: tl.constexpr,
    together: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Norm and gate a few heads of one row.

    The result is rounded to its type before it is multiplied with the norm's weight.

    mixed: fp32 [rows, heads, size], the outputs of the delta rule.
    gates: [rows, heads * size], `from_gate` numbers from one row to the next.
    slots: [rows]; rows with a negative slot become zeros.
    weight: [size], weight of the norm.
    out: [rows, heads * size], receives the result.
    from_gate: numbers from one row of gates to the next.
    eps: epsilon of the norm.
    heads: number of heads.
    size: numbers of a head.
    room: `size`, rounded up to a power of two.
    together: heads of one program.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, room)
    head = tl.program_id(1) * together + tl.arange(0, together)
    inside = column < size
    there = (head < heads)[:, None] & inside[None, :]
    number = head[:, None] * size + column[None, :]
    gain = tl.load(weight + column, mask=inside, other=0.0)[None, :].to(tl.float32)
    slot = tl.load(slots + row)
    await_preceding_kernel(early)
    values = tl.load(mixed + row * heads * size + number, mask=there & (slot >= 0), other=0.0)
    gate = tl.load(gates + row * from_gate + number, mask=there, other=0.0).to(tl.float32)
    short = values * tl.rsqrt(tl.sum(values * values, 1) / size + eps)[:, None]
    short = short.to(out.dtype.element_ty).to(tl.float32) * gain
    tl.store(
        out + row * heads * size + number,
        (short * (gate / (1 + tl.exp(-gate)))).to(out.dtype.element_ty),
        mask=there,
    )
