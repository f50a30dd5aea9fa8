"""Plants small faults in product and lab, one at a time, and prints which of them no test catches.

    python tools/mutants.py --count 20 tests/pure tests/worker              # faults anywhere
    python tools/mutants.py --within services/worker --count 5 tests/worker # faults in these files alone

A mutant is one changed line. Mutants are planted in a work tree of their own (build/mutants, the last
commit), so that no fault is planted in this work tree. Equal arguments give equal mutants of an unchanged
tree. The same mutants before and after tests are cut say what the cut tests caught alone. Each mutant takes
as long as its tests, which end at the first failure.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Work tree in which mutants are planted.
COPY = ROOT / "build" / "mutants"
# Folders whose Python files may be changed.
SOURCE_FOLDERS = ("shared", "app", "services/master", "services/worker", "services/drafter", "lab")
# Seconds. Time for the tests of one mutant. Tests that take longer hang, which counts as caught. Untuned.
LIMIT = 600
# Text of a sign, and the text that replaces it, by the class of its node.
SIGNS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"),
}  # fmt: skip
# Names of calls within which nothing is changed.
SILENT = {"log", "warnings", "dataclass", "field"}


@dataclass(frozen=True)
class Mutant:
    """One changed line.

    operator: Kind of the change, such as "negation" or "off by one".
    path: Path of the file in the repository.
    line: Number of the line, from 1.
    new: Text of the changed line.
    """

    operator: str
    path: str
    line: int
    new: str


# (operator, number of the line from 1, new text of the line)
Edit = tuple[str, int, str]
# (operator, number of the line from 1, first column, column after the last, new text between these columns)
Change = tuple[str, int, int, int, str]


# What can be changed --------------------


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of every file that may be changed, generated ones left out.

    root: Root folder of the work tree.

    The paths are relative to the root, and sorted within each of SOURCE_FOLDERS. A folder that does not exist
    yields nothing.
    """
    for home in SOURCE_FOLDERS:
        for path in sorted((root / home).rglob("*.py")):
            if "/v1/" not in path.as_posix():
                yield path.relative_to(root).as_posix(), path.read_text()


def edits_of(text: str) -> Iterator[Edit]:
    """Yield every change of one line; docstrings, texts for people, logs, imports and assertions stay.

    text: Source of a file.

    Lines with characters outside ASCII are left out. A line may have several edits.
    """
    lines = text.splitlines()
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        if not is_silent(node):
            pending += ast.iter_child_nodes(node)
            for operator, line, start, end, new in changes(node, lines):
                # Columns of the syntax tree count bytes.
                if lines[line - 1].isascii():
                    yield operator, line, lines[line - 1][:start] + new + lines[line - 1][end:]


def is_silent(node: ast.AST) -> bool:
    """Return whether nothing within a node is changed.

    node: A node of the syntax tree.

    The result is True for imports, assertions, f-strings, docstrings and other constants on a line of their
    own, and for calls whose function or object is named in SILENT.
    """
    match node:
        case (
            ast.Import() | ast.ImportFrom() | ast.Assert() | ast.JoinedStr() | ast.Expr(value=ast.Constant())
        ):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name)) | ast.Name(id=name)):
            return name in SILENT
        case _:
            return False


def changes(node: ast.AST, lines: list[str]) -> Iterator[Change]:
    """Yield the changes of one node, inner nodes left out.

    node: The node of the syntax tree; the nodes within it are left out.
    lines: Lines of the file.

    True and False are exchanged; the sign of a comparison, of and/or, or of arithmetic is replaced as SIGNS
    says; a number becomes one larger; a condition is negated; a returned value that is not a constant becomes
    None; a call or an augmented assignment on a line of its own becomes pass; break and continue are
    exchanged. Nodes of several lines have no change.
    """
    match node:
        case ast.Constant(value=bool() as value):
            yield from replacements("boolean", node, str(not value))
        case ast.Constant(value=int() | float() as value):
            yield from replacements("number", node, str(value + 1))
        case ast.Compare():
            for (left, right), sign in zip(pairwise([node.left, *node.comparators]), node.ops):
                yield from sign_changes("comparison", left, right, type(sign), lines)
        case ast.BoolOp():
            for left, right in pairwise(node.values):
                yield from sign_changes("and-or", left, right, type(node.op), lines)
        case ast.BinOp():
            yield from sign_changes("arithmetic", node.left, node.right, type(node.op), lines)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if (
            test.lineno == test.end_lineno
        ):
            yield from replacements("negation", test, f"not ({ast.unparse(test)})")
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield from replacements("returned", value, "None")
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield from replacements("removed", node, "pass")
        case ast.Break() | ast.Continue():
            yield from replacements("loop", node, "continue" if isinstance(node, ast.Break) else "break")
        case _:
            pass


def replacements(operator: str, node: ast.expr | ast.stmt, new: str) -> Iterator[Change]:
    """Yield the change that replaces a node of one line; nothing for a node of several lines.

    operator: Name of the kind of change.
    node: The node of the syntax tree.
    new: Text that replaces the node.
    """
    if node.lineno == node.end_lineno:
        yield operator, node.lineno, node.col_offset, node.end_col_offset or 0, new


def sign_changes(
    operator: str, left: ast.expr, right: ast.expr, sign: type[ast.AST], lines: list[str]
) -> Iterator[Change]:
    """Yield the change of the sign between two operands of one line; nothing for other signs or several
    lines.

    operator: Name of the kind of change.
    left, right: Operands before and after the sign.
    sign: Class of the sign's node.
    lines: Lines of the file.

    SIGNS has the text that replaces each sign. Nothing is yielded either if the sign is not found between the
    operands.
    """
    if sign in SIGNS and left.end_lineno == right.lineno:
        old, new = SIGNS[sign]
        column = lines[right.lineno - 1].find(old, left.end_col_offset or 0, right.col_offset)
        if column >= 0:
            yield operator, right.lineno, column, column + len(old), new


# The sample --------------------


def sample(count: int, seed: int, within: str = "") -> list[Mutant]:
    """Return mutants in the order of their paths: a file is drawn by its number of lines, then one of its
    operators, each as likely, then the place.

    count: Number of mutants.
    seed: Seed of the draws.
    within: Beginning of the paths of the files that may be changed; "" for all.

    Equal arguments give equal mutants of an unchanged tree. Files without any possible change are left out;
    one file may be drawn several times. Raises IndexError if no file can be changed.
    """
    rng = random.Random(seed)
    files = {path: text for path, text in sources(ROOT) if path.startswith(within) and any(edits_of(text))}
    chosen = rng.choices([*files], [text.count("\n") for text in files.values()], k=count)
    return [draw(path, files[path], rng) for path in sorted(chosen)]


def draw(path: str, text: str, rng: random.Random) -> Mutant:
    """Return one mutant of a file.

    path: Path of the file in the repository.
    text: Source of the file.
    rng: Random number generator that draws operator and line.
    """
    edits = sorted(edits_of(text))
    operator = rng.choice(sorted({operator for operator, _, _ in edits}))
    _, line, new = rng.choice([edit for edit in edits if edit[0] == operator])
    return Mutant(operator, path, line, new)


# Planting --------------------


def failure_with(mutant: Mutant, tests: list[str]) -> str | None:
    """Return the test that fails first if a mutant is planted in the work tree COPY; None if all tests pass.
    The file is restored afterwards.

    mutant: The mutant.
    tests: Arguments of pytest.
    """
    file = COPY / mutant.path
    text = file.read_text()
    lines = text.splitlines()
    lines[mutant.line - 1] = mutant.new
    file.write_text("\n".join(lines) + "\n")
    try:
        return first_failure(tests)
    finally:
        file.write_text(text)


def first_failure(tests: list[str]) -> str | None:
    """Return the test that fails first, or why the tests did not end; None if all pass.

    It runs with COPY's modules before the installed ones.

    tests: Arguments of pytest.

    Tests that do not end within LIMIT seconds give "hangs: ...", and another exit status of pytest without a
    failing test "pytest ends with ...".
    """
    python_path = os.pathsep.join(str(COPY / home) for home in SOURCE_FOLDERS)
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE", *tests]
    try:
        finished = subprocess.run(
            command,
            cwd=COPY,
            env=os.environ | {"PYTHONPATH": python_path},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"hangs: not done after {LIMIT} s"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", finished.stdout, re.MULTILINE)
    if failed or finished.returncode == 0:
        return failed[1] if failed else None
    return f"pytest ends with {finished.returncode}"


def git(*words: str) -> None:
    """Run git in the repository.

    words: Arguments of git.
    Raises CalledProcessError if git fails.
    """
    subprocess.run(["git", *words], cwd=ROOT, check=True)


def main() -> int:
    """Run the command; return 1 if tests fail without a mutant, else 0.

    One line is printed for each mutant: its place, its text, and the test that catches it, or "survived". The
    work tree is removed at the end, also after an error.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--within", default="")
    options = parser.parse_intermixed_args()
    git("worktree", "add", "--quiet", "--detach", "--force", str(COPY), "HEAD")
    try:
        if (failing := first_failure(options.tests)) is not None:
            print(f"without a mutant: {failing}")
            return 1
        for mutant in sample(options.count, options.seed, options.within):
            caught = failure_with(mutant, options.tests) or "survived"
            print(f"{mutant.path}:{mutant.line}: {mutant.new.strip()}: {caught}", flush=True)
    finally:
        git("worktree", "remove", "--force", str(COPY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
