"""Rewrites one file's references to what is renamed or moved: by positions, so format and comments stay.

Scopes are followed as Python does: a parameter or local of the same name is not touched, and a new name that
something else already has here is refused (an import then keeps its old name by `as`).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch

from house import House, module_of
from scopes import Reader, Scope, Use

LATE = "  # noqa: E402"  # behind an import that something must come before
BY_STRING = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller", "object"}


@dataclass
class Plan:
    """What changes at once. `late`: the definitions have moved already, only references are left."""

    house: House
    modules: dict[str, str] = field(default_factory=dict[str, str])
    names: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    attributes: dict[str, tuple[str, set[str]]] = field(default_factory=dict[str, tuple[str, set[str]]])
    late: bool = False
    keep_strings: tuple[str, ...] = ()
    refused: list[str] = field(default_factory=list[str])
    noted: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.known = set(self.house.modules) | (set(self.modules) if self.late else set())
        self.known |= {name.rpartition(".")[0] for name in self.known}
        olds = sorted((old for old in self.modules if "." in old), key=len, reverse=True)
        named = {module for module, _ in self.names} | set(self._importers())
        words = "|".join(re.escape(old) for old in sorted({*olds, *named}, key=len, reverse=True))
        self.dotted = re.compile(rf"(?<![\w./-])({words})(?:([.:])(\w+))?(?!\w)") if words else None

    def _importers(self) -> Iterator[str]:
        """Modules that import a renamed name: a test may patch it there."""
        for module in self.house.modules if self.names else ():
            if any(origin in self.names for origin in self.house.tops(module).values()):
                yield module

    def module(self, old: str) -> str:
        return self.modules.get(old, old)

    def name(self, module: str, name: str) -> str:
        if (module, name) in self.names:
            return self.names[module, name]
        return self.names.get(self.house.origin(module, name), name)

    def is_name(self, module: str, name: str) -> bool:
        """Whether `from module import name` means a name of the module, not a module below it."""
        full = f"{module}.{name}"
        return full not in self.known or (name in self.house.tops(module) and full not in self.house.modules)

    def in_text(self, text: str) -> str:
        """Dotted names in a string, a comment or a document."""

        def one(found: re.Match[str]) -> str:
            module, mark, name = found[1], found[2], found[3]
            if mark and f"{module}.{name}" in self.known and f"{module}.{name}" not in self.modules:
                return found[0]
            return self.module(module) + (mark + self.name(module, name) if mark else "")

        return self.dotted.sub(one, text) if self.dotted else text


class Rewriter:
    """One file under a plan; `text()` is what it becomes."""

    def __init__(self, plan: Plan, path: str, text: str) -> None:
        self.plan, self.path = plan, path
        self.old = module_of(path) or ""
        self.new = plan.module(self.old)
        self.read = Reader(text)
        self.edits: dict[int, tuple[int, str]] = {}
        self.in_fstrings: dict[ast.JoinedStr, set[tuple[str, str]]] = {}
        self.keep_as: set[tuple[int, str]] = (
            set()
        )  # (scope, local name) of imports that keep their name by `as`
        self.flat: dict[tuple[int, str], str] = {}  # (scope, local name) of a module that becomes this one

    def text(self) -> str:
        self._wish()
        self._settle()
        self._names()
        self._chains()
        self._calls()
        self._imports()
        self._strings()
        return self._edited()

    # What each scope's names should become

    def _wish(self) -> None:
        plan, read = self.plan, self.read
        for name in read.top.bound - set(read.top.imports):
            if (new := plan.name(self.old, name)) != name:
                read.top.renames[name] = new
        for node, scope in read.imports:
            for alias in node.names:
                self._wish_import(node, alias, scope)
        if plan.late:
            self._wish_unbound()
        for use in read.uses:
            if use.scope.is_class and use.name in plan.attributes and use.name in use.scope.bound:
                new, classes = plan.attributes[use.name]
                name = use.scope.node.name if isinstance(use.scope.node, ast.ClassDef) else ""
                if not classes or name in classes:
                    use.scope.renames[use.name] = new

    def _wish_import(self, node: ast.Import | ast.ImportFrom, alias: ast.alias, scope: Scope) -> None:
        plan = self.plan
        if isinstance(node, ast.Import) or node.level or not node.module:
            if isinstance(node, ast.Import) and alias.asname and self._becomes_this(alias.name):
                self.flat[id(scope), alias.asname] = alias.name
            return
        local, full = alias.asname or alias.name, f"{node.module}.{alias.name}"
        if not plan.is_name(node.module, alias.name):
            new = plan.module(full)
            if self._becomes_this(full):
                self.flat[id(scope), local] = full
            elif not alias.asname and (stem := new.rpartition(".")[2]) != local:
                scope.renames[local] = stem
        else:
            name = plan.name(node.module, alias.name)
            if self._becomes_this(node.module):
                if name != local:
                    scope.renames[local] = name
            elif not alias.asname and name != local:
                scope.renames[local] = name

    def _becomes_this(self, module: str) -> bool:
        """A module that is merged into what this file becomes."""
        return bool(self.old) and module != self.old and self.plan.module(module) == self.new

    def _wish_unbound(self) -> None:
        """Late: a name that a branch used by an import which main has already rewritten."""
        read, used = self.read, {use.name for use in self.read.uses if use.scope.home(use.name) is None}
        for (module, old), new in self.plan.names.items():
            home = read.top.imports.get(new)
            here = new in read.top.bound and home is None and self.old in (module, self.plan.module(module))
            if old in used and (here or (home and home.rpartition(".")[0] in self._places(module))):
                read.top.renames[old] = new
        for old, new in self.plan.modules.items():
            stem, now = old.rpartition(".")[2], new.rpartition(".")[2]
            if stem in used and stem != now and read.top.imports.get(now) == new:
                read.top.renames[stem] = now

    def _places(self, module: str) -> set[str]:
        return {module, self.plan.module(module)}

    # Which of these wishes would mean something else here

    def _settle(self) -> None:
        for scope in {id(scope): scope for scope in self._scopes()}.values():
            for old, new in list(scope.renames.items()):
                if clash := self._clash(scope, old, new):
                    del scope.renames[old]
                    if old in scope.imports and not self._own_name(scope.imports[old]):
                        self.keep_as.add((id(scope), old))
                        self.plan.noted.append(f"{self.path}: {old} stays by `as`: {new} is {clash} here")
                    else:
                        self.plan.refused.append(f"{self.path}: {old} -> {new}: {new} is {clash} here")

    def _own_name(self, whole: str) -> bool:
        return self._becomes_this(whole.rpartition(".")[0])

    def _scopes(self) -> list[Scope]:
        return [
            self.read.top,
            *(use.scope for use in self.read.uses),
            *(scope for _, scope in self.read.imports),
        ]

    def _clash(self, scope: Scope, old: str, new: str) -> str | None:
        if new in scope.bound and new not in scope.renames and not self._same(scope, old, new):
            return "bound"
        for other, name in scope.renames.items():
            if other != old and name == new and not self._same(scope, old, other):
                return f"what {other} becomes too"
        for use in self.read.uses:
            if use.name == old and self._home(use) is scope:
                between: Scope | None = use.scope
                while between and between is not scope:
                    if new in between.bound and new not in between.renames and not between.is_class:
                        return f"a local of {getattr(between.node, 'name', 'a comprehension')}"
                    between = between.parent
            elif (
                use.name == new
                and not scope.is_class
                and new not in scope.bound
                and self._below(use.scope, scope)
            ):
                home = use.scope.home(new)
                if home is None and new in scope.imports.values():
                    return "used"
        return None

    def _same(self, scope: Scope, one: str, other: str) -> bool:
        """Two imported names that stand for the same thing after the plan."""
        wholes = [self._whole(scope.imports.get(name)) for name in (one, other)]
        if wholes[0] is not None and wholes[0] == wholes[1]:
            return True
        return self.plan.late and one not in scope.bound

    def _whole(self, whole: str | None) -> str | None:
        if whole is None:
            return None
        module, _, name = whole.rpartition(".")
        if not self.plan.is_name(module, name):
            return self.plan.module(whole)
        return f"{self.plan.module(module)}.{self.plan.name(module, name)}"

    def _below(self, scope: Scope | None, top: Scope) -> bool:
        while scope and scope is not top:
            scope = scope.parent
        return scope is top

    def _home(self, use: Use) -> Scope | None:
        home = use.scope.home(use.name)
        return home or (self.read.top if self.plan.late and use.name in self.read.top.renames else None)

    # The edits

    def edit(self, start: int, end: int, new: str) -> None:
        self.edits[start] = (end, new)

    def _names(self) -> None:
        for use in self.read.uses:
            home = self._home(use)
            if home and use.name in home.renames:
                self._token(use.start, use.name, home.renames[use.name], use.within)

    def _token(self, start: int, old: str, new: str, within: ast.JoinedStr | None) -> None:
        if within:
            self.in_fstrings.setdefault(within, set()).add((old, new))
        else:
            self.edit(start, start + len(old), new)

    def _chains(self) -> None:
        for node, scope, within in self.read.chains:
            end = self.read.span(node)[1] if not within else 0
            root, names = unrolled(node)
            module, depth = self._module_of(root, names, scope)
            if module is not None and depth == len(names) - 1 and root:
                self._module_name(node, root, module, scope, within)
            elif module is None and node.attr in self.plan.attributes and not self._foreign(root, scope):
                new = self.plan.attributes[node.attr][0]
                self._token(end - len(node.attr), node.attr, new, within)

    def _foreign(self, root: ast.Name | None, scope: Scope) -> bool:
        """An attribute of a module that is not ours."""
        if root is None or not (home := scope.home(root.id)) or root.id not in home.imports:
            return False
        return home.imports[root.id].partition(".")[0] not in {
            name.partition(".")[0] for name in self.plan.known
        }

    def _module_of(self, root: ast.Name | None, names: list[str], scope: Scope) -> tuple[str | None, int]:
        """The module that a chain starts with, and how many of its attributes belong to the module's name."""
        if root is None or not (home := scope.home(root.id)) or root.id not in home.imports:
            return None, 0
        module, depth = home.imports[root.id], 0
        while depth < len(names) and f"{module}.{names[depth]}" in self.plan.known:
            module, depth = f"{module}.{names[depth]}", depth + 1
        return (module, depth) if module in self.plan.known else (None, 0)

    def _module_name(
        self, node: ast.Attribute, root: ast.Name, module: str, scope: Scope, within: ast.JoinedStr | None
    ) -> None:
        """`module.Name`: the name, and the module where it is spelled out."""
        name = self.plan.name(module, node.attr)
        home = scope.home(root.id)
        key = (id(home), root.id)
        if within:
            if name != node.attr:
                self.in_fstrings.setdefault(within, set()).add(
                    (f"{root.id}.{node.attr}", f"{root.id}.{name}")
                )
            return
        start, end = self.read.span(node)
        if key in self.flat or (self._becomes_this(module) and not isinstance(node.value, ast.Name)):
            if scope.home(name) not in (None, self.read.top) or (
                name in self.read.top.bound and not self._defines(module, name)
            ):
                self.plan.refused.append(f"{self.path}: {module}.{name} cannot be just {name} here")
            self.edit(start, end, name)
            return
        if name != node.attr:
            self.edit(end - len(node.attr), end, name)
        if isinstance(node.value, ast.Attribute) and self.plan.module(module) != module:
            first, last = self.read.span(node.value)
            self.edit(first, last, self.plan.module(module))

    def _defines(self, module: str, name: str) -> bool:
        return self.read.top.imports.get(name, "") == f"{module}.{name}"

    def _calls(self) -> None:
        """Keywords of a class's fields, and attribute names given as strings."""
        for node, scope, within in self.read.calls:
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            for keyword in node.keywords:
                if keyword.arg in self.plan.attributes and not within and self._takes(called, keyword.arg):
                    new = self.plan.attributes[keyword.arg][0]
                    self.edit(self.read.span(keyword)[0], self.read.span(keyword)[0] + len(keyword.arg), new)
            if called in BY_STRING and len(node.args) > 1 and not within:
                self._by_string(node.args[0], node.args[1], scope)
        for pattern in self.read.patterns:
            for old, value in zip(pattern.kwd_attrs, pattern.kwd_patterns):
                if old in self.plan.attributes:
                    start = self.read.text.rindex(old, 0, self.read.at(value.lineno, value.col_offset))
                    self.edit(start, start + len(old), self.plan.attributes[old][0])

    def _takes(self, called: str, keyword: str) -> bool:
        fields = self.plan.attributes[keyword][1]
        return called in ("replace", "cls") or called in fields or (not fields and called[:1].isupper())

    def _by_string(self, owner: ast.expr, what: ast.expr, scope: Scope) -> None:
        if not (isinstance(what, ast.Constant) and isinstance(what.value, str)):
            return
        root, names = unrolled(owner)
        module, depth = self._module_of(root, names, scope)
        new = self.plan.attributes.get(what.value, (what.value,))[0]
        if module and depth == len(names):
            new = self.plan.name(module, what.value)
        if new != what.value:
            start, end = self.read.span(what)
            self.edit(start, end, self.read.text[start:end].replace(what.value, new))

    def _imports(self) -> None:
        for node, scope in self.read.imports:
            pieces = [self._piece(node, alias, scope) for alias in node.names]
            old = [
                (node.module if isinstance(node, ast.ImportFrom) else "", alias.name, alias.asname)
                for alias in node.names
            ]
            if pieces == old or (isinstance(node, ast.ImportFrom) and node.level):
                continue
            start, end = self.read.span(node)
            if (
                "#" in re.sub(r"\(\s*# .*", "(", self.read.text[start:end])
                or "#" in self.read.text[start:end]
            ):
                self.plan.noted.append(f"{self.path}:{node.lineno}: a comment inside this import is lost")
            written = lines_of([piece for piece in pieces if piece])
            late = LATE if self.read.text.startswith(LATE, end) else ""
            indent = f"{late}\n" + " " * node.col_offset
            if written:
                self.edit(start, end, indent.join(written))
            elif id(node) in self.read.alone:
                self.edit(start, end, "pass")
            else:
                self._delete(start, end)

    def _delete(self, start: int, end: int) -> None:
        first = self.read.text.rfind("\n", 0, start) + 1
        last = self.read.text.find("\n", end) + 1 or len(self.read.text)
        if not self.read.text[first:start].strip() and not self.read.text[end:last].strip(" \n"):
            self.edit(first, last, "")
        else:
            self.edit(start, end, "pass")

    def _piece(
        self, node: ast.Import | ast.ImportFrom, alias: ast.alias, scope: Scope
    ) -> tuple[str | None, str, str | None] | None:
        """One alias as it becomes: (module, name, as); None where it is dropped."""
        plan = self.plan
        if isinstance(node, ast.Import):
            return None if self._becomes_this(alias.name) else ("", plan.module(alias.name), alias.asname)
        module = node.module or ""
        local, full = alias.asname or alias.name, f"{module}.{alias.name}"
        if not plan.is_name(module, alias.name):
            if (id(scope), local) in self.flat:
                return None
            into, _, name = plan.module(full).rpartition(".")
        else:
            if self._becomes_this(module):
                return None
            into, name = plan.module(module), plan.name(module, alias.name)
        wanted = scope.renames.get(local, local)
        return into, name, None if wanted == name and alias.asname != alias.name else wanted

    def _strings(self) -> None:
        """Dotted names in strings and comments; names in `__all__` and in casts."""
        keep = any(fnmatch(self.path, glob) for glob in self.plan.keep_strings)
        for token in tokenize.generate_tokens(io.StringIO(self.read.text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT) and not keep:
                new = self.plan.in_text(token.string)
                if new != token.string and "f" in token.string.partition(token.string[-1])[0].lower():
                    self.plan.noted.append(
                        f"{self.path}:{token.start[0]}: left in an f-string: {token.string}"
                    )
                elif new != token.string:
                    start = self.read.starts[token.start[0] - 1] + token.start[1]
                    self.edit(start, start + len(token.string), new)
        renames = self.read.top.renames
        for node in ast.walk(self.read.tree):
            for text in spelled(node):
                new = re.sub(r"\b\w+\b", lambda found: renames.get(found[0], found[0]), text.value)
                if new != text.value:
                    start, end = self.read.span(text)
                    self.edit(start, end, self.read.text[start:end].replace(text.value, new))

    def _edited(self) -> str:
        text = self.read.text
        for node, words in self.in_fstrings.items():
            start, end = self.read.span(node)
            if not any(start <= at < end for at in self.edits):
                self.edit(start, end, in_braces(text[start:end], words))
        last = len(text)
        for start, (end, new) in sorted(self.edits.items(), reverse=True):
            if end <= last:
                text, last = text[:start] + new + text[end:], start
        return text


def spelled(node: ast.AST) -> list[ast.Constant]:
    """Strings that name what a file has at its top: `__all__`, the type of a cast, a type variable."""
    found: list[ast.expr] = []
    match node:
        case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names) | ast.Tuple(elts=names)):
            found = names
        case ast.Call(func=ast.Name(id="cast" | "TypeVar"), args=[first, *_]):
            found = [first]
        case _:
            pass
    return [name for name in found if isinstance(name, ast.Constant) and isinstance(name.value, str)]


def unrolled(node: ast.expr) -> tuple[ast.Name | None, list[str]]:
    """`a.b.c` as its root and its attributes; no root where a call or subscript stands in between."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return (node, names) if isinstance(node, ast.Name) else (None, names)


def lines_of(pieces: list[tuple[str | None, str, str | None]]) -> list[str]:
    """Import statements, one for each module."""
    found: dict[str | None, list[str]] = {}
    for module, name, asname in pieces:
        words = f"{name} as {asname}" if asname else name
        if words not in found.setdefault(module, []):
            found[module].append(words)
    return [
        f"from {module} import ({', '.join(names)})"
        if module and len(names) > 1
        else f"from {module} import {names[0]}"
        if module
        else "import " + ", ".join(names)
        for module, names in found.items()
    ]


def in_braces(text: str, words: set[tuple[str, str]]) -> str:
    """Names inside the fields of an f-string."""

    def one(found: re.Match[str]) -> str:
        inner = found[0]
        for old, new in words:
            inner = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, inner)
        return inner

    return re.sub(r"(?<!\{)\{(?!\{)[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", one, text)
