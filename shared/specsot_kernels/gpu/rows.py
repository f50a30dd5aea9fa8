"""Fused elementwise kernels between a layer's matrix products: norm, rotary with KV write, gate, KV row
moves.

The file also converts rows to 8-bit floats with one scale a row, and scales their products back.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.gpu.launching import (
    array_specialization,
    await_preceding_kernel,
    kernel,
    kernel_for_any,
    kernel_of_any,
    launch,
    let_next_begin,
    on_device_of,
    pdl_options,
    power_of_two,
)
from specsot_kernels.gpu.ordered import sum_of_parts
from specsot_kernels.gpu.products import LARGEST

# Columns. Tile of the gate. Untuned.
WIDE = 1024
# Smallest scale of an int8 row; equals `specsot_model.kv.MIN_SCALE`.
MIN_SCALE = tl.constexpr(2.0**-24)
# Adding and subtracting this number rounds an fp32 number to a whole one: a sum of this size has no fraction
# bits.
HALF_WAY = tl.constexpr(1.5 * 2.0**23)
# Heads. How many heads of a row one program of `_turn` rotates. Untuned.
TOGETHER = 8
# Heads. The same number if the program also adds up the parts of a product. It is lower, because each head
# then needs one load for every part, and more programs load more at a time. Untuned.
TOGETHER_IN_PARTS: Final = 2
# Warps. The number of warps of a program that norms a row. The order in which the squares of a row are added
# depends on it, so kernels whose bits must agree use the same number. Untuned.
NORM_WARPS: Final = 8
# Numbers of a KV row that one program moves. Untuned.
MOVED = 256


@dataclass(frozen=True, slots=True)
class Turning:
    """How queries and keys are normed, rotated (rotary embedding) and scaled.

    heads: number of query heads.
    kv_heads: number of KV heads.
    frequencies: fp32 [head_dim / 2], radians for each position.
    scale: factor of the queries.
    norms: weights [head_dim] of the norms over each query and each key head; None: heads are not normed.
    eps: epsilon of these norms.
    turned: number of pairs, from the first on, to which `scale` applies; the other pairs of a query are
        multiplied by `still`. None: `scale` applies to all pairs.
    still: factor of the pairs after the first `turned`.
    """

    heads: int
    kv_heads: int
    frequencies: Tensor
    scale: float
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0
    turned: int | None = None
    still: float = 1.0


def turn_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv_layer: Tensor,
    turning: Turning,
    scales: tuple[Tensor, Tensor] | None = None,
    sums: tuple[Tensor, Tensor | None] | None = None,
) -> None:
    """Norm and rotate query and key heads. Queries are written back to `qkv`, keys and values to their KV
    slots.

    Nothing is returned. Values are neither normed nor rotated. An int8 row with a number that is not finite
    gets the scale NaN.

    qkv: [rows, heads + 2 * kv_heads, head_dim]; the two numbers of a rotated pair are adjacent
        (`rotary.interleave`). [rows, heads + kv_heads, head_dim] if `kv_layer` has one tensor.
    kv_layer: [2, pages, kv_heads, page_rows, head_dim]; or int8 with each row's fp16 scale after its numbers.
        [1, ...] for rows that are keys and values at once.
    positions: [rows], the position of each row in its sequence.
    slots: [rows], the KV slot of each row; keys and values of a row with a negative slot are not stored.
    turning: how queries and keys are normed, rotated and scaled.
    scales: fp32 [rows] and [outputs]; rows and columns of `qkv` are multiplied by them first. None: `qkv` is
        scaled already.
    sums: the query, key and value product before its parts are added up (`small_products.sum_in_parts`), fp32
        [parts, rows, outputs], and its bias [outputs] or None. The heads are these sums, added from the first
        part to the last, plus the bias, rounded to the type of `qkv`. `qkv` is then not read; it only
        receives the queries, and may be [rows, heads, head_dim]. None: the heads are read from `qkv`. Raises
        AssertionError if `turning` has norms.

    Slot = page * page_rows + offset: with pages of 256 rows, slot 515 is row 3 of page 2.
    """
    rows, _, dim = qkv.shape
    norms = turning.norms or (turning.frequencies, turning.frequencies)
    num_scaled = dim // 2 if turning.turned is None else turning.turned
    two_factors = num_scaled < dim // 2 and turning.still != turning.scale
    int8_kv = kv_layer.dtype == torch.int8
    kv_scales = kv_layer[..., dim:].view(torch.float16) if int8_kv else kv_layer
    # Tensors that the kernel does not read without scales, parts or bias are replaced by other ones.
    row_scales, column_scales = scales or norms
    all_heads = turning.heads + len(kv_layer) * turning.kv_heads
    # A program that adds up parts has fewer heads, so that Triton divides a head among more threads. A norm
    # would then add the squares of a head in another order, and its bits would not be those of heads that are
    # read from `qkv`.
    assert not (sums and turning.norms), "heads with norms cannot be made from the sums of parts"
    part_sums, bias = sums or (None, None)
    together = TOGETHER if part_sums is None else TOGETHER_IN_PARTS
    with on_device_of(qkv):
        _turn[(rows, -(-all_heads // together))](
            qkv, positions, slots, kv_layer, kv_scales, turning.frequencies, *norms, row_scales,
            column_scales, row_scales if part_sums is None else part_sums,
            column_scales if bias is None else bias, *qkv.stride()[:2], *kv_layer.stride()[:4],
            turning.scale, turning.still, num_scaled, turning.eps, turning.heads, turning.kv_heads, all_heads,
            kv_layer.shape[3], dim // 2, power_of_two(dim // 2), together, turning.norms is not None,
            two_factors, int8_kv, scales is not None, 0 if part_sums is None else len(part_sums),
            bias is not None, num_warps=2, **pdl_options(qkv),
        )  # fmt: skip


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each row, [rows, size], contiguous, computed in fp32.

    No rows give an empty result. The result has the type of x.

    x: [rows, size], contiguous.
    weight: [size], weight of the norm.
    eps: added to the mean square.
    """
    out = x.new_empty(x.shape)
    rows, size = x.shape
    room = power_of_two(size)
    options = pdl_options(x)
    # `launch` takes the kernel's arguments by position, and `early` is the last of them.
    early = options.pop("early")
    with on_device_of(x):
        launch(
            _norm, (rows, 1, 1), (*array_specialization(x, weight, out), size),
            (x, weight, out, size, eps, room, early), num_warps=NORM_WARPS, **options,
        )  # fmt: skip
    return out


def gate(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [rows, width].

    gate_up: [rows, 2 * width], contiguous, gates followed by ups.
    """
    rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    with on_device_of(gate_up):
        _gate[(rows, -(-width // WIDE))](gate_up, out, width, WIDE, **pdl_options(gate_up))
    return out


def move_rows(kv: Tensor, moves: Tensor) -> None:
    """Copy KV rows of every layer from slots to slots; all are read before any is written. Nothing is done if
    there are no layers.

    kv: [layers, 2, pages, kv_heads, page_rows, head_dim], contiguous; [layers, 1, ...] for rows that are keys
        and values at once.
    moves: int32 [2, many], source and target slots; a negative pair moves nothing, and at least one entry is
        needed.

    moves [[5, 6], [4, 5]] keeps the rows of slots 5 and 6 in slots 4 and 5, though slot 5 is source and
    target.
    """
    layers, tensors, pages, kv_heads, page_rows, dim = kv.shape
    if not layers:
        return
    many = power_of_two(moves.shape[1])
    room = min(power_of_two(dim), MOVED)
    with on_device_of(kv):
        _move[(kv_heads, tensors * layers, -(-dim // room))](
            kv, moves, pages, kv_heads, page_rows, dim, moves.shape[1], many, room, **pdl_options(kv)
        )


def join_rows(
    tokens: Tensor,
    table: Tensor,
    features: Tensor,
    origins: Tensor,
    norms: tuple[Tensor, Tensor],
    eps: float,
    normed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the input of an EAGLE-3 head, [norm(embedding), norm(feature)] of every row, and the residual,
    which is the feature: [rows, 2 * size] and [rows, size].

    tokens: [rows], row numbers of `table` [V, size].
    origins: [rows], row numbers of `features` [n, size].
    norms: weights [size] of the norms of embedding and feature.
    normed: the residual is the normed feature instead of the feature.
    table: [V, size], the embedding.
    features: [n, size], the features.
    eps: epsilon of both norms.
    """
    rows = tokens.shape[0]
    size = table.shape[1]
    inputs = features.new_empty((rows, 2 * size))
    plain = features.new_empty((rows, size))
    with on_device_of(features):
        _join[(rows, 2)](
            tokens, table, features, origins, *norms, inputs, plain, size, eps, power_of_two(size),
            normed, num_warps=8, **pdl_options(features),
        )  # fmt: skip
    return inputs, plain


# Positions and slots are often rows of one array [n, num_rows], in which a row begins at a multiple of 16
# bytes or not, depending on `num_rows`. Their alignments are ignored, so that the kernel is compiled once.
@kernel_of_any("positions", "slots", numbers=())
def _turn(
    qkv, positions, slots, kv, kv_scales, frequencies, query_norm, key_norm, row_scales, column_scales, sums,
    bias, from_row, from_head, kv_half, kv_page, kv_head, kv_row, scale, still, num_scaled, eps, heads,
    kv_heads, all_heads, page_rows, pairs, room: tl.constexpr, together: tl.constexpr, normed: tl.constexpr,
    two_factors: tl.constexpr, int8_kv: tl.constexpr, scaled: tl.constexpr, parts: tl.constexpr,
    biased: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Rotate and store a few heads of one row; queries, keys and values may be among them.

    Nothing is stored for a row with a negative slot, but its queries are rotated. Programs beyond the last
    head write nothing.

    qkv: [rows, heads + 2 * kv_heads, 2 * pairs], queries, keys and values of each row; receives the queries.
        If `parts` is not 0, it is not read, and its heads may be the queries alone.
    positions: [rows], the position of each row in its sequence.
    slots: [rows], the KV slot of each row; negative: nothing is stored.
    kv: the KV of one layer.
    kv_scales: fp16, the scales of int8 KV rows, if `int8_kv`.
    frequencies: fp32 [pairs], radians for each position.
    query_norm: [2 * pairs], weights of the norm over each query head, if `normed`.
    key_norm: [2 * pairs], weights of the norm over each key head, if `normed`.
    row_scales: fp32 [rows], scale of each row of `qkv`, if `scaled`.
    column_scales: fp32 [outputs], scale of each column of `qkv`, if `scaled`.
    sums: fp32 [parts, rows, outputs], the sums of the query, key and value product over each part of its
        inputs; not read if `parts` is 0.
    bias: [outputs], added to the sum over all parts, if `biased`.
    from_row: numbers from one row of `qkv` to the next.
    from_head: numbers from one head of `qkv` to the next.
    kv_half: numbers from the keys to the values.
    kv_page: numbers from one page to the next.
    kv_head: numbers from one KV head to the next.
    kv_row: numbers from one row of a page to the next.
    scale: factor of the queries' first `num_scaled` pairs.
    still: factor of the queries' other pairs, if `two_factors`.
    num_scaled: number of pairs that `scale` applies to.
    eps: epsilon of the head norms.
    heads: number of query heads.
    kv_heads: number of KV heads.
    all_heads: number of query, key and value heads together.
    page_rows: rows of a page.
    pairs: pairs of a head.
    room: `pairs`, rounded up to a power of two.
    together: heads of one program.
    normed: whether there are head norms.
    two_factors: whether the queries' pairs have two factors, `scale` and `still`.
    int8_kv: whether KV rows are int8.
    scaled: whether `qkv` still has to be multiplied by `row_scales` and `column_scales`.
    parts: number of parts of `sums`, whose sum is read instead of `qkv`. 0: `qkv` is read. Always 0 if
        `normed`.
    biased: whether `bias` is added. Always False if `parts` is 0.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row = tl.program_id(0)
    head = tl.program_id(1) * together + tl.arange(0, together)
    pair = tl.arange(0, room)
    in_head = pair < pairs
    in_row = (head < all_heads)[:, None] & in_head[None, :]
    is_query = (head < heads)[:, None]
    is_rotated = (head < heads + kv_heads)[:, None]
    rate = tl.load(frequencies + pair, mask=in_head, other=0.0)
    angle = tl.load(positions + row).to(tl.float32) * rate
    cosine = tl.cos(angle)[None, :]
    sine = tl.sin(angle)[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    addresses = qkv + row.to(tl.int64) * from_row + head[:, None] * from_head + 2 * pair[None, :]
    dtype = qkv.dtype.element_ty
    # The number of the product's output that is the first number of each pair; the next output is the second.
    output = head[:, None] * (2 * pairs) + 2 * pair[None, :]
    if scaled:
        first_scale = tl.load(column_scales + output, mask=in_row, other=0.0)
        second_scale = tl.load(column_scales + output + 1, mask=in_row, other=0.0)
    # Positions and slots were written before this frame's kernels, so they may be read before this wait.
    await_preceding_kernel(early)
    if parts:
        outputs = all_heads * (2 * pairs)
        first_part = sums + row.to(tl.int64) * outputs + output
        part_stride = tl.num_programs(0).to(tl.int64) * outputs
        first = sum_of_parts(first_part, part_stride, in_row, parts)
        second = sum_of_parts(first_part + 1, part_stride, in_row, parts)
        if biased:
            first += tl.load(bias + output, mask=in_row, other=0.0).to(tl.float32)
            second += tl.load(bias + output + 1, mask=in_row, other=0.0).to(tl.float32)
        # Round as if the product had been stored in between.
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    else:
        first = tl.load(addresses, mask=in_row, other=0.0).to(tl.float32)
        second = tl.load(addresses + 1, mask=in_row, other=0.0).to(tl.float32)
    if scaled:
        row_scale = tl.load(row_scales + row)
        # Round as if the scaled product had been stored in between.
        first = (first * (row_scale * first_scale)).to(dtype).to(tl.float32)
        second = (second * (row_scale * second_scale)).to(dtype).to(tl.float32)
    if normed:
        mean_square = tl.sum(first * first + second * second, 1) / (2 * pairs)
        norm_factor = tl.rsqrt(mean_square + eps)[:, None]
        column = 2 * pair
        first_weight = tl.where(
            is_query, _pick(query_norm, column, in_head), _pick(key_norm, column, in_head)
        )
        second_weight = tl.where(
            is_query, _pick(query_norm, column + 1, in_head), _pick(key_norm, column + 1, in_head)
        )
        first = tl.where(is_rotated, (first * norm_factor * first_weight).to(dtype).to(tl.float32), first)
        second = tl.where(is_rotated, (second * norm_factor * second_weight).to(dtype).to(tl.float32), second)
    rotated_first = first * cosine - second * sine
    rotated_second = first * sine + second * cosine
    first, second = tl.where(is_rotated, rotated_first, first), tl.where(is_rotated, rotated_second, second)
    if two_factors:
        scale = tl.where(pair < num_scaled, scale, still)[None, :]
    tl.store(addresses, (first * scale).to(dtype), mask=in_row & is_query)
    tl.store(addresses + 1, (second * scale).to(dtype), mask=in_row & is_query)
    in_kv = in_row & (head >= heads)[:, None] & (slot >= 0)
    # 0 for keys and 1 for values.
    half = (head - heads) // kv_heads
    kv_offset = half * kv_half + (head - heads - half * kv_heads) * kv_head
    row_offset = (slot // page_rows) * kv_page + (slot % page_rows) * kv_row
    kv_offset = kv_offset[:, None] + (row_offset + 2 * pair)[None, :]
    first, second = first.to(dtype), second.to(dtype)
    if int8_kv:
        first, second = first.to(tl.float32), second.to(tl.float32)
        peak = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
        # 0 if all numbers are finite, else NaN: then the scale is NaN too, and the error stays visible.
        nan_or_zero = tl.sum((first - first) + (second - second), 1)
        kv_scale = (tl.maximum(peak / 127, MIN_SCALE) + nan_or_zero).to(tl.float16)
        divisor = kv_scale.to(tl.float32)[:, None]
        first, second = _round(first / divisor).to(tl.int8), _round(second / divisor).to(tl.int8)
        scale_offset = (half * kv_half + (head - heads - half * kv_heads) * kv_head) // 2
        scale_offset += (slot // page_rows) * (kv_page // 2) + (slot % page_rows) * (kv_row // 2)
        tl.store(kv_scales + scale_offset, kv_scale, mask=(head >= heads) & (head < all_heads) & (slot >= 0))
    tl.store(kv + kv_offset, first, mask=in_kv)
    tl.store(kv + kv_offset + 1, second, mask=in_kv)


@kernel
def _round(values):
    """Round to the nearest whole number within -127 .. 127, halves to the even one.

    values: fp32, any shape.
    """
    whole = (values + HALF_WAY) - HALF_WAY
    return tl.minimum(tl.maximum(whole, -127.0), 127.0)


@kernel
def _pick(weight, column, inside):
    """Load a norm's weights, fp32 [1, pairs], as a row that broadcasts over heads.

    weight: [head_dim], weight of the norm.
    column: [pairs], which weights.
    inside: [pairs], which of them exist; the others become 0.
    """
    return tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]


@kernel
def _norm(x, weight, out, size, eps, room: tl.constexpr, early: tl.constexpr):
    """Norm one row.

    The norm is computed in fp32, and rounded to the type of `out`.

    x: [rows, size], the input.
    weight: [size], weight of the norm.
    out: [rows, size], receives the result.
    size: numbers of a row.
    room: `size`, rounded up to a power of two.
    eps: added to the mean square.
    early: whether the device starts kernels early (see `launching`).
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, room)
    let_next_begin(early)
    there = column < size
    scale = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    await_preceding_kernel(early)
    values = tl.load(x + row * size + column, mask=there, other=0.0).to(tl.float32)
    values = norm_row(values, scale, size, eps)
    tl.store(out + row * size + column, values.to(out.dtype.element_ty), mask=there)


@kernel
def norm_row(values, scale, size, eps):
    """Return the RMSNorm of one row, fp32 [room].

    values: fp32 [room], the row; numbers beyond its end are 0.
    scale: fp32 [room], weight of the norm.
    size: number of numbers of the row, at most `room`, the length of the arrays.
    eps: added to the mean square.
    """
    return values * (tl.rsqrt(tl.sum(values * values, 0) / size + eps) * scale)


@kernel_for_any("pages", "page_rows")
def _move(
    kv, moves, pages, kv_heads, page_rows, dim, count, many: tl.constexpr, room: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Move one head's keys, or its values, in one layer; for long rows only a range of columns.

    Nothing is done if all sources are negative.

    kv: [layers, 2, pages, kv_heads, page_rows, dim], keys and values of all layers.
    moves: [2, count], source and target slots.
    pages: number of pages.
    kv_heads: number of KV heads.
    page_rows: rows of a page.
    dim: numbers of a row of one head.
    count: number of moves.
    many: `count`, rounded up to a power of two.
    room: numbers of a row that one program moves.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    head = tl.program_id(0)
    half = tl.program_id(1).to(tl.int64)
    move = tl.arange(0, many)
    d = tl.program_id(2) * room + tl.arange(0, room)
    await_preceding_kernel(early)
    source = tl.load(moves + move, mask=move < count, other=-1).to(tl.int64)
    target = tl.load(moves + count + move, mask=move < count, other=-1).to(tl.int64)
    if tl.max(source, 0) < 0:
        return
    there = (source >= 0)[:, None] & (d < dim)[None, :]
    base = kv + (half * pages * kv_heads + head) * page_rows * dim
    start = (source // page_rows * kv_heads * page_rows + source % page_rows) * dim
    goal = (target // page_rows * kv_heads * page_rows + target % page_rows) * dim
    rows = tl.load(base + start[:, None] + d[None, :], mask=there, other=0.0)
    # All rows must be read before any is written: a row's target may be another row's source.
    tl.debug_barrier()
    tl.store(base + goal[:, None] + d[None, :], rows, mask=there)


# As in `_turn`: tokens and origins are often rows of one array.
@kernel_of_any("tokens", "origins", numbers=())
def _join(
    tokens, table, features, origins, token_norm, feature_norm, inputs, plain, size, eps,
    room: tl.constexpr, normed: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Norm one row's embedding (half 0) or its feature (half 1).

    tokens: [rows], row numbers in `table`.
    origins: [rows], row numbers in `features`.
    table: [V, size], the embedding.
    features: [n, size], the features.
    token_norm: [size], weights of the norm of embeddings.
    feature_norm: [size], weights of the norm of features.
    inputs: [rows, 2 * size], receives both normed halves.
    plain: [rows, size], receives the residual.
    size: numbers of a row.
    room: `size`, rounded up to a power of two.
    eps: epsilon of both norms.
    normed: whether the residual is the normed feature.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, room)
    half = tl.program_id(1)
    there = column < size
    await_preceding_kernel(early)
    if half == 0:
        scale = tl.load(token_norm + column, mask=there, other=0.0)
        source = table + tl.load(tokens + row).to(tl.int64) * size
    else:
        scale = tl.load(feature_norm + column, mask=there, other=0.0)
        source = features + tl.load(origins + row).to(tl.int64) * size
    values = tl.load(source + column, mask=there, other=0.0)
    wide = values.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / size + eps) * scale.to(tl.float32)
    short = wide.to(inputs.dtype.element_ty)
    tl.store(inputs + row * 2 * size + half * size + column, short, mask=there)
    if half == 1:
        tl.store(plain + row * size + column, short if normed else values, mask=there)


@kernel
def _gate(gate_up, out, width, wide: tl.constexpr, early: tl.constexpr):
    """Gate a range of columns of one row.

    The result is silu(gate) * up, computed in fp32.

    gate_up: [rows, 2 * width], gates followed by ups.
    out: [rows, width], receives the result.
    width: number of columns.
    wide: columns of one program.
    early: whether the device starts kernels early (see `launching`).
    """
    row = tl.program_id(0).to(tl.int64)
    let_next_begin(early)
    await_preceding_kernel(early)
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    there = column < width
    opened = tl.load(gate_up + row * 2 * width + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=there, other=0.0).to(tl.float32)
    opened = opened / (1 + tl.exp(-opened))
    tl.store(out + row * width + column, (opened * up).to(out.dtype.element_ty), mask=there)


# Columns. Tile of `lengthen_rows`. Untuned.
OUT_COLUMNS = 1024


def shorten_rows(
    x: Tensor, norm: tuple[Tensor, float] | None = None, added: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize rows: return [rows, size] as float8_e4m3fn, and each row's scale, fp32 [rows].

    The factor of a norm is contained in the scale. A row of zeros gets scale 1.

    x: [rows, size]; the numbers of a row are adjacent.
    norm: weight [size] and epsilon of an RMSNorm that is applied first; None: no norm.
    added: (y, scales, columns) of `lengthen_rows`; their scaled product is added to x, in place, before the
        norm. None: nothing is added.
    """
    rows, size = x.shape
    short = x.new_empty((rows, size), dtype=torch.float8_e4m3fn)
    scales = x.new_empty(rows, dtype=torch.float32)
    weight, eps = norm or (x, 0.0)
    with on_device_of(x):
        _shorten[(rows,)](
            x, weight, *(added or (x, scales, scales)), short, scales, size, x.stride(0), eps,
            power_of_two(size), norm is not None, added is not None, num_warps=8, **pdl_options(x),
        )  # fmt: skip
    return short, scales


def shorten_gated(y: Tensor, scales: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(first half) * second half of scaled rows, quantized as by `shorten_rows`: (fp8 [rows,
    size], fp32 [rows]).

    A row of zeros gets scale 1.

    y: [rows, 2 * size], a product without its scales.
    scales: fp32 [rows], factor of each row.
    columns: fp32 [2 * size], factor of each column.
    """
    rows = len(y)
    size = y.shape[1] // 2
    short = y.new_empty((rows, size), dtype=torch.float8_e4m3fn)
    new = y.new_empty(rows, dtype=torch.float32)
    with on_device_of(y):
        _shorten_gated[(rows,)](
            y, scales, columns, short, new, size, power_of_two(size), num_warps=16, **pdl_options(y)
        )  # fmt: skip
    return short, new


def lengthen_rows(
    y: Tensor, scales: Tensor, columns: Tensor, gated: bool = False, into: Tensor | None = None
) -> Tensor:
    """Return y [rows, size] times the scales of rows and columns.

    The result overwrites y, unless it is gated or added to a tensor. The result has the type of y, or is
    `into` itself.

    y: [rows, size], a product without its scales.
    scales: fp32 [rows], factor of each row.
    columns: fp32 [size], factor of each column.
    gated: whether to return silu(first half) * second half of that, [rows, size / 2].
    into: [rows, size], or [rows, size / 2] if gated; the result is added to this tensor, in place. None: it
        is not.
    """
    rows = len(y)
    wanted = y.shape[1] // (1 + gated)
    out = into if into is not None else y.new_empty((rows, wanted)) if gated else y
    with on_device_of(y):
        _lengthen[(rows, -(-wanted // OUT_COLUMNS))](
            y,
            scales,
            columns,
            out,
            y.shape[1],
            wanted,
            out.stride(0),
            OUT_COLUMNS,
            gated,
            into is not None,
            **pdl_options(y),
        )
    return out


@kernel
def _shorten(
    x, weight, y, own, columns, short, scales, size, from_x, eps, room: tl.constexpr, normed: tl.constexpr,
    added: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Quantize one row, after adding a scaled product and norming it if asked to. The sum is written back to
    `x`; the normed row is not.

    x: [rows, size], the rows; `from_x` numbers from one row to the next.
    weight: [size], weight of the norm, if `normed`.
    y: [rows, size], a product without its scales, added to `x` if `added`.
    own: fp32 [rows], scale of each row of `y`.
    columns: fp32 [size], scale of each column of `y`.
    short: fp8 [rows, size], receives the quantized rows.
    scales: fp32 [rows], receives their scales.
    size: numbers of a row.
    room: `size`, rounded up to a power of two.
    from_x: numbers from one row of x to the next.
    eps: epsilon of the norm.
    normed: whether to norm.
    added: whether to add a product.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, room)
    there = column < size
    if normed:
        gains = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    if added:
        sizes = tl.load(columns + column, mask=there, other=0.0)
    await_preceding_kernel(early)
    place = x + row * from_x + column
    values = tl.load(place, mask=there, other=0.0).to(tl.float32)
    if added:
        part = tl.load(y + row * size + column, mask=there, other=0.0).to(tl.float32)
        whole = (part * (tl.load(own + row) * sizes) + values).to(x.dtype.element_ty)
        tl.store(place, whole, mask=there)
        values = whole.to(tl.float32)
    factor = 1.0
    if normed:
        # The norm's factor goes into the row's scale; the quantized numbers do not depend on it.
        factor = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
        values *= gains
    _store_fp8(values, factor, short + row * size + column, scales + row, there)


@kernel
def _shorten_gated(
    y, scales, columns, short, new, size, room: tl.constexpr, early: tl.constexpr
):  # fmt: skip
    """Scale, gate and quantize one row.

    y: [rows, 2 * size], a product.
    scales: fp32 [rows], scale of each row of `y`.
    columns: fp32 [2 * size], scale of each column of `y`.
    short: fp8 [rows, size], receives the quantized rows.
    new: fp32 [rows], receives their scales.
    size: numbers of a row.
    room: `size`, rounded up to a power of two.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, room)
    there = column < size
    first = tl.load(columns + column, mask=there, other=0.0)
    second = tl.load(columns + size + column, mask=there, other=0.0)
    await_preceding_kernel(early)
    scale = tl.load(scales + row)
    source = y + row * 2 * size + column
    values = tl.load(source, mask=there, other=0.0).to(tl.float32) * (scale * first)
    up = tl.load(source + size, mask=there, other=0.0).to(tl.float32) * (scale * second)
    values = values / (1 + tl.exp(-values)) * up
    # Round as if the gated product had been stored in between.
    values = values.to(y.dtype.element_ty).to(tl.float32)
    _store_fp8(values, 1.0, short + row * size + column, new + row, there)


@kernel
def _store_fp8(values, factor, place, scales, there):
    """Store a whole row as 8-bit floats, and its scale times a factor.

    A row of zeros gets scale 1 (times the factor).

    values: fp32, the row.
    factor: multiplied with the row's scale.
    place: addresses of the row's numbers.
    scales: address of the row's scale.
    there: which numbers exist.
    """
    peak = tl.max(tl.abs(values), 0)
    scale = tl.where(peak > 0, peak / LARGEST, 1.0)
    larger = tl.where(peak > 0, LARGEST / peak, 1.0)
    tl.store(place, (values * larger).to(place.dtype.element_ty), mask=there)
    tl.store(scales, scale * factor)


@kernel
def _lengthen(
    y, scales, columns, out, size, wanted, from_out, wide: tl.constexpr, gated: tl.constexpr,
    added: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Scale, and gate or add if asked to, a range of columns of one row.

    y: [rows, size], a product.
    scales: fp32 [rows], scale of each row of `y`.
    columns: fp32 [size], scale of each column of `y`.
    out: [rows, wanted], receives the result.
    size: columns of `y`.
    wanted: columns of the result.
    from_out: numbers from one row of out to the next.
    wide: columns of one program.
    gated: whether to gate.
    added: whether to add to out.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * wide + tl.arange(0, wide)
    there = column < wanted
    first = tl.load(columns + column, mask=there, other=0.0)
    if gated:
        second = tl.load(columns + wanted + column, mask=there, other=0.0)
    await_preceding_kernel(early)
    scale = tl.load(scales + row)
    values = tl.load(y + row * size + column, mask=there, other=0.0).to(tl.float32) * (scale * first)
    if gated:
        up = tl.load(y + row * size + wanted + column, mask=there, other=0.0).to(tl.float32)
        up *= scale * second
        values = values / (1 + tl.exp(-values)) * up
    place = out + row * from_out + column
    if added:
        values += tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.store(place, values.to(out.dtype.element_ty), mask=there)
