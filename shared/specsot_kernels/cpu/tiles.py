"""Emits tiles of matrix products with 8- and 4-bit weights: some rows times some blocks of 16 outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from specsot_kernels.cpu.layout import (
    AMX,
    BYTES,
    GROUP,
    GROUP_BYTES,
    INSTRUCTIONS,
    LANES,
    LONG_GROUP,
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


class _Sums:
    """Exact sums of products of unsigned weights (4 of each of 16 outputs in a step) with signed inputs, for
    AVX-512 VNNI.

    vectors: registers that hold one row's sums for 16 outputs.
    kind: type of such a register.
    apart: partial sums that an output has until `end`.
    """

    vectors = 1
    kind = VI
    apart = 1

    def start(self, b: Builder, first: Value) -> list[Value]:
        """Return registers of one row's sums that begin with a number.

        b: the LLVM builder into which code is emitted.
        first: the number, an i32; every output's sum begins with it.
        """
        return [spread(b, b.sdiv(first, I32(self.apart)), self.kind.count)] * self.vectors

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


class _HalfSums(_Sums):
    """Sums for AVX-VNNI: 8 outputs in a register."""

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


class _PairSums(_Sums):
    """Sums for AVX2 with 8-bit weights: products of 16-bit numbers, which cannot saturate; 4 outputs in a
    register.
    """

    vectors, kind, apart = 4, ir.VectorType(I32, 8), 2

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


class _ShortSums(_Sums):
    """Sums for AVX2 with 4-bit weights: 16-bit sums of pairs that begin at zero.

    8 steps are at most 8 * 2 * 15 * 127 = 30,480, which 16 bits hold.
    """

    vectors, kind = 2, ir.VectorType(ir.IntType(16), 16)

    def start(self, b: Builder, first: Value) -> list[Value]:
        """Return zeroed registers.

        b: the LLVM builder into which code is emitted.
        first: not used: 4-bit products begin at zero.
        """
        return [ir.Constant(self.kind, None)] * self.vectors

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
        return [
            b.add(total, call_named(b, name, self.kind, part, inputs)) for total, part in zip(sums, parts)
        ]

    def end(self, b: Builder, sums: list[Value]) -> Value:
        """Emit the 16 sums as 32-bit integers.

        b: the LLVM builder into which code is emitted.
        sums: the registers of one row's sums, as `start` returns them.
        """
        ones = ir.Constant(self.kind, [1] * 16)
        wide = ir.VectorType(I32, 8)
        return _concatenated(b, [call_named(b, "llvm.x86.avx2.pmadd.wd", wide, part, ones) for part in sums])


class _AnySums(_Sums):
    """Sums for any other processor, without special instructions."""

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


def _sums_for(bits: int) -> _Sums:
    """Return the sums that this processor's instructions compute fastest.

    On AVX2 they are `_PairSums` for 8 bits and `_ShortSums` for 4 bits; on processors without special
    instructions `_AnySums`.

    bits: bits of a weight: 8 or 4.
    """
    if INSTRUCTIONS == "avx2":
        return _PairSums() if bits == 8 else _ShortSums()
    return {"avx512vnni": _Sums, "avxvnni": _HalfSums}.get(INSTRUCTIONS, _AnySums)()


def _weights(b: Builder, at: Value, bits: int) -> Iterator[Value]:
    """Emit, for each step of a group, the 64 weights of 16 outputs.

    Of 4-bit weights, a byte holds the even step in its lower half. There are LONG_STEPS steps for 8 bits, and
    STEPS for 4 bits; each yields a vector of 64 unsigned bytes.

    b: the LLVM builder into which code is emitted.
    at: address of the group's weights.
    bits: bits of a weight: 8 or 4.
    """
    halves = ir.VectorType(ir.IntType(16), 32)
    low = ir.Constant(_bytes(64), [15] * 64)
    for step in range(LONG_STEPS if bits == 8 else STEPS // 2):
        numbers = read(_bytes(64))(b, address(b, at, (step, BYTES)))
        if bits == 8:
            yield numbers
        else:
            yield b.and_(numbers, low)
            upper = b.lshr(b.bitcast(numbers, halves), ir.Constant(halves, [4] * 32))
            yield b.and_(b.bitcast(upper, _bytes(64)), low)


def _tile(bits: int, rows: int, blocks: int, near: int | None) -> Callable[..., Value]:
    """Return an emitter of a tile of some rows and some blocks of 16 outputs.

    8 bits: out = prior + scale of w * sum over groups of (sum of (w + 128) x - 128 sum of x) * scale of x. 4
    bits: out = prior + sum over groups of (sum of w x) * scale of w * scale of x + minimum w * sum of x.

    bits: bits of a weight: 8 or 4.
    rows: rows of the tile.
    blocks: blocks of 16 outputs of the tile.
    near: into which cache to prefetch, see `fetch_line`; None prefetches nothing.
    """
    wide = 2 if WIDE_INPUTS and bits == 8 else 1
    steps = LONG_STEPS if bits == 8 else STEPS
    half_floats = ir.VectorType(ir.HalfType(), LANES)

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
        apart: from one block of weights to the next.
        groups: number of groups of inputs.
        scales: address of the scales of the rows' groups; see `steps.quantize_row`.
        sums: address of the corrections of the rows' groups.
        across: from the scales (and sums) of one group to those of the next; a group has one number a row.
        factors: address of the scales of the outputs, in 8 bits.
        prior: address of what the product is added to, fp32.
        prior_stride: from one row of `prior` to the next.
        out: address of the result, fp32.
        out_stride: from one row of `out` to the next.
        ahead: address from which weights are prefetched.
        pace: how many bytes are prefetched with each load of weights.
        """
        how = _sums_for(bits)
        group_bytes = LANES * LONG_GROUP if bits == 8 else GROUP_BYTES
        totals = [[variables(b, VF, 1)[0] for _ in range(blocks)] for _ in range(rows)]
        with cgutils.for_range(b, groups) as loop:
            coming = address(b, ahead, (b.mul(loop.index, pace), steps * blocks))
            starts = [address(b, w, (apart, block), (loop.index, group_bytes)) for block in range(blocks)]
            xs = [address(b, x, (loop.index, 4 * steps * wide), (x_stride, row)) for row in range(rows)]

            def of_row(kind: ir.Type, at: Value, row: int) -> Value:
                """Emit a load of a row's number of the current group.

                kind: LLVM type of the number.
                at: address of the array: scales or sums.
                row: number of the row.
                """
                return read(kind)(b, address(b, at, (loop.index, across), (row, 4)))

            less = [of_row(I32, sums, row) if bits == 8 else I32(0) for row in range(rows)]
            held = [[how.start(b, one)] * blocks for one in less]
            for step, numbers in enumerate(zip(*(_weights(b, at, bits) for at in starts))):
                if near is not None:
                    for load in range(blocks):
                        fetch_line(b, address(b, coming, (pace, step * blocks + load)), near)
                for own, at in zip(held, xs):
                    inputs = how.read(b, address(b, at, (step, 4 * wide)))
                    own[:] = [how.step(b, one, weights, inputs) for one, weights in zip(own, numbers)]
            for row in range(rows):
                scale = spread(b, of_row(F32, scales, row))
                for block, one in enumerate(totals[row]):
                    found, total = b.sitofp(how.end(b, held[row][block]), VF), b.load(one)
                    if bits == 8:
                        b.store(fma_of(b, found, scale, total), one)
                        continue
                    factor, floor = (
                        b.fpext(read(half_floats)(b, address(b, starts[block], (place, 1))), VF)
                        for place in (4 * BYTES, 4 * BYTES + 2 * LANES)
                    )
                    total = fma_of(b, found, b.fmul(factor, scale), total)
                    b.store(fma_of(b, floor, spread(b, of_row(F32, sums, row)), total), one)
        for row in range(rows):
            for block, one in enumerate(totals[row]):
                before = read(VF)(b, address(b, prior, (prior_stride, row), (block, BYTES)))
                found = b.load(one)
                if bits == 8:
                    found = b.fmul(found, read(VF)(b, address(b, factors, (block, BYTES))))
                write(VF)(b, address(b, out, (out_stride, row), (block, BYTES)), b.fadd(before, found))

    return emit


# Tiles as large as the registers allow: TALL_BLOCKS blocks of 16 outputs by any of HEIGHTS rows, or
# WIDE_BLOCKS blocks by a single row.
TALL_BLOCKS = 2 if INSTRUCTIONS == "avx512vnni" else 1
WIDE_BLOCKS = 4 if INSTRUCTIONS == "avx512vnni" else 2
HEIGHTS = {"avx512vnni": (6, 4, 3, 2, 1), "avxvnni": (4, 2, 1)}.get(INSTRUCTIONS, (2, 1))
# Passes. With so few passes over a block of weights, computing does not hide the memory's latency, so that
# weights are prefetched into the second-level cache, where more loads can be in flight. Chosen on an AMD
# EPYC: 8 rows in two passes became 1.4 times as fast. With eleven passes (64 rows), each line is requested
# many times, and the first-level cache is 5 to 10 % faster.
FEW_PASSES = 1 if INSTRUCTIONS == "avx2" else 3


def _compiled(bits: int, rows: int, blocks: int, near: int | None) -> Any:
    """Return a tile as an operation for Numba.

    bits: bits of a weight: 8 or 4.
    rows: rows of the tile.
    blocks: blocks of 16 outputs of the tile.
    near: into which cache to prefetch; None prefetches nothing.
    """
    return operation(types.void, (INT,) * 15, _tile(bits, rows, blocks, near))


def _tallest(bits: int, heights: Sequence[int]) -> Any:
    """Return a function that computes the largest tile that has no more rows than are left, and returns the
    number of its rows.

    bits: bits of a weight: 8 or 4.
    heights: rows of the tiles, falling, the last one 1.
    """
    height, tile = heights[0], _compiled(bits, heights[0], TALL_BLOCKS, SECOND)
    less = _tallest(bits, heights[1:]) if height > 1 else None

    @part
    def fit(num_left: Any, arguments: Any) -> Any:
        """Compute one tile, and return how many rows it has.

        num_left: number of rows that are left, at least 1.
        arguments: the arguments of the tile.
        """
        if less is None or num_left >= height:
            tile(*arguments)
            return height
        return less(num_left, arguments)

    return fit


def _multiplied(bits: int) -> Any:
    """Return a function that computes one tile, and returns how many rows it has.

    A tile has WIDE_BLOCKS blocks or a single block by one row, or TALL_BLOCKS blocks by as many of the rows
    that are left as one of HEIGHTS allows.

    bits: bits of a weight: 8 or 4.
    """
    tall = _tallest(bits, HEIGHTS)
    tallest = HEIGHTS[0]
    full = _compiled(bits, tallest, TALL_BLOCKS, NEAREST)
    wide, one = _compiled(bits, 1, WIDE_BLOCKS, SECOND), _compiled(bits, 1, 1, None)

    @part
    def multiply(width: Any, num_left: Any, arguments: Any, few: Any) -> Any:
        """Compute one tile, and return how many rows it has.

        width: blocks of outputs.
        num_left: number of rows that are left, at least 1.
        arguments: the arguments of the tile.
        few: whether at most FEW_PASSES passes are made over a block.
        """
        if width == TALL_BLOCKS and num_left >= tallest and not few:
            full(*arguments)
            return tallest
        if width == TALL_BLOCKS:
            return tall(num_left, arguments)
        if width == WIDE_BLOCKS:
            wide(*arguments)
        else:
            one(*arguments)
        return 1

    return multiply


multiply8, multiply4 = (_multiplied(bits) for bits in (8, 4))

_X, _W, _SUMS = (ir.Constant(I8, number) for number in range(3))


def _amx(b: Builder, name: str, *values: Value) -> None:
    """Emit an AMX instruction.

    b: the LLVM builder into which code is emitted.
    name: its name in LLVM, without the prefix.
    values: its LLVM arguments.
    """
    call_named(b, f"llvm.x86.{name}", ir.VoidType(), *values)


def _configure(b: Builder) -> None:
    """Emit the configuration of this thread's tiles: bytes of a tile row, and rows, of inputs, weights and
    sums.

    b: the LLVM builder into which code is emitted.
    """
    tile_config = bytearray(BYTES)
    tile_config[0] = 1  # palette
    for tile, (line, lines) in enumerate(((LONG_GROUP, TILE_ROWS), (BYTES, LONG_STEPS), (BYTES, TILE_ROWS))):
        tile_config[16 + 2 * tile], tile_config[48 + tile] = line, lines
    at = cgutils.alloca_once_value(b, ir.Constant(_bytes(BYTES), list(tile_config)))
    _amx(b, "ldtilecfg", b.bitcast(at, I8.as_pointer()))


def _matrix(
    b: Builder, count: Value, x: Value, x_stride: Value, w: Value, groups: Value, scales: Value, sums: Value,
    across: Value, factors: Value, prior: Value, prior_stride: Value, out: Value, out_stride: Value,
    ahead: Value, lines: Value,
) -> None:  # fmt: skip
    """Emit a tile of one block of outputs by up to 16 rows, of which `count` are stored; the bits are those
    of `_tile`.

    16 rows must be readable. The tile products of a group run while the sums of the preceding group are
    converted. Nothing is returned. The rows after `count` are computed and dropped.

    b: the LLVM builder into which code is emitted.
    count: number of rows that are stored.
    x: address of the quantized rows.
    x_stride: bytes from one row of `x` to the next.
    w: address of the block's weights.
    groups: number of groups of inputs.
    scales: address of the scales of the rows' groups; see `steps.quantize_row`.
    sums: address of the corrections of the rows' groups.
    across: bytes from the scales (and corrections) of one group to those of the next.
    factors: address of the scales of the outputs.
    prior: address of what the product is added to, fp32.
    prior_stride: bytes from one row of `prior` to the next.
    out: address of the result, fp32.
    out_stride: bytes from one row of `out` to the next.
    ahead: address from which weights are prefetched.
    lines: number of cache lines that are prefetched with each group.
    """
    size = TILE_ROWS * BYTES
    room = b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(VI, 2 * TILE_ROWS + 1)), I64)
    room = b.and_(b.add(room, I64(BYTES - 1)), I64(-BYTES))

    def start(group: Value) -> None:
        """Emit the tile product of a group.

        group: number of the group.
        """
        place = address(b, room, (b.and_(group, I64(1)), size))
        for tile, at, stride in (
            (_X, address(b, x, (group, LONG_GROUP)), x_stride),
            (_W, address(b, w, (group, LANES * LONG_GROUP)), I64(BYTES)),
        ):
            _amx(b, "tileloadd64", tile, b.inttoptr(at, I8.as_pointer()), stride)
        _amx(b, "tilezero", _SUMS)
        _amx(b, "tdpbsud", _SUMS, _X, _W)
        _amx(b, "tilestored64", _SUMS, b.inttoptr(place, I8.as_pointer()), I64(BYTES))

    totals = variables(b, VF, TILE_ROWS)
    start(I64(0))
    with cgutils.for_range(b, groups) as loop:
        coming = b.add(loop.index, I64(1))
        with b.if_then(b.icmp_signed("<", coming, groups)):
            start(coming)
        with cgutils.for_range(b, lines) as line:
            fetch_line(b, address(b, ahead, (b.add(b.mul(loop.index, lines), line.index), BYTES)))
        place = address(b, room, (b.and_(loop.index, I64(1)), size))
        for row, one in enumerate(totals):
            less, scale = (
                spread(b, read(kind)(b, address(b, at, (loop.index, across), (row, 4))))
                for kind, at in ((I32, sums), (F32, scales))
            )
            found = b.sitofp(b.add(read(VI, BYTES)(b, address(b, place, (row, BYTES))), less), VF)
            b.store(fma_of(b, found, scale, b.load(one)), one)
    factor = read(VF)(b, factors)
    for row, one in enumerate(totals):
        with b.if_then(b.icmp_signed("<", I64(row), count)):
            before = read(VF)(b, address(b, prior, (prior_stride, row)))
            found = b.fadd(before, b.fmul(b.load(one), factor))
            write(VF)(b, address(b, out, (out_stride, row)), found)


if AMX:
    configure = operation(types.void, (), _configure)
    release = operation(types.void, (), lambda b: _amx(b, "tilerelease"))
    matrix = operation(types.void, (INT,) * 15, _matrix)
else:  # never called

    @part
    def configure() -> None:
        """Do nothing: this processor has no AMX, and this function is never called."""
        pass

    @part
    def release() -> None:
        """Do nothing: this processor has no AMX, and this function is never called."""
        pass

    @part
    def matrix(*given: Any) -> None:
        """Do nothing: this processor has no AMX, and this function is never called.

        given: the arguments of `_matrix`.
        """
        pass
