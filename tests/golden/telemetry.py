"""Names of log events and spans, with their fields, as the product's source has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.golden.surface import sources

LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
ATTRIBUTES = ("specsot.", "gen_ai.")
SPEAKS = re.compile(r"\blog\.|\bspecsot\.tracing\b")  # of a file: it logs, or opens spans


def telemetry() -> dict[str, Any]:
    texts = (file.read_text(encoding="utf-8") for file in sources())
    modules = [Module.of(text) for text in texts if SPEAKS.search(text)]
    traced = [module for module in modules if module.traces]
    return {
        "log events": sorted({line for module in modules for line in module.log_events()}),
        "spans and their events": sorted({name for module in traced for name in module.span_names()}),
        "span attributes": sorted({name for module in traced for name in module.span_attributes()}),
    }


@dataclass(frozen=True, slots=True)
class Module:
    """nodes: all of them. values: of its own names, what stands for a text: constants, and what its functions
    return.
    """

    nodes: tuple[ast.AST, ...]
    values: dict[str, ast.expr]

    @classmethod
    def of(cls, text: str) -> Module:
        tree = ast.parse(text)
        return cls(tuple(ast.walk(tree)), dict(_named(tree)))

    @property
    def traces(self) -> bool:
        """It opens spans: it imports the tracer."""
        imports = [node for node in self.nodes if isinstance(node, ast.ImportFrom)]
        return any(each.module == "specsot.tracing" for each in imports)

    def log_events(self) -> Iterator[str]:
        for call in self._calls(LEVELS):
            if _receiver(call) == "log":
                fields = sorted(word.arg or "..." for word in call.keywords)
                level = call.func.attr if isinstance(call.func, ast.Attribute) else ""
                yield from (
                    f"{level} {name!r}: {', '.join(fields) or '-'}" for name in self.texts(call.args[0])
                )

    def span_names(self) -> Iterator[str]:
        for call in self._calls(("begin", "_begin", "note")):
            if call.args:
                yield from self.texts(call.args[0])

    def span_attributes(self) -> Iterator[str]:
        """Those that are written out, and those that stand as keywords, to be prefixed."""
        for node in self.nodes:
            match node:
                case ast.Constant(str(text)) if text.startswith(ATTRIBUTES) and text not in ATTRIBUTES:
                    yield text
                case _:
                    pass
        for call in self._calls(("_begin", "_end")):
            yield from (f"specsot.{word.arg}" for word in call.keywords)

    def texts(self, value: ast.expr) -> Iterator[str]:
        """What an expression may be: a text, one of two, or one with holes."""
        match value:
            case ast.Constant(str(text)):
                yield text
            case ast.JoinedStr(parts):
                holes = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
                yield "".join(holes)
            case ast.IfExp(body=one, orelse=other):
                yield from self.texts(one)
                yield from self.texts(other)
            case ast.Name(name) | ast.Call(func=ast.Name(name)) if name in self.values:
                yield from self.texts(self.values[name])
            case _:
                pass

    def _calls(self, names: tuple[str, ...]) -> Iterator[ast.Call]:
        for node in self.nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in names
            ):
                yield node


def _receiver(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return call.func.value.id if isinstance(call.func.value, ast.Name) else ""


def _named(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                yield name, value
            case ast.Assign(targets=[ast.Tuple(names)], value=ast.Tuple(values)):
                yield from (
                    (name.id, value) for name, value in zip(names, values) if isinstance(name, ast.Name)
                )
            case ast.FunctionDef(name=name, body=[*_, ast.Return(value=ast.expr() as value)]):
                yield name, value
            case _:
                pass
