"""Triton's interpreter, without what it does anew at every call.

It puts its own functions in the place of some hundreds of `triton.language` before each launch, and again at
every call of a function within a kernel, where they stand already: nearly half of the time of small kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter

PATCH = interpreter._patch_lang
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


def install() -> None:
    interpreter._patch_lang = patch_once
