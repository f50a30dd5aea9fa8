"""Triton's interpreter, without what it does anew at every call.

It puts its own functions in the place of some hundreds of `triton.language` before each launch, and again at
every call of a function within a kernel, where they stand already: nearly half of the time of small kernels.
Of the rest, a third went into what is the same each time: a table of all kinds of numbers for each value, and
shapes of values, wrapped and checked. Of what was left then, a fifth into sums that would tell an overflow to
nobody, and a fourth into whether two operands are alike, and into blocks of numbers that a kernel names.
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
ADDRESSES, NUMBERS = np.dtype(np.uint64), dict[str, Any]()  # of each kind, by its name
PATCHES: list[tuple[object, str, object]] = []  # Attributes of triton.language, and what is put there.
UNWRAP, BARE = core._unwrap_if_constexpr, {int, float, bool, type(None), language.tensor}
BLOCKS: dict[tuple[str, tuple[int, ...]], Any] = {}  # types of values, by an element's name and a shape
SIMPLE = {
    (int, "int32"),
    (int, "int64"),
    (int, "fp32"),
    (float, "fp32"),
}  # numbers that become what these are


class PatchState:
    """Whether the interpreter's functions stand in `triton.language` now.

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
    __init__ = language.block_type.__init__  # Triton's own


class Value(language.tensor):
    __init__ = language.tensor.__init__


def patch_attribute(where: object, name: str, member: Any, builder: object, scope: Any) -> None:
    """As `_patch_attr`, without a copy of what a call is given."""
    inner = getattr(member, "__wrapped__", member)  # what `builtin` wraps only sees to `_semantic`

    def called(*given: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*given, **named)

    scope.set_attr(where, name, called)


def number_kind(kind: Any) -> Any:
    """As `_get_np_dtype`."""
    if isinstance(kind, language.block_type):
        kind = kind.element_ty
    return ADDRESSES if isinstance(kind, language.pointer_type) else kind_named(kind.name, kind)


def kind_named(name: str, kind: Any) -> Any:
    if name not in NUMBERS:
        NUMBERS[name] = KIND(kind)
    return NUMBERS[name]


class Shape(NamedTuple):
    """Of blocks: as Triton has it, how many numbers it holds, its name, and the first two as constants."""

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
    """The constants of a value that is no block."""
    value = Value(None, language.int8)
    return value.numel, value.shape


def make_block(block: Any, element: Any, shape: Any) -> None:
    """As `block_type.__init__`."""
    block.element_ty = element
    block.known = shape_of(tuple(core._unwrap_shape(shape)))
    block.shape, block.numel, written, _ = block.known
    block.name = f"<{written}, {element}>"


def make_value(value: Any, handle: object, kind: Any) -> None:
    """As `tensor.__init__`."""
    value.handle, value.type, value.dtype = handle, kind, kind.scalar
    value.numel, value.shape = kind.known.constants if kind.is_block() else of_one()


def with_element(block: Any, element: Any) -> Any:
    """As `block_type.with_element_ty`."""
    return block_of(element.name, tuple(block.shape.values), element)


def block_of(name: str, shape: tuple[int, ...], element: Any) -> Any:
    if (name, shape) not in BLOCKS:
        BLOCKS[name, shape] = language.block_type(element, shape)
    return BLOCKS[name, shape]


@cache
def number_in_blocks(number: float, kind: Any, shape: tuple[int, ...]) -> Any:
    """What a kernel names, as a block of this kind, or a value. Nobody may write there."""
    one = SEMANTIC.scalar_constant(number, kind)
    value = in_blocks(one, shape, block_of(kind.name, shape, kind)) if shape else one
    value.handle.data.flags.writeable = False
    return value


def in_blocks(value: Any, shape: tuple[int, ...], block: Any) -> Any:
    data = np.full(shape, value.handle.data, number_kind(value.dtype))
    return language.tensor(interpreter.TensorHandle(data, value.dtype), block)


def made_alike(one: Any, other: Any, *how: Any, **more: Any) -> tuple[Any, Any]:
    """As `binary_op_type_checking_impl`, where nothing is to be done, or one is a number of the other's kind.

    how: whether each may be a pointer; whether kinds matter; whether it is a division.
    """
    if how[3:] or more:
        return MADE_ALIKE(one, other, *how, **more)
    if isinstance(one, language.tensor) and isinstance(other, language.tensor):
        pointed = one.dtype.is_ptr() and how[:1] == (True,) and other.dtype.is_int()
        if pointed or (one.dtype is other.dtype and not one.dtype.is_ptr()):
            return broadcast(one, other)
    elif not how[2:]:
        if isinstance(one, language.tensor) and becomes(other, one.dtype):
            return one, number_in_blocks(other, one.dtype, shape_in(one))
        if isinstance(other, language.tensor) and becomes(one, other.dtype):
            return number_in_blocks(one, other.dtype, shape_in(other)), other
    return MADE_ALIKE(one, other, *how, **more)


def becomes(number: Any, kind: Any) -> bool:
    return (type(number), kind.name) in SIMPLE and -(1 << 31) <= number < 1 << 31


def shape_in(value: Any) -> tuple[int, ...]:
    return tuple(value.type.shape.values) if value.type.is_block() else ()


def broadcast(one: Any, other: Any) -> tuple[Any, Any]:
    """As `broadcast_impl_value`, where at most one is no block."""
    if one.shape is other.shape:
        return one, other
    if not other.type.is_block():
        return one, in_blocks(other, shape_in(one), with_element(one.type, other.dtype))
    if not one.type.is_block():
        return in_blocks(one, shape_in(other), with_element(other.type, one.dtype)), other
    return BROADCAST(one, other)


def fits(numbers: Any, kind: Any) -> bool:
    """As `_validate_np_data_size`."""
    most = 64 if type(kind) is language.pointer_type else kind.primitive_bitwidth
    return numbers.itemsize * 8 <= most or numbers.itemsize == 1


def unwrapped(one: Any) -> Any:
    """As `_unwrap_if_constexpr`."""
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
    language.block_type.with_element_ty = with_element
    language.block_type.__init__ = make_block
    language.tensor.__init__ = make_value
