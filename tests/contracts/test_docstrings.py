"""What docstrings say of fields and constants: each one that they name exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

ROOTS = ("shared", "app", "lab", "services")
GENERATED = REPOSITORY / "shared" / "specsot" / "v1"
# "pages: charged for it. drafted, pins: ..." at the beginning of a line or of a sentence.
DOCUMENTED = re.compile(r"(?:^\s*|[.] )((?:[a-z_][a-z0-9_]*, )*[a-z_][a-z0-9_]*):(?=\s)", re.MULTILINE)
CONSTANT = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
MAX_TEXT = 60  # Characters of a string in code that may be a name; a docstring has more, or several lines.
# Names of the operating system, of CUDA and of GGUF, and a reason that is made of the name of an error.
ELSEWHERE = ("SO_REUSEPORT", "CUDA_VISIBLE_DEVICES", "HEAD_MISMATCH")
# Variables of the environment, and the types of a GGUF file.
ELSEWHERE_TOO = re.compile(r"SPECSOT_|I?Q\d_")
VALUES = ("dataclass", "value")  # decorators of classes that consist of fields


@cache
def modules() -> dict[Path, ast.Module]:
    files = (file for root in ROOTS for file in (REPOSITORY / root).rglob("*.py"))
    return {
        file: ast.parse(file.read_text(encoding="utf-8")) for file in files if GENERATED not in file.parents
    }


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def name_of(node: ast.expr) -> str:
    """The last name of `a.b`, `a.b(c)` and `a.b[c]`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return name_of(inner)
        case _:
            return ""


def consists_of_fields(node: ast.ClassDef) -> bool:
    decorated = any(name_of(one) in VALUES for one in node.decorator_list)
    return decorated or any(name_of(base) == "NamedTuple" for base in node.bases)


def members_of(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    """Fields, properties and methods, those of base classes included."""
    found: set[str] = set()
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case _:
                pass
    for base in node.bases:
        if (inherited := known.get(name_of(base))) is not None and inherited is not node:
            found |= members_of(inherited, known)
    return found


def undocumented_names(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    """The names that the docstring of a class describes and the class does not have."""
    said = ast.get_docstring(node) or ""
    named = {name for found in DOCUMENTED.finditer(said) for name in found[1].split(", ")}
    return named - members_of(node, known)


def test_every_field_that_a_docstring_describes_exists() -> None:
    known = {node.name: node for tree in modules().values() for node in classes(tree)}
    wrong = [
        f"{file.relative_to(REPOSITORY)}:{node.lineno} {node.name} has no {name}"
        for file, tree in modules().items()
        for node in classes(tree)
        if consists_of_fields(node)
        for name in sorted(undocumented_names(node, known))
    ]
    assert wrong == []


def test_every_constant_that_a_docstring_names_exists() -> None:
    written = {name for tree in modules().values() for node in ast.walk(tree) for name in names_written(node)}
    written |= {
        name
        for file in (REPOSITORY / "protos").rglob("*.proto")
        for name in CONSTANT.findall(file.read_text(encoding="utf-8"))
    }
    wrong = [
        f"{file.relative_to(REPOSITORY)}: {name}"
        for file, tree in modules().items()
        for said in docstrings(tree)
        for name in CONSTANT.findall(said)
        if name not in written and name not in ELSEWHERE and not ELSEWHERE_TOO.match(name)
    ]
    assert wrong == []


def names_written(node: ast.AST) -> list[str]:
    """Return the names in code, and constants in strings of one line: variables of the environment, say."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
            return [name]
        case ast.Constant(value=str(text)) if "\n" not in text and len(text) < MAX_TEXT:
            return CONSTANT.findall(text)
        case _:
            return []


def docstrings(tree: ast.Module) -> Iterator[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        ("rows: of a frame. own: its first.", {"own"}),
        ("One frame.\n\n    rows, own: counted.", {"own"}),
        ("What a frame has; empty: nothing.", set[str]()),
        ("rows: how many, own: or not.", set[str]()),
    ],
)
def test_a_field_is_described_at_the_beginning_of_a_line_or_a_sentence(said: str, missing: set[str]) -> None:
    (node,) = classes(ast.parse(f'@dataclass\nclass Frame:\n    """{said}"""\n\n    rows: int\n'))
    assert undocumented_names(node, {}) == missing
