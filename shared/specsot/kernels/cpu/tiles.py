"""Tiles of products and of attention: rows x blocks of 16 outputs, and one query over its columns."""

# pyright: basic, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils

from specsot.kernels.cpu.vectors import (
    BYTES,
    F32,
    GROUP,
    GROUP_BYTES,
    I8,
    I32,
    I64,
    INSTRUCTIONS,
    INT,
    LANES,
    VF,
    VI,
    WIDE_INPUTS,
    Builder,
    Value,
    call_named,
    fma_of,
    operation,
    read,
    spread,
    total_of,
    write,
)


def _bytes(lanes: int) -> ir.Type:
    return ir.VectorType(I8, lanes)


def _part(b: Builder, v: Value, first: int, lanes: int) -> Value:
    return b.shuffle_vector(v, v, ir.Constant(ir.VectorType(I32, lanes), list(range(first, first + lanes))))


def _beside(b: Builder, parts: list[Value]) -> Value:
    """One vector of several of one kind."""
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        parts = [b.shuffle_vector(x, y, order) for x, y in zip(parts[::2], parts[1::2])]
    return parts[0]


def _pairs(b: Builder, v: Value) -> Value:
    """Lanes 0 + 1, 2 + 3, ..."""
    half = v.type.count // 2
    even, odd = (ir.Constant(ir.VectorType(I32, half), list(range(at, 2 * half, 2))) for at in (0, 1))
    return b.add(b.shuffle_vector(v, v, even), b.shuffle_vector(v, v, odd))


class _Sums:
    """Sums of products of unsigned weights, 4 of each of 16 outputs in a step, with signed inputs; exact.

    vectors: integer registers of one row of 16 outputs, each of `kind`.
    """

    vectors, kind = 1, VI

    def begin(self, b: Builder, x: Value) -> Value:
        """The 4 inputs at an address, as `step` wants them."""
        return spread(b, read(I32)(b, x))

    def step(self, b: Builder, sums: list[Value], weights: Value, inputs: Value) -> list[Value]:
        return [call_named(b, "llvm.x86.avx512.vpdpbusd.512", VI, sums[0], b.bitcast(weights, VI), inputs)]

    def end(self, b: Builder, sums: list[Value]) -> Value:
        """16 sums of 32 bits."""
        return sums[0]


class _HalfSums(_Sums):
    """AVX-VNNI: 8 outputs a register."""

    vectors, kind = 2, ir.VectorType(I32, 8)

    def begin(self, b: Builder, x: Value) -> Value:
        return spread(b, read(I32)(b, x), 8)

    def step(self, b: Builder, sums: list[Value], weights: Value, inputs: Value) -> list[Value]:
        parts = (b.bitcast(_part(b, weights, at, 32), self.kind) for at in (0, 32))
        name = "llvm.x86.avx512.vpdpbusd.256"
        return [call_named(b, name, self.kind, total, part, inputs) for total, part in zip(sums, parts)]

    def end(self, b: Builder, sums: list[Value]) -> Value:
        return _beside(b, sums)


class _PairSums(_Sums):
    """AVX2, 8 bits: products of 16-bit numbers, which cannot saturate; 4 outputs a register, 2 sums each."""

    vectors, kind = 4, ir.VectorType(I32, 8)

    def begin(self, b: Builder, x: Value) -> Value:
        return b.bitcast(spread(b, read(I64)(b, x), 4), ir.VectorType(ir.IntType(16), 16))

    def step(self, b: Builder, sums: list[Value], weights: Value, inputs: Value) -> list[Value]:
        wide = (b.zext(_part(b, weights, at, 16), inputs.type) for at in range(0, 64, 16))
        name = "llvm.x86.avx2.pmadd.wd"
        return [b.add(total, call_named(b, name, self.kind, part, inputs)) for total, part in zip(sums, wide)]

    def end(self, b: Builder, sums: list[Value]) -> Value:
        return _pairs(b, _beside(b, sums))


class _ShortSums(_Sums):
    """AVX2, 4 bits: 16-bit sums of pairs; 8 steps are at most 8 * 2 * 15 * 127 = 30,480."""

    vectors, kind = 2, ir.VectorType(ir.IntType(16), 16)

    def begin(self, b: Builder, x: Value) -> Value:
        return b.bitcast(spread(b, read(I32)(b, x), 8), _bytes(32))

    def step(self, b: Builder, sums: list[Value], weights: Value, inputs: Value) -> list[Value]:
        parts = (_part(b, weights, at, 32) for at in (0, 32))
        name = "llvm.x86.avx2.pmadd.ub.sw"
        return [
            b.add(total, call_named(b, name, self.kind, part, inputs)) for total, part in zip(sums, parts)
        ]

    def end(self, b: Builder, sums: list[Value]) -> Value:
        ones = ir.Constant(self.kind, [1] * 16)
        wide = ir.VectorType(I32, 8)
        return _beside(b, [call_named(b, "llvm.x86.avx2.pmadd.wd", wide, part, ones) for part in sums])


class _AnySums(_Sums):
    """Without instructions for it."""

    def begin(self, b: Builder, x: Value) -> Value:
        return b.bitcast(spread(b, read(I32)(b, x)), _bytes(64))

    def step(self, b: Builder, sums: list[Value], weights: Value, inputs: Value) -> list[Value]:
        wide = ir.VectorType(I32, 64)
        products = b.mul(b.zext(weights, wide), b.sext(inputs, wide))
        return [b.add(sums[0], _pairs(b, _pairs(b, products)))]


def _sums(bits: int) -> _Sums:
    if INSTRUCTIONS == "avx2":
        return _PairSums() if bits == 8 else _ShortSums()
    return {"avx512vnni": _Sums, "avxvnni": _HalfSums}.get(INSTRUCTIONS, _AnySums)()


def _variables(b: Builder, kind: ir.Type, count: int) -> list[Value]:
    """Zeros, which a loop may change; LLVM keeps them in registers."""
    return [cgutils.alloca_once_value(b, ir.Constant(kind, None)) for _ in range(count)]


def _offset(b: Builder, at: Value, *terms: tuple[Value | int, Value | int]) -> Value:
    for count, stride in terms:
        at = b.add(
            at,
            b.mul(
                I64(count) if isinstance(count, int) else count,
                I64(stride) if isinstance(stride, int) else stride,
            ),
        )
    return at


class _Accumulators:
    """Integer sums of rows x blocks of 16 outputs, in variables."""

    def __init__(self, b: Builder, sums: _Sums, rows: int, blocks: int) -> None:
        self.b, self.sums, self.rows, self.blocks = b, sums, rows, blocks
        self.held = [[_variables(b, sums.kind, sums.vectors) for _ in range(blocks)] for _ in range(rows)]

    def clear(self) -> None:
        for variable in (one for row in self.held for block in row for one in block):
            self.b.store(ir.Constant(self.sums.kind, None), variable)

    def step(self, weights: list[Value], inputs: list[Value]) -> None:
        """weights: 64 bytes of each block; inputs: addresses of each row's."""
        b = self.b
        for row, x in zip(self.held, inputs):
            spread = self.sums.begin(b, x)
            for block, weight in zip(row, weights):
                before = [b.load(one) for one in block]
                for one, after in zip(block, self.sums.step(b, before, weight, spread)):
                    b.store(after, one)

    def floats(self, row: int, block: int, less: Value | None = None) -> Value:
        b = self.b
        whole = self.sums.end(b, [b.load(one) for one in self.held[row][block]])
        return b.sitofp(whole if less is None else b.sub(whole, spread(b, less)), VF)


def _tile8(rows: int, blocks: int) -> Callable[..., Value]:
    """out = prior + scale of w * sum over groups of (sum of (w + 128) x - 128 sum of x) * scale of x."""
    wide = 2 if WIDE_INPUTS else 1

    def emit(
        b: Builder,
        x: Value,
        x_stride: Value,
        w: Value,
        inputs: Value,
        scales: Value,
        sums: Value,
        factors: Value,
        prior: Value,
        prior_stride: Value,
        out: Value,
        out_stride: Value,
    ) -> None:
        held = _Accumulators(b, _sums(8), rows, blocks)
        outs = [[_variables(b, VF, 1)[0] for _ in range(blocks)] for _ in range(rows)]
        groups = b.udiv(inputs, I64(GROUP))
        with cgutils.for_range(b, groups) as loop:
            held.clear()
            starts = [
                _offset(b, w, (inputs, LANES * block), (loop.index, LANES * GROUP)) for block in range(blocks)
            ]
            xs = [_offset(b, x, (loop.index, GROUP * wide), (x_stride, row)) for row in range(rows)]
            for step in range(GROUP // 4):
                weights = [read(_bytes(64))(b, _offset(b, at, (step, BYTES))) for at in starts]
                held.step(weights, [_offset(b, at, (step, 4 * wide)) for at in xs])
            for row in range(rows):
                of_row = ((loop.index, 4), (groups, 4 * row))
                scale = spread(b, read(F32)(b, _offset(b, scales, *of_row)))
                less = b.shl(read(I32)(b, _offset(b, sums, *of_row)), I32(7))
                for block in range(blocks):
                    one = outs[row][block]
                    b.store(fma_of(b, held.floats(row, block, less), scale, b.load(one)), one)
        for row in range(rows):
            for block in range(blocks):
                factor = read(VF)(b, _offset(b, factors, (block, BYTES)))
                before = read(VF)(b, _offset(b, prior, (prior_stride, row), (block, BYTES)))
                at = _offset(b, out, (out_stride, row), (block, BYTES))
                write(VF)(b, at, b.fadd(before, b.fmul(b.load(outs[row][block]), factor)))

    return emit


def _tile4(rows: int, blocks: int) -> Callable[..., Value]:
    """out = prior + sum over groups of (sum of w x) * scale of w * scale of x + least w * sum of x."""

    def emit(
        b: Builder,
        x: Value,
        x_stride: Value,
        w: Value,
        inputs: Value,
        scales: Value,
        sums: Value,
        factors: Value,
        prior: Value,
        prior_stride: Value,
        out: Value,
        out_stride: Value,
    ) -> None:
        held = _Accumulators(b, _sums(4), rows, blocks)
        outs = [[_variables(b, VF, 1)[0] for _ in range(blocks)] for _ in range(rows)]
        groups = b.lshr(inputs, I64(5))
        apart = b.mul(groups, I64(GROUP_BYTES))  # bytes from a block to the next
        low = ir.Constant(_bytes(64), [15] * 64)
        halves = ir.VectorType(ir.IntType(16), 32)
        shift = ir.Constant(halves, [4] * 32)
        half_floats = ir.VectorType(ir.HalfType(), LANES)
        with cgutils.for_range(b, groups) as loop:
            held.clear()
            group = _offset(b, w, (loop.index, GROUP_BYTES))
            starts = [_offset(b, group, (apart, block)) for block in range(blocks)]
            xs = [_offset(b, x, (loop.index, GROUP), (x_stride, row)) for row in range(rows)]
            for step in range(4):
                pairs = [read(_bytes(64))(b, _offset(b, at, (step, BYTES))) for at in starts]
                held.step([b.and_(pair, low) for pair in pairs], [_offset(b, at, (step, 8)) for at in xs])
                upper = [b.bitcast(b.lshr(b.bitcast(pair, halves), shift), _bytes(64)) for pair in pairs]
                held.step(
                    [b.and_(pair, low) for pair in upper], [_offset(b, at, (8 * step + 4, 1)) for at in xs]
                )
            for block, at in enumerate(starts):
                factor, floor = (
                    b.fpext(read(half_floats)(b, _offset(b, at, (4 * BYTES + 2 * LANES * which, 1))), VF)
                    for which in (0, 1)
                )
                for row in range(rows):
                    of_row = ((loop.index, 4), (groups, 4 * row))
                    scale = spread(b, read(F32)(b, _offset(b, scales, *of_row)))
                    sum_ = spread(b, read(F32)(b, _offset(b, sums, *of_row)))
                    found = fma_of(
                        b, held.floats(row, block), b.fmul(factor, scale), b.load(outs[row][block])
                    )
                    b.store(fma_of(b, floor, sum_, found), outs[row][block])
        for row in range(rows):
            for block in range(blocks):
                before = read(VF)(b, _offset(b, prior, (prior_stride, row), (block, BYTES)))
                at = _offset(b, out, (out_stride, row), (block, BYTES))
                write(VF)(b, at, b.fadd(before, b.load(outs[row][block])))

    return emit


# Rows and blocks of 16 outputs that are multiplied at once, as many as there are registers for.
TALL = {"avx512vnni": 4, "avxvnni": 4, "avx2": 2, "any": 2}[INSTRUCTIONS]
TALL_BLOCKS = 2 if INSTRUCTIONS == "avx512vnni" else 1
WIDE_BLOCKS = 4 if INSTRUCTIONS == "avx512vnni" else 2
_TILE = (INT,) * 11
one8, wide8, tall8 = (
    operation(types.void, _TILE, _tile8(*each)) for each in ((1, 1), (1, WIDE_BLOCKS), (TALL, TALL_BLOCKS))
)
one4, wide4, tall4 = (
    operation(types.void, _TILE, _tile4(*each)) for each in ((1, 1), (1, WIDE_BLOCKS), (TALL, TALL_BLOCKS))
)


def _scores(vectors: int) -> Callable[..., Value]:
    """Of one query with keys at base + each of `count` offsets; added to what is there where `further`."""

    def emit(
        b: Builder, q: Value, base: Value, offsets: Value, count: Value, out: Value, further: Value
    ) -> None:
        query = [read(VF)(b, _offset(b, q, (part, BYTES))) for part in range(vectors)]
        more = b.icmp_signed("!=", further, I64(0))
        with cgutils.for_range(b, count) as loop:
            key = b.add(base, read(I64)(b, _offset(b, offsets, (loop.index, 8))))
            keys = [read(VF)(b, _offset(b, key, (part, BYTES))) for part in range(vectors)]
            found = b.fmul(query[0], keys[0])
            for part in range(1, vectors):
                found = fma_of(b, query[part], keys[part], found)
            at = _offset(b, out, (loop.index, 4))
            before = b.select(more, read(F32)(b, at), F32(0.0))
            write(F32)(b, at, b.fadd(before, total_of(b, found)))

    return emit


def _values(vectors: int) -> Callable[..., Value]:
    """Add values at base + offsets, weighted, to what is at `out`."""

    def emit(b: Builder, weights: Value, base: Value, offsets: Value, count: Value, out: Value) -> None:
        sums = _variables(b, VF, vectors)
        for part, one in enumerate(sums):
            b.store(read(VF)(b, _offset(b, out, (part, BYTES))), one)
        with cgutils.for_range(b, count) as loop:
            value = b.add(base, read(I64)(b, _offset(b, offsets, (loop.index, 8))))
            weight = spread(b, read(F32)(b, _offset(b, weights, (loop.index, 4))))
            for part, one in enumerate(sums):
                b.store(fma_of(b, weight, read(VF)(b, _offset(b, value, (part, BYTES))), b.load(one)), one)
        for part, one in enumerate(sums):
            write(VF)(b, _offset(b, out, (part, BYTES)), b.load(one))

    return emit


score4, score1 = (operation(types.void, (INT,) * 6, _scores(parts)) for parts in (4, 1))
value4, value1 = (operation(types.void, (INT,) * 5, _values(parts)) for parts in (4, 1))
