"""Reads one file into scopes as Python has them: what is bound where, and where each name stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(eq=False)
class Scope:
    """One namespace: what is bound in it, and where names of it stand."""

    node: ast.AST
    parent: Scope | None
    bound: set[str] = field(default_factory=set[str])
    imports: dict[str, str] = field(default_factory=dict[str, str])  # local name -> what it stands for
    outside: set[str] = field(default_factory=set[str])  # global or nonlocal here
    renames: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    def home(self, name: str) -> Scope | None:
        """The scope that binds a name used here."""
        scope: Scope | None = self
        while scope:
            if name in scope.bound and name not in scope.outside and (scope is self or not scope.is_class):
                return scope
            scope = scope.parent
        return None


@dataclass(frozen=True)
class Use:
    name: str
    scope: Scope
    start: int  # offset of the token; -1 inside an f-string
    within: ast.JoinedStr | None


class Reader(ast.NodeVisitor):
    """Reads a file into scopes, uses of names, attribute chains, imports and calls."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.tree = ast.parse(text)
        self.top = Scope(self.tree, None)
        self.scope = self.top
        self.within: ast.JoinedStr | None = None
        self.uses: list[Use] = []
        self.chains: list[tuple[ast.Attribute, Scope, ast.JoinedStr | None]] = []
        self.calls: list[tuple[ast.Call, Scope, ast.JoinedStr | None]] = []
        self.patterns: list[ast.MatchClass] = []
        self.imports: list[tuple[ast.Import | ast.ImportFrom, Scope]] = []
        self.alone: set[int] = set()
        self.visit(self.tree)

    def at(self, line: int, column: int) -> int:
        """A position of the ast (in bytes) as an offset in the text."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt | ast.alias | ast.arg | ast.keyword) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno or 0, node.end_col_offset or 0)

    def use(self, name: str, start: int, *, bind: bool = False, scope: Scope | None = None) -> None:
        scope = scope or self.scope
        if bind:
            scope.bound.add(name)
        self.uses.append(Use(name, scope, -1 if self.within else start, self.within))

    def use_in(self, node: ast.stmt | ast.expr, name: str, *, bind: bool) -> None:
        """A name that has no node of its own: found by its word within the node."""
        start, end = self.span(node)
        if found := re.compile(rf"\b{re.escape(name)}\b").search(self.text, start, end):
            self.use(name, found.start(), bind=bind)

    def visit(self, node: ast.AST) -> None:
        for body in (getattr(node, part, None) for part in ("body", "orelse", "finalbody")):
            if isinstance(body, list) and len(body) == 1:  # pyright: ignore
                self.alone.add(id(body[0]))  # pyright: ignore
        super().visit(node)

    def inside(self, node: ast.AST, parts: Iterable[ast.AST]) -> None:
        self.scope = Scope(node, self.scope)
        for part in parts:
            self.visit(part)
        self.scope = self.scope.parent or self.top

    def visit_Name(self, node: ast.Name) -> None:
        self.use(node.id, self.span(node)[0], bind=isinstance(node.ctx, ast.Store | ast.Del))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        scope = self.scope
        while isinstance(scope.node, COMPREHENSIONS) and scope.parent:
            scope = scope.parent
        self.use(node.target.id, self.span(node.target)[0], bind=True, scope=scope)
        self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._define(node)
        self._signature(node.args)
        for part in (*node.decorator_list, *([node.returns] if node.returns else [])):
            self.visit(part)
        self.inside(node, [*arguments(node.args), *node.body])

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._signature(node.args)
        self.inside(node, [*arguments(node.args), node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._define(node)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self.inside(node, node.body)

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        start = self.span(node)[0]
        found = re.compile(r"(?:async\s+)?(?:def|class)\s+").match(self.text, start)
        self.use(node.name, found.end() if found else start, bind=True)

    def _signature(self, args: ast.arguments) -> None:
        for part in (*args.defaults, *args.kw_defaults, *(arg.annotation for arg in arguments(args))):
            if part:
                self.visit(part)

    def visit_arg(self, node: ast.arg) -> None:
        self.use(node.arg, self.span(node)[0], bind=True)

    def visit_ListComp(self, node: COMPREHENSIONS) -> None:
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self.inside(node, [*node.generators, *parts])

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name and node.type:
            found = re.compile(r"\s*\)?\s*as\s+").match(self.text, self.span(node.type)[1])
            self.use(node.name, found.end() if found else -1, bind=True)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name:
            end = self.at(node.end_lineno, node.end_col_offset)
            self.use(node.name, end - len(node.name), bind=True)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self.use(node.name, self.at(node.end_lineno, node.end_col_offset) - len(node.name), bind=True)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.patterns.append(node)
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self.scope.outside |= set(node.names)
        for name in node.names:
            self.use_in(node, name, bind=False)

    visit_Nonlocal = visit_Global

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.imports.append((node, self.scope))
        for alias in node.names:
            local = alias.asname or (
                alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name
            )
            self.scope.bound.add(local)
            whole = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            self.scope.imports[local] = whole if alias.asname or isinstance(node, ast.ImportFrom) else local

    visit_ImportFrom = visit_Import

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.chains.append((node, self.scope, self.within))
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.calls.append((node, self.scope, self.within))
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        before, self.within = self.within, self.within or node
        self.generic_visit(node)
        self.within = before


def arguments(args: ast.arguments) -> list[ast.arg]:
    more = [arg for arg in (args.vararg, args.kwarg) if arg]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *more]
