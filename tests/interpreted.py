"""Triton's interpreter, without what it does anew at every call.

It puts its own functions in the place of some hundreds of `triton.language` before each launch, and again at
every call of a function within a kernel, where they stand already: nearly half of the time of small kernels.
Of the rest, a third went into what is the same each time: a table of all kinds of numbers for each value, and
shapes of values, wrapped and checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from triton import language
from triton.runtime import interpreter

PATCH, KIND = interpreter._patch_lang, interpreter._get_np_dtype
ADDRESSES, NUMBERS = np.dtype(np.uint64), dict[str, Any]()  # of each kind, by its name
Langs = frozenset[str]  # of triton's modules those that a kernel's module knows
MODULES = (language, language.core)
LANGS: dict[Callable[..., Any], Langs] = {}
PUT: dict[Langs, list[tuple[object, str, object]]] = {}  # what is put where, for modules that know these
STANDING = set[Langs]()  # during a launch


def langs_of(function: Callable[..., Any]) -> Langs:
    if function not in LANGS:
        known = {id(value) for value in function.__globals__.values()}
        LANGS[function] = frozenset(one.__name__ for one in MODULES if id(one) in known)
    return LANGS[function]


def patch_once(function: Callable[..., Any]) -> Any:
    """As `_patch_lang`: a scope whose `restore` ends the launch; that of a call within one is never asked."""
    langs, nested = langs_of(function), bool(STANDING)
    if any(langs <= one for one in STANDING):
        return interpreter._LangPatchScope()
    if nested or langs not in PUT:
        scope = PATCH(function)
        if not nested:
            PUT[langs] = [(where, name, getattr(where, name)) for where, name, _ in scope._changes]
    else:
        scope = interpreter._LangPatchScope()
        for put in PUT[langs]:
            scope.set_attr(*put)
    STANDING.add(langs)
    if not nested:
        scope.restore = lambda: (STANDING.clear(), type(scope).restore(scope))  # type: ignore[method-assign]
    return scope


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


@cache
def checked(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    """Of a block: its shape as Triton has it, how many numbers it holds, and the shape's name."""
    block = Block(language.int8, [*shape])
    return block.shape, block.numel, f"{block.shape}"


@cache
def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Of a value: how many numbers it has and its shape, both known when a kernel is compiled."""
    value = Value(None, Block(language.int8, [*shape]) if shape else language.int8)
    return value.numel, value.shape


def make_block(block: Any, element: Any, shape: Any) -> None:
    """As `block_type.__init__`."""
    block.element_ty = element
    block.shape, block.numel, written = checked(tuple(language.core._unwrap_shape(shape)))
    block.name = f"<{written}, {element}>"


def make_value(value: Any, handle: object, kind: Any) -> None:
    """As `tensor.__init__`."""
    value.handle, value.type, value.dtype = handle, kind, kind.scalar
    value.numel, value.shape = constants(tuple(kind.shape.values) if kind.is_block() else ())


def install() -> None:
    interpreter._patch_lang = patch_once
    interpreter._patch_attr = patch_attribute
    interpreter._get_np_dtype = number_kind
    language.block_type.__init__ = make_block
    language.tensor.__init__ = make_value
