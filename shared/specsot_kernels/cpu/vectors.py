"""Defines what the CPU kernels are written in: functions that are compiled together, vectors of 16 floats,
exact integer dot products, calls of addresses.

Every operation is spelled out as LLVM code, so that a row's result depends neither on other rows nor on an
optimizer's choices. Vectors have 16 lanes on every machine; if registers are shorter, LLVM uses several.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from inspect import Parameter, Signature
from platform import machine
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import intrinsic, models, register_model

from specsot_kernels.cpu.layout import BYTES, INSTRUCTIONS, LANES, LARGEST_HALF

F32, I32, I64, I8 = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
# A vector of floats.
VF = ir.VectorType(F32, LANES)
# A vector of 32-bit integers.
VI = ir.VectorType(I32, LANES)
# A vector of fp16 numbers.
VH = ir.VectorType(ir.HalfType(), LANES)
# The LLVM builder into which code is emitted. llvmlite has no types for it.
Builder = Any
# A value of emitted LLVM code. llvmlite has no types for it.
Value = Any


class _PartLibrary(JITCodeLibrary):
    """The code of a part of a kernel, not optimised and not compiled, to be linked into the functions that
    call the part.

    Numba's own libraries optimise and compile every function together with all functions that it calls. The
    code of a tile, which is at the end of a chain of ten calls, would be compiled ten times.
    """

    def _optimize_functions(self, ll_module: Any) -> None:
        """Optimise nothing, but set the layout of data, because LLVM links only modules of the same layout.

        ll_module: code that is added to this library.
        """
        ll_module.data_layout = self._codegen._data_layout  # noqa: SLF001

    def _optimize_final_module(self) -> None:
        """Do nothing: the kernel is optimised as a whole."""

    def _finalize_final_module(self) -> None:
        """Mark the library as complete, so that callers can link it. The code is not compiled."""
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: nothing is compiled that Python could call.

        name: name of the function.
        """
        return 0

    @property
    def codegen(self) -> Any:
        """This library, in place of Numba's code generator. Numba asks it only to store the address of the
        function's Python environment (`set_env`), which a part does not use.
        """
        return self

    def set_env(self, env_name: str, env: Any) -> None:
        """Do nothing; see `codegen`.

        env_name: name of the variable for the environment's address.
        env: the environment.
        """


class _PartCompiler(Compiler):
    """Numba's compiler for a part of a kernel, which leaves out what `_PartLibrary` does not need."""

    def define_pipelines(self) -> Any:
        """Return Numba's own steps of compilation, after giving them a `_PartLibrary` to write code into."""
        state = self.state
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()


# Options of `numba.njit` for parts of a kernel: no code for calls by Python, and no check for a division by
# zero, which would raise an exception, because kernels never divide by zero.
_PART: dict[str, Any] = {
    "pipeline_class": _PartCompiler, "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
    "error_model": "numpy",
}  # fmt: skip
# Decorates a function that only kernels and other parts call; a call by Python would end the process.
part = numba.njit(**_PART)
# Decorates a part whose code is repeated wherever it is called.
inlined_part = numba.njit(forceinline=True, **_PART)


class _Floats(types.Type):
    """Numba's type of a vector of 16 fp32 numbers."""

    def __init__(self) -> None:
        super().__init__("f32x16")


# Numba's type of a vector.
floats = _Floats()


@register_model(_Floats)
class _FloatsModel(models.PrimitiveModel):
    """How Numba holds such a vector: as an LLVM vector."""

    def __init__(self, dmm: Any, fe_type: Any) -> None:
        """
        dmm: Numba's data model manager.
        fe_type: Numba's type of the vector.
        """
        super().__init__(dmm, fe_type, VF)


def operation(result: Any, arguments: tuple[Any, ...], emit: Callable[..., Value]) -> Any:
    """Return a Numba intrinsic of these types, whose code `emit(builder, *values)` writes.

    result: Numba's type of the result.
    arguments: Numba's types of the arguments.
    emit: writes the code into an LLVM builder, and returns the LLVM value of the result, or None for void.
    """
    signature = result(*arguments)

    def code(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        """Emit the code of a call; Numba calls this.

        context: Numba's target context.
        builder: the LLVM builder.
        signature: Numba's types of the call.
        values: LLVM values of the arguments.
        """
        value = emit(builder, *values)
        return context.get_dummy_value() if value is None else value

    def typed(typing: Any, *given: Any) -> Any:
        """Return the types of a call, and what emits its code; Numba calls this.

        typing: Numba's typing context.
        given: Numba's types of the arguments, which are not looked at.
        """
        return signature, code

    # Numba reads the number of arguments from the signature.
    names = ("typing", *(f"a{number}" for number in range(len(arguments))))
    typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])  # type: ignore[attr-defined]
    return intrinsic(typed)


def read(kind: ir.Type, align: int = 1) -> Callable[..., Value]:
    """Return an emitter of a load: (builder, address) -> LLVM value.

    kind: LLVM type that is loaded.
    align: bytes that the address is known to be a multiple of.
    """
    return lambda b, at: b.load(b.inttoptr(at, kind.as_pointer()), align=align)


def write(kind: ir.Type) -> Callable[..., Value]:
    """Return an emitter of a store: (builder, address, value) -> None.

    kind: LLVM type that is stored.
    """
    return lambda b, at, value: b.store(value, b.inttoptr(at, kind.as_pointer()), align=1) and None


def spread(b: Builder, value: Value, lanes: int = LANES) -> Value:
    """Emit a vector with one number in all lanes.

    b: the LLVM builder into which code is emitted.
    value: the number, an LLVM value.
    lanes: number of lanes.
    """
    kind = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def variables(b: Builder, kind: ir.Type, count: int) -> list[Value]:
    """Emit variables that begin at zero and that a loop may change; LLVM keeps them in registers.

    b: the LLVM builder into which code is emitted.
    kind: LLVM type of each variable.
    count: number of variables.
    """
    return [cgutils.alloca_once_value(b, ir.Constant(kind, None)) for _ in range(count)]


def address(b: Builder, at: Value, *terms: tuple[Value | int, Value | int]) -> Value:
    """Emit the address at + count * stride + ... over all terms (count, stride).

    b: the LLVM builder into which code is emitted.
    at: the address to begin with.
    terms: pairs (count, stride in bytes), as LLVM values or numbers.
    """
    for count, stride in terms:
        at = b.add(
            at,
            b.mul(
                I64(count) if isinstance(count, int) else count,
                I64(stride) if isinstance(stride, int) else stride,
            ),
        )
    return at


def call_named(b: Builder, name: str, result: ir.Type, *values: Value, **flags: Any) -> Value:
    """Emit a call of a function or LLVM intrinsic by name.

    b: the LLVM builder into which code is emitted.
    name: name of the function.
    result: LLVM type of the result.
    values: LLVM values of the arguments.
    flags: options of the call, such as fastmath.
    """
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), values, **flags)


def fma_of(b: Builder, x: Value, y: Value, z: Value) -> Value:
    """Emit x * y + z with one rounding.

    b: the LLVM builder into which code is emitted.
    x: a vector of floats.
    y: what `x` is multiplied by.
    z: what is added to the product.
    """
    return call_named(b, "llvm.fma.v16f32", VF, x, y, z)


# Arguments of LLVM's prefetch: the second-level and the first-level cache. Few loads can be in flight to the
# first level (some 8 GB/s were measured).
SECOND = 2
NEAREST = 3


def fetch_line(b: Builder, at: Value, near: int = NEAREST) -> None:
    """Emit a prefetch of a cache line.

    The processor looks ahead by a limited number of instructions. If a line serves several rows, many
    instructions lie between two lines, so that without a prefetch the memory would idle while products are
    computed.

    b: the LLVM builder into which code is emitted.
    at: an address within the line.
    near: the cache level: SECOND or NEAREST.
    """
    line = b.inttoptr(at, I8.as_pointer())
    call_named(b, "llvm.prefetch.p0", ir.VoidType(), line, I32(0), I32(near), I32(1))


def _constant(lane: Any) -> ir.Constant:
    """Return a constant vector with one number in all lanes.

    lane: the number; a vector of ints for an int, of floats for a float.
    """
    return ir.Constant(VI if isinstance(lane, int) else VF, [lane] * LANES)


def _swap(b: Builder, v: Value) -> Value:
    """Emit the vector with neighbouring lanes swapped: 0 and 1, 2 and 3, and so on.

    b: the LLVM builder into which code is emitted.
    v: a vector of floats.
    """
    order = [lane ^ 1 for lane in range(LANES)]
    return b.shuffle_vector(v, v, ir.Constant(VI, order))


def _largest(b: Builder, v: Value) -> Value:
    """Emit the largest lane.

    b: the LLVM builder into which code is emitted.
    v: a vector of floats.
    """
    # Without the flag, LLVM compares lane by lane.
    return call_named(b, "llvm.vector.reduce.fmax.v16f32", F32, v, fastmath=("nnan",))


def _peak(b: Builder, *parts: Value) -> Value:
    """Emit the largest absolute value of all lanes; a number that is not finite counts as larger than every
    finite one.

    b: the LLVM builder into which code is emitted.
    parts: vectors of floats.
    """
    sizes = (b.and_(b.bitcast(one, VI), _constant(0x7FFFFFFF)) for one in parts)
    larger = reduce(lambda x, y: call_named(b, "llvm.umax.v16i32", VI, x, y), sizes)
    return b.bitcast(call_named(b, "llvm.vector.reduce.umax.v16i32", I32, larger), F32)


def total_of(b: Builder, v: Value) -> Value:
    """Emit the sum of all lanes.

    b: the LLVM builder into which code is emitted.
    v: a vector of floats.
    """
    return call_named(b, "llvm.vector.reduce.fadd.v16f32", F32, F32(-0.0), v, fastmath=("reassoc",))


def _whole(b: Builder, v: Value) -> Value:
    """Emit the lanes rounded to integers, halves to the even one.

    b: the LLVM builder into which code is emitted.
    v: a vector of floats.
    """
    return b.fptosi(call_named(b, "llvm.roundeven.v16f32", VF, v), VI)


def _power(b: Builder, v: Value) -> Value:
    """Emit 2 ** v, for whole numbers between -126 and 127.

    b: the LLVM builder into which code is emitted.
    v: a vector of floats.
    """
    raised = b.add(b.fptosi(v, VI), _constant(127))
    return b.bitcast(b.shl(raised, _constant(23)), VF)


def _put_whole(bits: int) -> Callable[..., Value]:
    """Return an emitter that rounds 32 floats to `bits`-bit integers, stores them, and returns their sum.

    Halves are rounded to the even integer. The sum is an i32.

    bits: bits of an integer: 8 or 16.
    """
    kind = ir.VectorType(ir.IntType(bits), LANES)

    def emit(b: Builder, at: Value, low: Value, high: Value) -> Value:
        """Emit the rounding and the store, and return the sum, an i32.

        b: the LLVM builder into which code is emitted.
        at: address at which the integers are stored.
        low: a vector of floats, which become the first 16 integers.
        high: a vector of floats, which become the last 16 integers.
        """
        wholes = [_whole(b, one) for one in (low, high)]
        for place, whole in zip((0, LANES * bits // 8), wholes):
            write(kind)(b, b.add(at, I64(place)), b.trunc(whole, kind))
        return call_named(b, "llvm.vector.reduce.add.v16i32", I32, b.add(*wholes))

    return emit


def _put_half(b: Builder, at: Value, x: Value) -> None:
    """Emit a store as fp16.

    Finite numbers beyond fp16's range become its largest; others stay not finite, so that they are noticed.
    Nothing is returned.

    b: the LLVM builder into which code is emitted.
    at: address at which 16 numbers are stored.
    x: a vector of floats.
    """
    high, low = _constant(LARGEST_HALF), _constant(-LARGEST_HALF)
    cut = b.select(b.fcmp_ordered(">", x, high), high, x)
    cut = b.select(b.fcmp_ordered("<", cut, low), low, cut)
    # x - x is NaN if x is not finite.
    nothing = b.fsub(x, x)
    write(VH)(b, at, b.fptrunc(b.select(b.fcmp_unordered("uno", nothing, nothing), x, cut), VH))


# Numba's type of addresses and sizes.
INT = types.int64
# Numba's type of a single float.
FLOAT = types.float32
# Numba's type of a 32-bit integer.
SHORT = types.int32
# The vector of floats at an address.
load = operation(floats, (INT,), read(VF))
# Stores a vector of floats at an address.
store = operation(types.void, (INT, floats), write(VF))
# Stores a vector of floats at an address as fp16; see `_put_half`.
store_half = operation(types.void, (INT, floats), _put_half)
# The float at an address.
get = operation(FLOAT, (INT,), read(F32))
# Stores a float at an address.
put = operation(types.void, (INT, FLOAT), write(F32))
# Stores a 32-bit integer at an address.
put_int = operation(types.void, (INT, SHORT), write(I32))
# The 64-bit integer at an address.
get_long = operation(INT, (INT,), read(I64))
# Stores a 64-bit integer at an address.
put_long = operation(types.void, (INT, INT), write(I64))
# A vector with a float in all lanes.
splat = operation(floats, (FLOAT,), lambda b, x: spread(b, x))
# The sum of two vectors, lane by lane.
add = operation(floats, (floats, floats), lambda b, x, y: b.fadd(x, y))
# The difference of two vectors, lane by lane.
sub = operation(floats, (floats, floats), lambda b, x, y: b.fsub(x, y))
# The product of two vectors, lane by lane.
mul = operation(floats, (floats, floats), lambda b, x, y: b.fmul(x, y))
# The quotient of two vectors, lane by lane.
div = operation(floats, (floats, floats), lambda b, x, y: b.fdiv(x, y))
# x * y + z with one rounding, lane by lane.
fma = operation(floats, (floats, floats, floats), fma_of)
# The smaller number of two vectors, lane by lane.
minimum = operation(floats, (floats, floats), lambda b, x, y: call_named(b, "llvm.minnum.v16f32", VF, x, y))
# The larger number of two vectors, lane by lane.
maximum = operation(floats, (floats, floats), lambda b, x, y: call_named(b, "llvm.maxnum.v16f32", VF, x, y))
# The lanes rounded to whole numbers, halves to the even one.
rounded = operation(floats, (floats,), lambda b, x: call_named(b, "llvm.roundeven.v16f32", VF, x))
# 2 to the power of each lane; see `_power`.
power = operation(floats, (floats,), _power)
# The vector with lanes 0 and 1, 2 and 3, and so on swapped.
swap = operation(floats, (floats,), _swap)
# The largest lane of a vector.
largest = operation(FLOAT, (floats,), _largest)
# The largest absolute value in four vectors; see `_peak`.
peak = operation(FLOAT, (floats,) * 4, _peak)
# The sum of all lanes of a vector.
total = operation(FLOAT, (floats,), total_of)
# Stores two vectors at an address, rounded to 8-bit integers, and returns their sum.
put_bytes = operation(SHORT, (INT, floats, floats), _put_whole(8))
# Stores two vectors at an address, rounded to 16-bit integers, and returns their sum.
put_shorts = operation(SHORT, (INT, floats, floats), _put_whole(16))


def _call_int(b: Builder, at: Value) -> Value:
    """Emit a call of a C function without arguments that returns an int.

    b: the LLVM builder into which code is emitted.
    at: address of the function.
    """
    return b.call(b.inttoptr(at, ir.FunctionType(I32, []).as_pointer()), [])


# Polls. How often a thread polls at a barrier before it sleeps: some 15 us where it was measured. Untuned.
LOOKS = 300
# Linux's futex system call, and its operations within a process.
FUTEX = 98 if machine() == "aarch64" else 202
WAIT = 128
WAKE = 129


def _meet(b: Builder, at: Value, threads: Value, system: Value) -> None:
    """Emit a barrier: wait until all threads have arrived.

    A waiting thread soon sleeps, which gives its core to a thread that has none. OpenMP's own barrier polls
    30 times as often, and with other processes running, that took most of a step. The barrier can be used
    again at once. Its counters must be zero before the first use.

    b: the LLVM builder into which code is emitted.
    at: address of the barrier's BARRIER_BYTES.
    threads: number of threads.
    system: address of C's `syscall`.
    """
    came, met, asleep = (b.inttoptr(b.add(at, I64(line * BYTES)), I32.as_pointer()) for line in range(3))
    call = b.inttoptr(system, ir.FunctionType(I64, [I64] * 7).as_pointer())

    def look(place: Value) -> Value:
        """Emit an atomic load of a counter.

        place: pointer to the counter.
        """
        return b.load_atomic(place, "seq_cst", 4)

    def add(place: Value, number: int) -> Value:
        """Emit an atomic addition to a counter, and return its value before.

        place: pointer to the counter.
        number: what is added.
        """
        return b.atomic_rmw("add", place, I32(number), "seq_cst")

    def futex(what: int, number: Value) -> None:
        """Emit a futex system call on the counter of completed barriers.

        what: the operation, WAIT or WAKE.
        number: the value that WAIT expects, or how many threads WAKE wakes.
        """
        b.call(call, [I64(FUTEX), b.ptrtoint(met, I64), I64(what), number, *[I64(0)] * 3])

    before = look(met)
    last = b.icmp_signed("==", b.sext(add(came, 1), I64), b.sub(threads, I64(1)))
    with b.if_else(last) as (then, otherwise):
        with then:
            b.store_atomic(I32(0), came, "seq_cst", 4)
            add(met, 1)
            with b.if_then(b.icmp_signed("!=", look(asleep), I32(0))):
                futex(WAKE, I64(2**31 - 1))
        with otherwise:
            looks = cgutils.alloca_once(b, I32)
            b.store(I32(0), looks)
            waiting, apart, spin, sleep, over = (b.append_basic_block() for _ in range(5))
            b.branch(waiting)
            b.position_at_end(waiting)
            b.cbranch(b.icmp_signed("==", look(met), before), apart, over)
            b.position_at_end(apart)
            count = b.load(looks)
            b.store(b.add(count, I32(1)), looks)
            b.cbranch(b.icmp_signed("<", count, I32(LOOKS)), spin, sleep)
            b.position_at_end(spin)
            if INSTRUCTIONS != "any":
                call_named(b, "llvm.x86.sse2.pause", ir.VoidType())
            b.branch(waiting)
            b.position_at_end(sleep)
            add(asleep, 1)
            futex(WAIT, b.sext(before, I64))
            add(asleep, -1)
            b.branch(waiting)
            b.position_at_end(over)


# Waits at a barrier until all threads have arrived; see `_meet`.
meet = operation(types.void, (INT, INT, INT), _meet)
# Calls a C function without arguments that returns an int.
call_int = operation(SHORT, (INT,), _call_int)


@inlined_part
def exp(x: Any) -> Any:
    """Return e ** x within 2 units in the last place; x is clamped to -87 .. 88.

    x: a vector of floats.
    """
    x = maximum(minimum(x, splat(88.0)), splat(-87.0))
    n = rounded(mul(x, splat(1.44269504)))
    r = fma(n, splat(-0.693359375), x)
    r = fma(n, splat(2.12194440e-4), r)
    p = fma(splat(1.9875691500e-4), r, splat(1.3981999507e-3))
    p = fma(p, r, splat(8.3334519073e-3))
    p = fma(p, r, splat(4.1665795894e-2))
    p = fma(p, r, splat(1.6666665459e-1))
    p = fma(p, r, splat(5.0000001201e-1))
    p = add(fma(mul(p, r), r, r), splat(1.0))
    return mul(p, power(n))
