"""Emits tiles of matrix products with 8-, 6- and 4-bit weights: some rows times some panels of 16 outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from specsot_kernels.cpu.layout import (
    AMX,
    BYTES,
    FORMATS,
    GROUP,
    GROUP_BYTES,
    HEAD_BYTES,
    INSTRUCTIONS,
    K_INPUTS,
    LANES,
    LONG_GROUP,
    Q4_K,
    Q6_K,
    TILE_ROWS,
    WIDE_INPUTS,
)
from specsot_kernels.cpu.vectors import (
    F32,
    I8,
    I32,
    I64,
    INT,
    NEAREST,
    SECOND,
    VF,
    VI,
    Builder,
    Value,
    address,
    call_named,
    fetch_line,
    fma_of,
    operation,
    part,
    read,
    spread,
    variables,
    write,
)

# Steps of a group; a step has four inputs.
STEPS = GROUP // 4
# Steps of a long group, which 8-bit weights have.
LONG_STEPS = LONG_GROUP // 4


def _bytes(lanes: int) -> ir.Type:
    """Return the LLVM type of a vector of bytes.

    lanes: number of bytes.
    """
    return ir.VectorType(I8, lanes)


def _part(b: Builder, v: Value, first: int, lanes: int) -> Value:
    """Emit some neighbouring lanes of a vector.

    b: the LLVM builder into which code is emitted.
    v: the vector.
    first: number of the first lane.
    lanes: number of lanes.
    """
    return b.shuffle_vector(v, v, ir.Constant(ir.VectorType(I32, lanes), list(range(first, first + lanes))))


def _concatenated(b: Builder, parts: list[Value]) -> Value:
    """Emit the concatenation of vectors of one type, and return it; their number is a power of two.

    b: the LLVM builder into which code is emitted.
    parts: the vectors, in the order of their lanes.
    """
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        parts = [b.shuffle_vector(x, y, order) for x, y in zip(parts[::2], parts[1::2])]
    return parts[0]


def _pairs(b: Builder, v: Value) -> Value:
    """Emit the sums of lanes 0 + 1, 2 + 3, and so on.

    b: the LLVM builder into which code is emitted.
    v: a vector of integers.
    """
    half = v.type.count // 2
    even, odd = (ir.Constant(ir.VectorType(I32, half), list(range(at, 2 * half, 2))) for at in (0, 1))
    return b.add(b.shuffle_vector(v, v, even), b.shuffle_vector(v, v, odd))


class _DotProducts:
    """Emits exact dot products of unsigned weights (4 of each of 16 outputs in a step) with signed inputs, by
    AVX-512 VNNI. Subclasses do it by other instructions.

    vectors: registers that hold one row's sums for 16 outputs.
    kind: type of such a register.
    partial_sums: how many sums an output has until `end` adds them.
    """

    vectors = 1
    kind = VI
    partial_sums = 1

    def start(self, b: Builder, first: Value) -> list[Value]:
        """Return registers of one row's sums that begin with a number.

        b: the LLVM builder into which code is emitted.
        first: the number, an i32, a multiple of `partial_sums`; every output's sum begins with it.
        """
        return [spread(b, b.sdiv(first, I32(self.partial_sums)), self.kind.count)] * self.vectors

    def read(self, b: Builder, x: Value) -> Value:
        """Emit a load of the 4 inputs at an address, in the form that `step` needs.

        b: the LLVM builder into which code is emitted.
        x: address of the 4 inputs.
        """
        return spread(b, read(I32)(b, x))

    def step(self, b: Builder, sums: list[Value], weights: Value, inputs: Value) -> list[Value]:
        """Emit the addition of one step's products, and return the new registers.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them.
        weights: 64 unsigned bytes, 4 weights of each of 16 outputs.
        inputs: the step's inputs, as `read` returns them.
        """
        return [call_named(b, "llvm.x86.avx512.vpdpbusd.512", VI, sums[0], b.bitcast(weights, VI), inputs)]

    def end(self, b: Builder, sums: list[Value]) -> Value:
        """Emit the 16 sums as 32-bit integers.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them.
        """
        return sums[0]


class _AvxVnniDots(_DotProducts):
    """Dot products by AVX-VNNI: 8 outputs in a register."""

    vectors, kind = 2, ir.VectorType(I32, 8)

    def read(self, b: Builder, x: Value) -> Value:
        """Emit a load of the 4 inputs at an address, in the form that `step` needs.

        b: the LLVM builder into which code is emitted.
        x: address of the 4 inputs.
        """
        return spread(b, read(I32)(b, x), 8)

    def step(self, b: Builder, sums: list[Value], weights: Value, inputs: Value) -> list[Value]:
        """Emit the addition of one step's products, and return the new registers.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them.
        weights: 64 unsigned bytes, 4 weights of each of 16 outputs.
        inputs: the step's inputs, as `read` returns them.
        """
        parts = (b.bitcast(_part(b, weights, at, 32), self.kind) for at in (0, 32))
        name = "llvm.x86.avx512.vpdpbusd.256"
        return [call_named(b, name, self.kind, total, part, inputs) for total, part in zip(sums, parts)]

    def end(self, b: Builder, sums: list[Value]) -> Value:
        """Emit the 16 sums as 32-bit integers.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them.
        """
        return _concatenated(b, sums)


class _Avx2Dots8(_DotProducts):
    """Dot products by AVX2 of 8-bit weights: products of 16-bit numbers, which cannot saturate. A register
    holds 4 outputs.
    """

    vectors, kind, partial_sums = 4, ir.VectorType(I32, 8), 2

    def read(self, b: Builder, x: Value) -> Value:
        """Emit a load of the 4 inputs at an address, 16-bit numbers, in the form that `step` needs.

        b: the LLVM builder into which code is emitted.
        x: address of the 4 inputs.
        """
        return b.bitcast(spread(b, read(I64)(b, x), 4), ir.VectorType(ir.IntType(16), 16))

    def step(self, b: Builder, sums: list[Value], weights: Value, inputs: Value) -> list[Value]:
        """Emit the addition of one step's products, and return the new registers.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them.
        weights: 64 unsigned bytes, 4 weights of each of 16 outputs.
        inputs: the step's inputs, as `read` returns them.
        """
        wide = (b.zext(_part(b, weights, at, 16), inputs.type) for at in range(0, 64, 16))
        name = "llvm.x86.avx2.pmadd.wd"
        return [b.add(total, call_named(b, name, self.kind, part, inputs)) for total, part in zip(sums, wide)]

    def end(self, b: Builder, sums: list[Value]) -> Value:
        """Emit the 16 sums as 32-bit integers.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them.
        """
        return _pairs(b, _concatenated(b, sums))


class _Avx2Dots4(_DotProducts):
    """Dot products by AVX2 of 4-bit weights: 16-bit sums of pairs that begin at zero.

    8 steps are at most 8 * 2 * 15 * 127 = 30,480, which 16 bits hold.
    """

    vectors, kind = 2, ir.VectorType(ir.IntType(16), 16)

    def start(self, b: Builder, first: Value) -> list[Value]:
        """Return zeroed registers.

        b: the LLVM builder into which code is emitted.
        first: not used: these products begin at zero.
        """
        return [ir.Constant(_Avx2Dots4.kind, None)] * self.vectors

    def read(self, b: Builder, x: Value) -> Value:
        """Emit a load of the 4 inputs at an address, in the form that `step` needs.

        b: the LLVM builder into which code is emitted.
        x: address of the 4 inputs.
        """
        return b.bitcast(spread(b, read(I32)(b, x), 8), _bytes(32))

    def step(self, b: Builder, sums: list[Value], weights: Value, inputs: Value) -> list[Value]:
        """Emit the addition of one step's products, and return the new registers.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them.
        weights: 64 unsigned bytes, 4 weights of each of 16 outputs.
        inputs: the step's inputs, as `read` returns them.
        """
        parts = (_part(b, weights, at, 32) for at in (0, 32))
        name = "llvm.x86.avx2.pmadd.ub.sw"
        kind = _Avx2Dots4.kind
        return [b.add(total, call_named(b, name, kind, part, inputs)) for total, part in zip(sums, parts)]

    def end(self, b: Builder, sums: list[Value]) -> Value:
        """Emit the 16 sums as 32-bit integers.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them.
        """
        ones = ir.Constant(_Avx2Dots4.kind, [1] * 16)
        wide = ir.VectorType(I32, 8)
        return _concatenated(b, [call_named(b, "llvm.x86.avx2.pmadd.wd", wide, part, ones) for part in sums])


class _Avx2Dots6(_Avx2Dots4):
    """Dot products by AVX2 of 6-bit weights: 32-bit sums, and 16-bit sums of pairs of every two steps.

    Two steps are at most 2 * 2 * 63 * 127 = 32,004, which 16 bits hold.
    """

    kind = ir.VectorType(I32, 8)

    def start(self, b: Builder, first: Value) -> list[Value]:
        """Return registers of one row's sums that begin with a number.

        b: the LLVM builder into which code is emitted.
        first: the number, an i32; every output's sum begins with it.
        """
        return _DotProducts.start(self, b, first)

    def step(self, b: Builder, sums: list[Value], weights: Value, inputs: Value) -> list[Value]:
        """Emit the addition of one step's products, and return the new registers.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them. After an odd number of steps, the
            16-bit sums of the last step follow.
        weights: 64 unsigned bytes, 4 weights of each of 16 outputs.
        inputs: the step's inputs, as `read` returns them.
        """
        if len(sums) == self.vectors:
            return sums + super().step(b, super().start(b, I32(0)), weights, inputs)
        pairs = super().step(b, sums[self.vectors :], weights, inputs)
        both = _part(b, super().end(b, pairs), 0, 8), _part(b, super().end(b, pairs), 8, 8)
        return [b.add(total, one) for total, one in zip(sums, both)]

    def end(self, b: Builder, sums: list[Value]) -> Value:
        """Emit the 16 sums as 32-bit integers, after an even number of steps.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them.
        """
        return _concatenated(b, sums)


class _GenericDots(_DotProducts):
    """Dot products on any other processor, without special instructions."""

    def read(self, b: Builder, x: Value) -> Value:
        """Emit a load of the 4 inputs at an address, in the form that `step` needs.

        b: the LLVM builder into which code is emitted.
        x: address of the 4 inputs.
        """
        return b.bitcast(spread(b, read(I32)(b, x)), _bytes(64))

    def step(self, b: Builder, sums: list[Value], weights: Value, inputs: Value) -> list[Value]:
        """Emit the addition of one step's products, and return the new registers.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them.
        weights: 64 unsigned bytes, 4 weights of each of 16 outputs.
        inputs: the step's inputs, as `read` returns them.
        """
        wide = ir.VectorType(I32, 64)
        products = b.mul(b.zext(weights, wide), b.sext(inputs, wide))
        return [b.add(sums[0], _pairs(b, _pairs(b, products)))]


def _dots_for(bits: int) -> _DotProducts:
    """Return the emitter of dot products that is the fastest on this processor.

    On AVX2 they are `_Avx2Dots8` for 8 bits, `_Avx2Dots6` for 6 bits and `_Avx2Dots4` for 4 bits; on
    processors without special instructions `_GenericDots`.

    bits: the weights' format: 8, 4, Q4_K or Q6_K; see `layout.FORMAT`.
    """
    if INSTRUCTIONS == "avx2":
        return {8: _Avx2Dots8, Q6_K: _Avx2Dots6}.get(bits, _Avx2Dots4)()
    return {"avx512vnni": _DotProducts, "avxvnni": _AvxVnniDots}.get(INSTRUCTIONS, _GenericDots)()


def _weights(b: Builder, at: Value, bits: int) -> Iterator[Value]:
    """Emit, for each step of a group, the 64 weights of 16 outputs.

    A byte of the lower 4 bits holds a weight of an even step in its lower half and one of the next step in
    its upper half. A byte of the upper 2 bits, which only 6-bit weights have, holds weights of four steps,
    the first one lowest. There are LONG_STEPS steps for 8 bits, and STEPS for others; each yields a vector
    of 64 unsigned bytes.

    b: the LLVM builder into which code is emitted.
    at: address of the group's weights.
    bits: the weights' format: 8, 4, Q4_K or Q6_K; see `layout.FORMAT`.
    """
    halves = ir.VectorType(ir.IntType(16), 32)

    def shifted_bits(line: int, right: int, mask: int) -> Value:
        """Emit 64 bytes, shifted to the right (to the left if `right` is negative), without the bits that a
        mask lacks.

        line: number of the 64 bytes.
        right: number of bits.
        mask: which bits of each byte stay.
        """
        shorts = read(halves)(b, address(b, at, (line, BYTES)))
        shift = b.lshr if right > 0 else b.shl
        shifted = shift(shorts, ir.Constant(halves, [abs(right)] * 32)) if right else shorts
        return b.and_(b.bitcast(shifted, _bytes(64)), ir.Constant(_bytes(64), [mask] * 64))

    for step in range(LONG_STEPS if bits == 8 else STEPS):
        if bits == 8:
            yield read(_bytes(64))(b, address(b, at, (step, BYTES)))
            continue
        lower = shifted_bits(step // 2, 4 * (step % 2), 15)
        yield b.or_(lower, shifted_bits(4 + step // 4, 2 * (step % 4) - 4, 48)) if bits == Q6_K else lower


def _group(b: Builder, first: Value, group: Value, bits: int, place: int = 0) -> Value:
    """Emit the address of a group of 16 outputs, or of a place in it.

    b: the LLVM builder into which code is emitted.
    first: address of the first weights of these outputs.
    group: number of the group.
    bits: the weights' format; see `layout.FORMAT`.
    place: bytes from the beginning of the group.
    """
    heads = b.add(b.udiv(group, I64(K_INPUTS // GROUP)), I64(1))
    return address(b, first, (group, GROUP_BYTES[bits]), (heads, HEAD_BYTES[bits]), (place, 1))


def _scales(b: Builder, first: Value, group: Value, bits: int) -> list[Value]:
    """Emit the two vectors of fp32 numbers that a group of 16 outputs has: its scales and its minimum values,
    or in Q6_K the scales of its halves.

    They are exact: in Q4_K and Q6_K they are products of 11 and at most 8 bits.

    b: the LLVM builder into which code is emitted.
    first: address of the first weights of these outputs.
    group: number of the group.
    bits: 4, Q4_K or Q6_K.
    """
    halves = read(ir.VectorType(ir.HalfType(), LANES))
    own = _group(b, first, group, bits, GROUP_BYTES[bits])
    if bits == 4:
        return [b.fpext(halves(b, address(b, own, (-place, 2 * LANES))), VF) for place in (2, 1)]
    block = b.udiv(group, I64(K_INPUTS // GROUP))
    head = address(b, first, (block, HEAD_BYTES[bits] + K_INPUTS // GROUP * GROUP_BYTES[bits]))
    found = []
    for place in range(2):
        factor = b.fpext(halves(b, address(b, head, (place if bits == Q4_K else 0, 2 * LANES))), VF)
        whole = read(_bytes(LANES))(b, address(b, own, (place - 2, LANES)))
        widened = b.zext(whole, VI) if bits == Q4_K else b.sext(whole, VI)
        found.append(b.fmul(b.sitofp(widened, VF), factor))
    return found


def _add_group(
    b: Builder, bits: int, total: Value, found: Value, part: int, factors: list[Value], scale: Value,
    correction: Value,
) -> Value:  # fmt: skip
    """Emit a row's total of 16 outputs after adding the products of another group (in Q6_K, half a group).

    b: the LLVM builder into which code is emitted.
    bits: the weights' format; see `layout.FORMAT`.
    total: the total before, fp32.
    found: the sums of products, fp32.
    part: number of the half in Q6_K, else 0.
    factors: what `_scales` emits for the group; not used for 8 bits.
    scale: the scale of the row's group, in all lanes.
    correction: the correction of the row's group, fp32 in all lanes; used for 4-bit weights only.
    """
    if bits == 8:
        return fma_of(b, found, scale, total)
    total = fma_of(b, found, b.fmul(factors[part], scale), total)
    return total if bits == Q6_K else fma_of(b, factors[1], correction, total)


def _parts(bits: int) -> int:
    """Return how many parts of a group of inputs have a scale of their own: 2 in Q6_K, else 1.

    bits: the weights' format; see `layout.FORMAT`.
    """
    return 2 if bits == Q6_K else 1


def _steps(bits: int) -> int:
    """Return the number of steps of a group.

    bits: the weights' format; see `layout.FORMAT`.
    """
    return LONG_STEPS if bits == 8 else STEPS


def _begins_with_correction(bits: int) -> bool:
    """Tell whether sums of products begin with a correction, which is an integer (see `steps.quantize_row`).

    bits: the weights' format; see `layout.FORMAT`.
    """
    return bits in (8, Q6_K)


def _row_number(
    b: Builder, kind: ir.Type, at: Value, across: Value, group: Value, row: int, part: int = 0, parts: int = 1
) -> Value:  # fmt: skip
    """Emit a load of a number of a row's group of inputs.

    b: the LLVM builder into which code is emitted.
    kind: LLVM type of the number.
    at: address of the first row's scales or corrections.
    across: bytes from one number of a row to its next one. A group has one correction, in Q6_K two, and
        one scale.
    group: number of the group.
    row: number of the row.
    part: which of the group's numbers.
    parts: how many of these numbers a group has.
    """
    place = (b.mul(group, I64(parts)), across), (part, across), (row, 4)
    return read(kind)(b, address(b, at, *place))


def _tile(bits: int, rows: int, panels: int, cache: int | None) -> Callable[..., Value]:
    """Return an emitter of a tile of some rows and some panels of 16 outputs.

    With codes w of weights and integers x of a row, the result is `prior` plus, with sums over the inputs of
    a group inside of sums over groups:

    * 8 bits: scale of w * sum_groups((sum((w + 128) x) - 128 sum(x)) * scale of x)
    * 4 bits: sum_groups(sum(w x) * scale of w * scale of x + minimum of w * (scale of x * sum(x)))
    * 6 bits: sum_half_groups((sum((w + 32) x) - 32 sum(x)) * scale of w * scale of x)

    bits: the weights' format: 8, 4, Q4_K or Q6_K; see `layout.FORMAT`.
    rows: rows of the tile.
    panels: panels of 16 outputs of the tile.
    cache: into which level of the cache to prefetch, see `fetch_line`; None prefetches nothing.
    """
    wide = 2 if WIDE_INPUTS and bits == 8 else 1
    steps, parts, corrected = _steps(bits), _parts(bits), _begins_with_correction(bits)

    def emit(
        b: Builder,
        x: Value,
        x_stride: Value,
        w: Value,
        apart: Value,
        groups: Value,
        scales: Value,
        sums: Value,
        across: Value,
        factors: Value,
        prior: Value,
        prior_stride: Value,
        out: Value,
        out_stride: Value,
        ahead: Value,
        pace: Value,
    ) -> None:
        """Emit the tile. Strides and distances are in bytes.

        b: the LLVM builder into which code is emitted.
        x: address of the quantized rows.
        x_stride: from one row of `x` to the next.
        w: address of the weights.
        apart: from one panel of weights to the next.
        groups: number of groups of inputs.
        scales: address of the scales of the rows' groups; see `steps.quantize_row`.
        sums: address of the corrections of the rows' groups.
        across: from one scale of a row to its next one, and from one correction to the next one. Each group
            has one scale, and one correction or two (Q6_K).
        factors: address of the scales of the outputs, in 8 bits.
        prior: address of what the product is added to, fp32.
        prior_stride: from one row of `prior` to the next.
        out: address of the result, fp32.
        out_stride: from one row of `out` to the next.
        ahead: address of the weights that are prefetched.
        pace: how many bytes are prefetched with each load of weights.
        """
        how = _dots_for(bits)
        totals = [[variables(b, VF, 1)[0] for _ in range(panels)] for _ in range(rows)]
        with cgutils.for_range(b, groups) as loop:
            prefetched = address(b, ahead, (b.mul(loop.index, pace), steps * panels))
            firsts = [address(b, w, (apart, panel)) for panel in range(panels)]
            starts = [_group(b, first, loop.index, bits) for first in firsts]
            xs = [address(b, x, (loop.index, 4 * steps * wide), (x_stride, row)) for row in range(rows)]

            loads = enumerate(zip(*(_weights(b, at, bits) for at in starts)))
            for part in range(parts):
                corrections = [
                    _row_number(b, I32, sums, across, loop.index, row, part, parts) if corrected else I32(0)
                    for row in range(rows)
                ]
                held = [[how.start(b, one)] * panels for one in corrections]
                for step, numbers in islice(loads, steps // parts):
                    if cache is not None:
                        for load in range(panels):
                            fetch_line(b, address(b, prefetched, (pace, step * panels + load)), cache)
                    for own, at in zip(held, xs):
                        inputs = how.read(b, address(b, at, (step, 4 * wide)))
                        own[:] = [how.step(b, one, weights, inputs) for one, weights in zip(own, numbers)]
                for row in range(rows):
                    scale, correction = (
                        spread(b, _row_number(b, F32, at, across, loop.index, row)) for at in (scales, sums)
                    )
                    for panel, one in enumerate(totals[row]):
                        found = b.sitofp(how.end(b, held[row][panel]), VF)
                        group_factors = [] if bits == 8 else _scales(b, firsts[panel], loop.index, bits)
                        b.store(
                            _add_group(b, bits, b.load(one), found, part, group_factors, scale, correction),
                            one,
                        )
        for row in range(rows):
            for panel, one in enumerate(totals[row]):
                before = read(VF)(b, address(b, prior, (prior_stride, row), (panel, BYTES)))
                found = b.load(one)
                if bits == 8:
                    found = b.fmul(found, read(VF)(b, address(b, factors, (panel, BYTES))))
                write(VF)(b, address(b, out, (out_stride, row), (panel, BYTES)), b.fadd(before, found))

    return emit


# Tiles as large as the registers allow: TALL_PANELS panels of 16 outputs by any of HEIGHTS rows, or
# WIDE_PANELS panels by a single row.
TALL_PANELS = 2 if INSTRUCTIONS == "avx512vnni" else 1
WIDE_PANELS = 4 if INSTRUCTIONS == "avx512vnni" else 2
HEIGHTS = {"avx512vnni": (6, 4, 3, 2, 1), "avxvnni": (4, 2, 1)}.get(INSTRUCTIONS, (2, 1))
# Passes. A pass computes one tile of rows with a panel of weights. With so few passes, computing does not
# hide the memory's latency, so that weights are prefetched into the second-level cache, where more loads can
# be in flight. Chosen on an AMD EPYC: 8 rows in two passes became 1.4 times as fast. With eleven passes (64
# rows), each line is requested many times, and the first-level cache is 5 to 10 % faster.
FEW_PASSES = 1 if INSTRUCTIONS == "avx2" else 3


def _tile_operation(bits: int, rows: int, panels: int, cache: int | None) -> Any:
    """Return a tile as an operation that compiled functions can call.

    bits: the weights' format: 8, 4, Q4_K or Q6_K; see `layout.FORMAT`.
    rows: rows of the tile.
    panels: panels of 16 outputs of the tile.
    cache: into which cache to prefetch; None prefetches nothing.
    """
    return operation(types.void, (INT,) * 15, _tile(bits, rows, panels, cache))


def _fitting_tile(bits: int, heights: Sequence[int]) -> Any:
    """Return a function that computes the tallest tile that has no more rows than are left, and returns the
    number of its rows.

    bits: the weights' format: 8, 4, Q4_K or Q6_K; see `layout.FORMAT`.
    heights: rows of the tiles, falling, the last one 1.
    """
    height, tile = heights[0], _tile_operation(bits, heights[0], TALL_PANELS, SECOND)
    shorter = _fitting_tile(bits, heights[1:]) if height > 1 else None

    @part
    def fit(num_left: Any, arguments: Any) -> Any:
        """Compute one tile, and return how many rows it has.

        num_left: number of rows that are left, at least 1.
        arguments: the arguments of the tile.
        """
        if shorter is None or num_left >= height:
            tile(*arguments)
            return height
        return shorter(num_left, arguments)

    return fit


def _any_tile(bits: int) -> Any:
    """Return a function that computes one tile, and returns how many rows it has.

    A tile has WIDE_PANELS panels or a single panel by one row, or TALL_PANELS panels by as many of the rows
    that are left as one of HEIGHTS allows.

    bits: the weights' format: 8, 4, Q4_K or Q6_K; see `layout.FORMAT`.
    """
    tall = _fitting_tile(bits, HEIGHTS)
    tallest = HEIGHTS[0]
    # Weights of fewer bits take as long either way.
    full = _tile_operation(bits, tallest, TALL_PANELS, NEAREST) if bits == 8 else None
    wide = _tile_operation(bits, 1, WIDE_PANELS, SECOND)
    # On some processors TALL_PANELS is 1.
    one = _tile_operation(bits, 1, 1, None) if TALL_PANELS > 1 else None

    @part
    def multiply(width: Any, num_left: Any, arguments: Any, few: Any) -> Any:
        """Compute one tile, and return how many rows it has.

        width: panels of outputs.
        num_left: number of rows that are left, at least 1.
        arguments: the arguments of the tile.
        few: whether at most FEW_PASSES passes are made over a panel.
        """
        if full is not None and width == TALL_PANELS and num_left >= tallest and not few:
            full(*arguments)
            return tallest
        if width == TALL_PANELS:
            return tall(num_left, arguments)
        if one is None or width == WIDE_PANELS:
            wide(*arguments)
        else:
            one(*arguments)
        return 1

    return multiply


def _by_format(make: Callable[[int], Any], formats: Sequence[int] = FORMATS) -> Any:
    """Return a function that calls another one with all its arguments but the first, which chooses it: the
    format of the product's weight.

    make: returns the function that is called for a format; see `layout.FORMAT`.
    formats: the formats to choose from, at least one.
    """
    form, own = formats[0], make(formats[0])
    others = _by_format(make, formats[1:]) if formats[1:] else None

    @part
    def call(bits: Any, *arguments: Any) -> Any:
        """Call the function for a format, and return its result.

        bits: one of the formats.
        arguments: the function's arguments.
        """
        if others is None or bits == form:
            return own(*arguments)
        return others(bits, *arguments)

    return call


# Computes one tile; see `_any_tile`. The first argument is the format of the product's weight.
multiply = _by_format(_any_tile)

# Numbers of AMX's tile registers.
_AMX_INPUTS, _AMX_WEIGHTS, _AMX_SUMS = (ir.Constant(I8, number) for number in range(3))


def _amx(b: Builder, name: str, *values: Value) -> None:
    """Emit an AMX instruction.

    b: the LLVM builder into which code is emitted.
    name: its name in LLVM, without the prefix.
    values: its LLVM arguments.
    """
    call_named(b, f"llvm.x86.{name}", ir.VoidType(), *values)


def _configure(bits: int) -> Callable[..., Value]:
    """Return an emitter of the configuration of this thread's tiles: bytes of a tile row, and rows, of
    inputs, weights and sums.

    bits: the weights' format; see `layout.FORMAT`.
    """
    steps = _steps(bits) // _parts(bits)

    def emit(b: Builder) -> None:
        """Emit the configuration.

        b: the LLVM builder into which code is emitted.
        """
        tile_config = bytearray(BYTES)
        tile_config[0] = 1  # palette
        for tile, (line, lines) in enumerate(((4 * steps, TILE_ROWS), (BYTES, steps), (BYTES, TILE_ROWS))):
            tile_config[16 + 2 * tile], tile_config[48 + tile] = line, lines
        at = cgutils.alloca_once_value(b, ir.Constant(_bytes(BYTES), list(tile_config)))
        _amx(b, "ldtilecfg", b.bitcast(at, I8.as_pointer()))

    return emit


def _aligned_memory(b: Builder, lines: int) -> Value:
    """Emit the address of memory on the stack, aligned to a cache line.

    b: the LLVM builder into which code is emitted.
    lines: number of cache lines.
    """
    room = b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(VI, lines + 1)), I64)
    return b.and_(b.add(room, I64(BYTES - 1)), I64(-BYTES))


def _amx_tile(bits: int) -> Callable[..., Value]:
    """Return an emitter of a tile of one panel by up to 16 rows, by AMX. Its results have the same bits as
    those of `_tile`.

    bits: the weights' format; see `layout.FORMAT`.
    """
    steps, parts = _steps(bits), _parts(bits)
    size = TILE_ROWS * BYTES

    def emit(
        b: Builder, count: Value, x: Value, x_stride: Value, w: Value, groups: Value, scales: Value,
        sums: Value, across: Value, factors: Value, prior: Value, prior_stride: Value, out: Value,
        out_stride: Value, ahead: Value, lines: Value,
    ) -> None:  # fmt: skip
        """Emit the tile, of which `count` rows are stored.

        16 rows must be readable. The tile products of a group run while the sums of the preceding group are
        converted. Nothing is returned. The rows after `count` are computed and dropped.

        b: the LLVM builder into which code is emitted.
        count: number of rows that are stored.
        x: address of the quantized rows.
        x_stride: bytes from one row of `x` to the next.
        w: address of the panel's weights.
        groups: number of groups of inputs.
        scales: address of the scales of the rows' groups; see `steps.quantize_row`.
        sums: address of the corrections of the rows' groups.
        across: bytes from one scale of a row to its next one, and from one correction to the next one.
        factors: address of the scales of the outputs, in 8 bits.
        prior: address of what the product is added to, fp32.
        prior_stride: bytes from one row of `prior` to the next.
        out: address of the result, fp32.
        out_stride: bytes from one row of `out` to the next.
        ahead: address from which weights are prefetched.
        lines: number of cache lines that are prefetched with each group.
        """
        room, unpacked = _aligned_memory(b, 2 * parts * TILE_ROWS), _aligned_memory(b, STEPS)

        def place_of(group: Value, part: int) -> Value:
            """Emit the address of the sums of a group's part.

            group: number of the group.
            part: number of the part.
            """
            return address(b, room, (b.and_(group, I64(1)), parts * size), (part, size))

        def start(group: Value) -> None:
            """Emit the tile products of a group.

            group: number of the group.
            """
            weights = _group(b, w, group, bits)
            if bits != 8:
                for step, numbers in enumerate(_weights(b, weights, bits)):
                    write(_bytes(BYTES))(b, address(b, unpacked, (step, BYTES)), numbers)
                weights = unpacked
            for part in range(parts):
                share = part * steps // parts
                for tile, at, stride in (
                    (_AMX_INPUTS, address(b, x, (group, 4 * steps), (share, 4)), x_stride),
                    (_AMX_WEIGHTS, address(b, weights, (share, BYTES)), I64(BYTES)),
                ):
                    _amx(b, "tileloadd64", tile, b.inttoptr(at, I8.as_pointer()), stride)
                _amx(b, "tilezero", _AMX_SUMS)
                _amx(b, "tdpbsud", _AMX_SUMS, _AMX_INPUTS, _AMX_WEIGHTS)
                to = b.inttoptr(place_of(group, part), I8.as_pointer())
                _amx(b, "tilestored64", _AMX_SUMS, to, I64(BYTES))

        totals = variables(b, VF, TILE_ROWS)
        start(I64(0))
        with cgutils.for_range(b, groups) as loop:
            prefetched = b.add(loop.index, I64(1))
            with b.if_then(b.icmp_signed("<", prefetched, groups)):
                start(prefetched)
            with cgutils.for_range(b, lines) as line:
                fetch_line(b, address(b, ahead, (b.add(b.mul(loop.index, lines), line.index), BYTES)))
            group_factors = [] if bits == 8 else _scales(b, w, loop.index, bits)
            for part in range(parts):
                place = place_of(loop.index, part)
                for row, one in enumerate(totals):
                    scale, correction = (
                        spread(b, _row_number(b, F32, at, across, loop.index, row)) for at in (scales, sums)
                    )
                    found = read(VI, BYTES)(b, address(b, place, (row, BYTES)))
                    if _begins_with_correction(bits):
                        begin = _row_number(b, I32, sums, across, loop.index, row, part, parts)
                        found = b.add(found, spread(b, begin))
                    found = b.sitofp(found, VF)
                    b.store(
                        _add_group(b, bits, b.load(one), found, part, group_factors, scale, correction), one
                    )
        factor = read(VF)(b, factors) if bits == 8 else None
        for row, one in enumerate(totals):
            with b.if_then(b.icmp_signed("<", I64(row), count)):
                before = read(VF)(b, address(b, prior, (prior_stride, row)))
                found = b.load(one) if factor is None else b.fmul(b.load(one), factor)
                write(VF)(b, address(b, out, (out_stride, row)), b.fadd(before, found))

    return emit


if AMX:
    configure = _by_format(lambda bits: operation(types.void, (), _configure(bits)))
    release = operation(types.void, (), lambda b: _amx(b, "tilerelease"))
    matrix = _by_format(lambda bits: operation(types.void, (INT,) * 15, _amx_tile(bits)))
else:  # never called

    @part
    def configure(bits: Any) -> None:
        """Do nothing: this processor has no AMX, and this function is never called.

        bits: the weights' format; see `layout.FORMAT`.
        """
        pass

    @part
    def release() -> None:
        """Do nothing: this processor has no AMX, and this function is never called."""
        pass

    @part
    def matrix(*given: Any) -> None:
        """Do nothing: this processor has no AMX, and this function is never called.

        given: the arguments of `_amx_tile`.
        """
        pass
