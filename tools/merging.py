"""Several modules become one: imports united, bodies one after the other, what both define refused.

Works on texts whose references already point to the module they become (see `references.py`).
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from house import statements, top_level
from references import Reader, lines_of

T = TypeVar("T")
Import = tuple[str | None, str, str | None]  # module, name, as


@dataclass(frozen=True)
class Part:
    """One module taken apart."""

    path: str
    docstring: str
    imports: tuple[Import, ...]
    for_types: tuple[Import, ...]
    raw: tuple[str, ...]  # imports with a comment, as they are
    exported: tuple[str, ...]
    body: str
    defined: dict[str, str]  # name -> source of its definition
    needed: frozenset[str]  # names that are used while the module is imported
    loaded: frozenset[str]  # names looked up at its top that it does not bind


def part_of(path: str, text: str) -> Part:
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    gone: set[int] = set()
    imports: list[Import] = []
    for_types: list[Import] = []
    raw: list[str] = []
    exported: list[str] = []
    first = tree.body[0] if tree.body else None
    if first and ast.get_docstring(tree):
        gone |= span(first)
    for node in tree.body:
        match node:
            case ast.Import() | ast.ImportFrom():
                taken = "".join(lines[node.lineno - 1 : node.end_lineno])
                if "#" in taken:
                    raw.append(taken.rstrip())
                else:
                    imports += aliases(node)
                gone |= span(node)
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=[]) if all_imports(node.body):
                for inner in node.body:
                    for_types += aliases(inner)
                gone |= span(node)
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names)):
                exported += [name.value for name in names if isinstance(name, ast.Constant)]
                gone |= span(node)
            case _:
                pass
    body = "".join(line for number, line in enumerate(lines, 1) if number not in gone).strip("\n")
    read = Reader(text)
    loaded = {use.name for use in read.uses if use.scope.home(use.name) is None}
    needed = set(needed_at_import(tree.body))
    return Part(
        path, ast.get_docstring(tree, clean=False) or "", tuple(imports), tuple(for_types), tuple(raw),
        tuple(exported), body, definitions(text, tree), frozenset(needed), frozenset(loaded),
    )  # fmt: skip


def span(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def all_imports(body: list[ast.stmt]) -> bool:
    return all(isinstance(node, ast.Import | ast.ImportFrom) for node in body)


def aliases(node: ast.stmt) -> list[Import]:
    if isinstance(node, ast.Import):
        return [("", alias.name, alias.asname) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.module, alias.name, alias.asname) for alias in node.names]
    return []


def definitions(text: str, tree: ast.Module) -> dict[str, str]:
    """Top-level names that are defined, with their source."""
    own = {name for name, origin in top_level(text).items() if origin is None} - {"__all__"}
    found: dict[str, str] = {}
    for node in statements(tree.body):
        names = (
            [node.name]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            else [
                name.id
                for name in ast.walk(node)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            ]
        )
        for name in own.intersection(names):
            found[name] = ast.get_source_segment(text, node) or ""
    return found


def needed_at_import(body: list[ast.stmt]) -> Iterator[str]:
    """Names that run when the module is imported: bases, decorators, defaults, values; not annotations."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from names_in(
                    [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
                )
            case ast.ClassDef():
                yield from names_in(
                    [*node.decorator_list, *node.bases, *(word.value for word in node.keywords)]
                )
                yield from needed_at_import(node.body)
            case ast.AnnAssign():
                yield from names_in([node.value] if node.value else [])
            case ast.Import() | ast.ImportFrom():
                pass
            case _:
                yield from names_in([node])


def names_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        yield from (name.id for name in ast.walk(node) if isinstance(name, ast.Name))


def ordered(parts: list[Part]) -> list[Part]:
    """As given, but what is needed while importing comes first."""
    left, done = list(parts), list[Part]()
    while left:
        for part in left:
            if not any(part.needed & other.defined.keys() for other in left if other is not part):
                break
        else:
            part = left[0]
        left.remove(part)
        done.append(part)
    return done


def clashes(parts: list[Part]) -> Iterator[str]:
    """Why these modules cannot be one yet."""
    for at, one in enumerate(parts):
        for other in parts[at + 1 :]:
            for name in sorted(one.defined.keys() & other.defined.keys()):
                if one.defined[name] != other.defined[name]:
                    yield f"both define {name}: {one.path}, {other.path}"
            yield from import_clashes(one, other)
            yield from import_clashes(other, one)


def import_clashes(one: Part, other: Part) -> Iterator[str]:
    bound = {local(item): item for item in (*one.imports, *one.for_types)}
    theirs = {local(item): item for item in (*other.imports, *other.for_types)}
    for name in sorted(bound.keys() & other.defined.keys()):
        yield f"{one.path} imports {name}, {other.path} defines it"
    for name in sorted(bound.keys() & theirs.keys()):
        if bound[name] != theirs[name]:
            yield f"{name} is imported as two things: {one.path} {bound[name]}, {other.path} {theirs[name]}"
    for name in sorted(one.loaded & other.defined.keys() & set(dir(builtins))):
        yield f"{one.path} uses the builtin {name}, {other.path} defines it"
    for name in sorted(one.loaded & theirs.keys() & set(dir(builtins))):
        yield f"{one.path} uses the builtin {name}, {other.path} imports it"


def local(item: Import) -> str:
    return item[2] or (item[1].partition(".")[0] if not item[0] else item[1])


def merged(parts: list[Part], docstring: str | None) -> str:
    """The one module's text; ruff sorts its imports and joins its lines."""
    run = unique(item for part in parts for item in part.imports)
    types = [item for item in unique(item for part in parts for item in part.for_types) if item not in run]
    future = [item for item in run if item[0] == "__future__"]
    quote = (
        docstring if docstring is not None else next((part.docstring for part in parts if part.docstring), "")
    )
    blocks = [f'"""{quote}"""'] if quote else []
    blocks += ["\n".join(lines_of(future))] if future else []
    blocks += [
        "\n".join(
            [
                *lines_of([item for item in run if item not in future]),
                *unique(raw for part in parts for raw in part.raw),
            ]
        )
    ]
    blocks += ["if TYPE_CHECKING:\n    " + "\n    ".join(lines_of(types))] if types else []
    if names := unique(name for part in parts for name in part.exported):
        blocks.append("__all__ = [" + ", ".join(f'"{name}"' for name in sorted(names)) + "]")
    return "\n\n".join([*blocks, *without_twins(ordered(parts))]) + "\n"


def unique(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))


def without_twins(parts: list[Part]) -> list[str]:
    """The bodies; what an earlier one defines word for word is left out of a later one."""
    seen: dict[str, str] = {}
    bodies: list[str] = []
    for part in parts:
        body = part.body
        for name, source in part.defined.items():
            if seen.get(name) == source:
                body = body.replace(source, "", 1)
        seen |= part.defined
        if body.strip():
            bodies.append("\n" + body.strip("\n"))
    return bodies
