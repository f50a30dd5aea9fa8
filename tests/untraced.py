"""Lets Transformers be imported without libraries that are slow to import and that no test needs.

These are torch's compiler (torch._dynamo), torch.distributed, torchao, and sympy, which the first two import.
Transformers only decorates functions with marks of the compiler, such as `allow_in_graph`, so a stand-in
module has decorators that do nothing. The first access to any other attribute loads the real module, so a
test that compiles still works. Transformers is made to believe that torch.distributed and torchao are
missing. If a new version of Transformers uses more of the compiler at import, the tests become slower, not
wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

COMPILER = "torch._dynamo"
# Transformers imports one name of this module, for masks under `torch.compile`.
MASKS = f"{COMPILER}._trace_wrapped_higher_order_op"
MARKS = "allow_in_graph", "assume_constant_result", "disable", "graph_break", "mark_static_address"
ABSENT = "is_torch_distributed_available", "is_torchao_available"


def unmarked(function: Callable[..., Any] | None = None, *given: object, **named: object) -> Any:
    """Return the function unchanged, whether the decorator is used with arguments or without."""
    return unmarked if function is None else function


class OptimizedModule:
    """Stands for the class of compiled modules, of which no module is an instance."""


class Unloaded(ModuleType):
    """Stands for a module until an attribute is read that it lacks; then loads the real module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (self.__name__, name) != (
            COMPILER,
            "__path__",
        ):  # Python reads these of every module.
            raise AttributeError(name)
        for each in (COMPILER, MASKS):
            if isinstance(sys.modules.get(each), Unloaded):
                del sys.modules[each]
        return getattr(import_module(self.__name__), name)


STAND_INS: dict[str, dict[str, Any]] = {
    COMPILER: {
        **dict.fromkeys(MARKS, unmarked),
        "eval_frame": SimpleNamespace(OptimizedModule=OptimizedModule),
    },
    MASKS: {"TransformGetItemToIndex": None},
}


class Absence(MetaPathFinder):
    """Makes Transformers believe that the libraries of ABSENT are missing.

    Transformers checks for libraries by functions of `transformers.utils.import_utils`. They are replaced by
    the first import after that module is loaded, before Transformers calls them.
    """

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        modules = [
            sys.modules.get(name) for name in ("transformers.utils.import_utils", "transformers.utils")
        ]
        if all(hasattr(each, name) for each in modules for name in ABSENT):
            for each in modules:
                vars(each).update(dict.fromkeys(ABSENT, lambda *_: False))
            sys.meta_path.remove(self)


def install() -> None:
    """Install the stand-ins. Must be called before Transformers is imported."""
    for name, has in STAND_INS.items():
        if name not in sys.modules:
            sys.modules[name] = Unloaded(name)
            vars(sys.modules[name]).update(has)
    sys.meta_path.insert(0, Absence())
