"""What docstrings say of fields and constants: each one that they name exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

ROOTS = ("shared", "app", "lab", "services")
GENERATED = REPOSITORY / "shared" / "specsot" / "v1"
# "pages: charged for it. drafted, pins: ..." at the beginning of a line or of a sentence.
DOCUMENTED = re.compile(r"(?:^\s*|[.] )((?:[a-z_][a-z0-9_]*, )*[a-z_][a-z0-9_]*):(?=\s)", re.MULTILINE)
CONSTANT = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
# Syntax trees of whole files would take seconds, so one is made of each class alone, with its decorators.
CLASS = re.compile(r"^(?:@.*\n)*class .*\n(?:(?:[ \t].*|\):|)\n)*", re.MULTILINE)
# A docstring, or another string of several lines, with what precedes it on its line; and a comment.
TEXT = re.compile(r'^([^"#\n]*)"""(.*?)"""', re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?:^|  )#.*$", re.MULTILINE)
# Names of the operating system, of CUDA and of GGUF, and a reason that is made of the name of an error.
ELSEWHERE = ("SO_REUSEPORT", "CUDA_VISIBLE_DEVICES", "HEAD_MISMATCH")
# Variables of the environment, and the types of a GGUF file.
ELSEWHERE_TOO = re.compile(r"SPECSOT_|I?Q\d_")
VALUES = ("dataclass", "value")  # decorators of classes that consist of fields


@cache
def sources() -> dict[Path, str]:
    files = (file for root in ROOTS for file in (REPOSITORY / root).rglob("*.py"))
    return {file: file.read_text(encoding="utf-8") for file in files if GENERATED not in file.parents}


@cache
def known_classes() -> list[tuple[str, ast.ClassDef]]:
    """Every class at the top of a file, and where it is declared."""
    found = list[tuple[str, ast.ClassDef]]()
    for file, text in sources().items():
        for one in CLASS.finditer(text):
            line = text.count("\n", 0, one.start()) + 1
            found += [(f"{file.relative_to(REPOSITORY)}:{line}", node) for node in classes(one[0])]
    return found


def classes(text: str) -> list[ast.ClassDef]:
    return [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]


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
    known = {node.name: node for _, node in known_classes()}
    wrong = [
        f"{place} {node.name} has no {name}"
        for place, node in known_classes()
        if consists_of_fields(node)
        for name in sorted(undocumented_names(node, known))
    ]
    assert wrong == []


def test_every_constant_that_a_docstring_names_exists() -> None:
    written = {name for text in sources().values() for name in CONSTANT.findall(code_of(text))}
    written |= {
        name
        for file in (REPOSITORY / "protos").rglob("*.proto")
        for name in CONSTANT.findall(file.read_text(encoding="utf-8"))
    }
    wrong = [
        f"{file.relative_to(REPOSITORY)}: {name}"
        for file, text in sources().items()
        for before, said in TEXT.findall(text)
        if before.strip() in ("", "r")
        for name in CONSTANT.findall(said)
        if name not in written and name not in ELSEWHERE and not ELSEWHERE_TOO.match(name)
    ]
    assert wrong == []


def code_of(text: str) -> str:
    """Return a file without its docstrings and comments, in which a constant would be named, not written."""
    return COMMENT.sub("", TEXT.sub(r"\1", text))


@pytest.mark.parametrize(
    "line", ["MAX_ROWS = 3", "use(MAX_ROWS)", 'read("MAX_ROWS")', "from a import MAX_ROWS"]
)
def test_a_constant_is_written_in_code_alone(line: str) -> None:
    named = 'def one() -> None:\n    """MAX_ROWS: of a frame."""\n    return  # MAX_ROWS at most\n'
    assert CONSTANT.findall(code_of(named)) == []
    assert CONSTANT.findall(code_of(named + line)) == ["MAX_ROWS"]


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
    (node,) = classes(f'@dataclass\nclass Frame:\n    """{said}"""\n\n    rows: int\n')
    assert undocumented_names(node, {}) == missing
