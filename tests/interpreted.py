"""Makes Triton's interpreter faster, without changing its results: `install` replaces functions of it.

Before each launch, the interpreter replaces some hundred functions of `triton.language`, and again at every
call of a function within a kernel, although they are replaced already. That took nearly half of the time of
small kernels. Here they are replaced once per launch. Of the remaining time

* a third went into results that never change: the numpy type of each value, and checked shapes. They are
  cached.
* a further fifth went into checks for integer overflow, which nothing reads. They are switched off.
* a fourth went into comparing the types of operands, and into blocks of constants. Both have a short path for
  the usual cases; all other cases call Triton's own function.
* of addresses, half went into numbers of 32 bits that become numbers of 64 bits, and into casts to the type
  that a value has. They have short paths, too.

The replaced functions are private to Triton, so a new version of Triton may break this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from triton import language
from triton.language import core
from triton.runtime import interpreter

PATCH, KIND = interpreter._patch_lang, interpreter._get_np_dtype
SEMANTIC: Any = interpreter.interpreter_semantic
MADE_ALIKE, BROADCAST = SEMANTIC.binary_op_type_checking_impl, SEMANTIC.broadcast_impl_value
CAST, SAME_TYPE = SEMANTIC.cast, core.dtype.__eq__
ADDRESSES, NUMBERS = (
    np.dtype(np.uint64),
    dict[str, Any](),
)  # The numpy type of pointers, and of other types by name.
PATCHES: list[
    tuple[object, str, object]
] = []  # (module or class, attribute, replacement) of `triton.language`.
UNWRAP, BARE = core._unwrap_if_constexpr, {int, float, bool, type(None), language.tensor}
BLOCKS: dict[
    tuple[str, tuple[int, ...]], Any
] = {}  # Types of blocks, by the name of their elements and their shape.
SIMPLE = {
    (int, "int32"),
    (int, "int64"),
    (int, "fp32"),
    (float, "fp32"),
}  # Pairs (type of a Python number, Triton type) that need no check but the range.


class PatchState:
    """Whether the functions of `triton.language` are replaced now.

    active: True during a launch.
    """

    active = False


def patch_once(function: Callable[..., Any]) -> Any:
    """Like `_patch_lang`: put the interpreter's functions into `triton.language`, once for each launch, and
    return a scope whose `restore` removes them. A call within a launch changes nothing.

    Both modules of triton that a kernel may know are patched, so that no call of triton's own functions
    within a kernel has to patch the other one.
    """
    scope = interpreter._LangPatchScope()
    if PatchState.active:
        return scope
    if not PATCHES:
        # The globals of this function name both modules.
        changes = PATCH(patch_once)._changes
        PATCHES.extend((where, name, getattr(where, name)) for where, name, _ in changes)
        scope._changes = changes
    else:
        for patch in PATCHES:
            scope.set_attr(*patch)
    PatchState.active = True
    scope.restore = lambda: end_launch(scope)  # type: ignore[method-assign]
    return scope


def end_launch(scope: Any) -> None:
    PatchState.active = False
    type(scope).restore(scope)


class Block(language.block_type):
    __init__ = language.block_type.__init__  # Triton's own, called once for each shape.


class Value(language.tensor):
    __init__ = language.tensor.__init__


def patch_attribute(where: object, name: str, member: Any, builder: object, scope: Any) -> None:
    """Like `_patch_attr`, without copying the arguments of each call."""
    inner = getattr(
        member, "__wrapped__", member
    )  # The wrapper by `builtin` only checks that `_semantic` is given.

    def called(*given: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*given, **named)

    scope.set_attr(where, name, called)


def number_kind(kind: Any) -> Any:
    """Like `_get_np_dtype`: return the numpy type of a Triton type."""
    if isinstance(kind, language.block_type):
        kind = kind.element_ty
    return ADDRESSES if isinstance(kind, language.pointer_type) else kind_named(kind.name, kind)


def kind_named(name: str, kind: Any) -> Any:
    if name not in NUMBERS:
        NUMBERS[name] = KIND(kind)
    return NUMBERS[name]


class Shape(NamedTuple):
    """A shape in Triton's form, its number of elements, its name, and the first two as constexpr."""

    wrapped: Any
    numel: int
    name: str
    constants: tuple[Any, Any]


@cache
def shape_of(shape: tuple[int, ...]) -> Shape:
    block = Block(language.int8, [*shape])
    value = Value(None, block)
    return Shape(block.shape, block.numel, f"{block.shape}", (value.numel, value.shape))


@cache
def of_one() -> tuple[Any, Any]:
    """Return the constants `numel` and `shape` of a scalar."""
    value = Value(None, language.int8)
    return value.numel, value.shape


def make_block(block: Any, element: Any, shape: Any) -> None:
    """Like `block_type.__init__`, with a cached shape."""
    block.element_ty = element
    block.known = shape_of(tuple(core._unwrap_shape(shape)))
    block.shape, block.numel, written, _ = block.known
    block.name = f"<{written}, {element}>"


def make_value(value: Any, handle: object, kind: Any) -> None:
    """Like `tensor.__init__`, with cached constants."""
    value.handle, value.type, value.dtype = handle, kind, kind.scalar
    value.numel, value.shape = kind.known.constants if kind.is_block() else of_one()


def with_element(block: Any, element: Any) -> Any:
    """Like `block_type.with_element_ty`, cached."""
    return block_of(element.name, tuple(block.shape.values), element)


def block_of(name: str, shape: tuple[int, ...], element: Any) -> Any:
    if (name, shape) not in BLOCKS:
        BLOCKS[name, shape] = language.block_type(element, shape)
    return BLOCKS[name, shape]


@cache
def number_in_blocks(number: float, kind: Any, shape: tuple[int, ...]) -> Any:
    """Return a kernel's constant as a read-only block, or as a scalar if the shape is empty."""
    one = SEMANTIC.scalar_constant(number, kind)
    value = in_blocks(one, shape, block_of(kind.name, shape, kind)) if shape else one
    value.handle.data.flags.writeable = False
    return value


def in_blocks(value: Any, shape: tuple[int, ...], block: Any) -> Any:
    data = np.full(shape, value.handle.data, number_kind(value.dtype))
    return language.tensor(interpreter.TensorHandle(data, value.dtype), block)


def made_alike(one: Any, other: Any, *how: Any, **more: Any) -> tuple[Any, Any]:
    """Like `binary_op_type_checking_impl`: return both operands with one type and shape.

    Short paths serve operands of the same type, signed integers of which one has 32 bits and the other one
    64, and a Python number that fits the other operand's type, or that is added to a pointer.

    how: whether each operand may be a pointer, whether types are checked, whether it is a division.
    """
    if how[3:] or more:
        return MADE_ALIKE(one, other, *how, **more)
    if isinstance(one, language.tensor) and isinstance(other, language.tensor):
        pointed = one.dtype.is_ptr() and how[:1] == (True,) and other.dtype.is_int()
        if pointed or (one.dtype is other.dtype and not one.dtype.is_ptr()):
            return broadcast(one, other)
        if one.dtype is language.int64 and other.dtype is language.int32:
            return broadcast(one, lengthened(other))
        if one.dtype is language.int32 and other.dtype is language.int64:
            return broadcast(lengthened(one), other)
    elif not how[2:]:
        pointed = how == (True, True) and isinstance(one, language.tensor) and one.dtype.is_ptr()
        if pointed and becomes(other, language.int32):
            return one, number_in_blocks(other, language.int32, shape_in(one))
        if isinstance(one, language.tensor) and becomes(other, one.dtype):
            return one, number_in_blocks(other, one.dtype, shape_in(one))
        if isinstance(other, language.tensor) and becomes(one, other.dtype):
            return number_in_blocks(one, other.dtype, shape_in(other)), other
    return MADE_ALIKE(one, other, *how, **more)


def lengthened(value: Any) -> Any:
    """Return integers of 32 bits with 64 bits."""
    kind = language.int64
    handle = interpreter.TensorHandle(value.handle.data.astype(np.int64), kind)
    return language.tensor(handle, with_element(value.type, kind) if value.type.is_block() else kind)


def cast(value: Any, kind: Any, *how: Any, **more: Any) -> Any:
    """Like `cast`, with a short path for values that are of the type already."""
    return value if value.dtype is kind.scalar else CAST(value, kind, *how, **more)


def same_type(one: Any, other: object) -> bool:
    """Like `dtype.__eq__`, with a short path for one type twice."""
    return one is other or SAME_TYPE(one, other)


def becomes(number: Any, kind: Any) -> bool:
    return (type(number), kind.name) in SIMPLE and -(1 << 31) <= number < 1 << 31


def shape_in(value: Any) -> tuple[int, ...]:
    return tuple(value.type.shape.values) if value.type.is_block() else ()


def broadcast(one: Any, other: Any) -> tuple[Any, Any]:
    """Like `broadcast_impl_value`, with short paths for equal shapes and for a block and a scalar."""
    if one.shape is other.shape:
        return one, other
    if not other.type.is_block():
        return one, in_blocks(other, shape_in(one), with_element(one.type, other.dtype))
    if not one.type.is_block():
        return in_blocks(one, shape_in(other), with_element(other.type, one.dtype)), other
    return BROADCAST(one, other)


def fits(numbers: Any, kind: Any) -> bool:
    """Like `_validate_np_data_size`: return whether the array's elements fit the Triton type."""
    max_bits = 64 if type(kind) is language.pointer_type else kind.primitive_bitwidth
    return numbers.itemsize * 8 <= max_bits or numbers.itemsize == 1


def unwrapped(one: Any) -> Any:
    """Like `_unwrap_if_constexpr`, with a short path for types that are never wrapped."""
    return one if type(one) in BARE else UNWRAP(one)


def install() -> None:
    interpreter._patch_lang = patch_once
    interpreter._patch_attr = patch_attribute
    interpreter._get_np_dtype = number_kind
    interpreter._validate_np_data_size = fits
    core._unwrap_if_constexpr = unwrapped
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    SEMANTIC.binary_op_type_checking_impl, SEMANTIC.broadcast_impl_value = made_alike, broadcast
    SEMANTIC.cast = cast
    core.dtype.__eq__ = same_type
    language.block_type.with_element_ty = with_element
    language.block_type.__init__ = make_block
    language.tensor.__init__ = make_value
