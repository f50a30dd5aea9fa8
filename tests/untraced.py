"""Transformers without what no test asks it for, and what takes long to compile and load: torch's compiler,
its tensors over several machines, torchao, and sympy, which the first two import.

Of the compiler it wants marks for functions that must not be looked into. What else is asked of it loads it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

COMPILER = "torch._dynamo"
MASKS = f"{COMPILER}._trace_wrapped_higher_order_op"  # for masks that are made by `torch.compile`
MARKS = "allow_in_graph", "assume_constant_result", "disable", "graph_break", "mark_static_address"
ABSENT = "is_torch_distributed_available", "is_torchao_available"


def unmarked(function: Callable[..., Any] | None = None, *given: object, **named: object) -> Any:
    """A decorator, with arguments or without: the function itself."""
    return unmarked if function is None else function


class OptimizedModule:
    """What nothing is."""


class Unloaded(ModuleType):
    """Stands for a module until more is asked of it than it has here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (self.__name__, name) != (COMPILER, "__path__"):  # asked of all modules
            raise AttributeError(name)
        for each in (COMPILER, MASKS):
            if isinstance(sys.modules.get(each), Unloaded):
                del sys.modules[each]
        return getattr(import_module(self.__name__), name)


HERE: dict[str, dict[str, Any]] = {
    COMPILER: {
        **dict.fromkeys(MARKS, unmarked),
        "eval_frame": SimpleNamespace(OptimizedModule=OptimizedModule),
    },
    MASKS: {"TransformGetItemToIndex": None},
}


class Absence(MetaPathFinder):
    """Once Transformers can look for libraries, and before it has: these two are not there."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        there = [sys.modules.get(name) for name in ("transformers.utils.import_utils", "transformers.utils")]
        if all(hasattr(each, name) for each in there for name in ABSENT):
            for each in there:
                vars(each).update(dict.fromkeys(ABSENT, lambda *_: False))
            sys.meta_path.remove(self)


def install() -> None:
    """Before anything imports Transformers."""
    for name, has in HERE.items():
        if name not in sys.modules:
            sys.modules[name] = Unloaded(name)
            vars(sys.modules[name]).update(has)
    sys.meta_path.insert(0, Absence())
