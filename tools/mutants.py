"""Plants small faults in product and lab, one at a time, and records which test catches each: mutants.json.

    python tools/mutants.py sample --seed 18 --count 100    # replaces the stored mutants
    python tools/mutants.py find                            # prints how many were caught, and which are lost
    python tools/mutants.py judge [--only 3,17] [TESTS...]  # plants each, and runs tests until one fails

A mutant is one changed line of one function. `judge` works in a work tree of its own (build/mutants, the
last commit), so that no fault is planted in this work tree. It first runs the test that caught the mutant
last time. If that test passes, it runs TESTS, or all of `make test` if none are given, which takes minutes
for each mutant that no test catches.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# File that stores the mutants.
MUTANTS_FILE = ROOT / "tests" / "mutants.json"
# Work tree in which mutants are planted.
COPY = ROOT / "build" / "mutants"
# Folders whose Python files may be changed.
SOURCE_FOLDERS = ("shared", "app", "services/master", "services/worker", "services/drafter", "lab")
NO_SUCH_TEST = 4  # Exit status of pytest if a test that it is given does not exist.
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

    id: Number of the mutant.
    operator: Kind of the change, such as "negation" or "off by one".
    path: Path of the file in the repository.
    function: Qualified name of the function or class that the line belongs to; empty for other lines.
    old: Text of the line.
    new: Text of the changed line.
    verdict: "caught", "survived", "equivalent", or "lost" if the line no longer exists; empty before it was
        judged.
    by: The test that fails, or why none does.
    first: Path and line at which the mutant was sampled.
    before: The verdict of the test suite of that day.
    """

    id: int
    operator: str
    path: str
    function: str
    old: str
    new: str
    verdict: str = ""
    by: str = ""
    first: str = ""
    before: str = ""


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


def functions_of(text: str) -> dict[int, str]:
    """Return, by line number from 1, the qualified name of the function or class that the line belongs to;
    other lines are left out.

    text: Source of a file.

    A line of a nested function belongs to the innermost one, "Outer.inner". Raises SyntaxError for a text
    that is not Python.
    """
    names_by_line: dict[int, str] = {}

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        """Record the lines of a node and of all nodes within it.

        node: The node of the syntax tree.
        names: Names of the classes and functions around the node, outermost first.
        """
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
            names_by_line.update(
                dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), ".".join(names))
            )
        for inner in ast.iter_child_nodes(node):
            visit(inner, names)

    visit(ast.parse(text), ())
    return names_by_line


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


def sample(count: int, seed: int) -> list[Mutant]:
    """Return mutants: a file is drawn by its number of lines, then one of its operators, each as likely, then
    the place.

    count: Number of mutants.
    seed: Seed of the draws.

    Equal arguments give equal mutants of an unchanged tree. Files without any possible change are left out;
    one file may be drawn several times. The ids are 0 .. count - 1, by path.
    """
    rng = random.Random(seed)
    files = dict(sources(ROOT))
    files = {path: text for path, text in files.items() if any(edits_of(text))}
    chosen = rng.choices([*files], [text.count("\n") for text in files.values()], k=count)
    return [draw(number, path, files[path], rng) for number, path in enumerate(sorted(chosen))]


def draw(number: int, path: str, text: str, rng: random.Random) -> Mutant:
    """Return one mutant of a file.

    number: Id of the mutant.
    path: Path of the file in the repository.
    text: Source of the file.
    rng: Random number generator that draws operator and line.

    The function is "" for a line outside of functions and classes. The mutant has not been judged.
    """
    edits = sorted(edits_of(text))
    operator = rng.choice(sorted({operator for operator, _, _ in edits}))
    _, line, new = rng.choice([edit for edit in edits if edit[0] == operator])
    return Mutant(number, operator, path, functions_of(text).get(line, ""), text.splitlines()[line - 1], new)


# Finding and judging --------------------


def find(mutant: Mutant, files: dict[str, str]) -> tuple[str, int] | None:
    """Return the mutant's file and line (from 0): the same text in the same function, else in one place only;
    None if there is no such place.

    mutant: The mutant.
    files: Sources by path.

    Only the text without its indentation is compared. A place in the mutant's own file comes first, then one
    in an equally named function of another file; of several in the function, the first is returned.
    """
    equal_lines = [
        (path, number)
        for path, text in files.items()
        for number, line in enumerate(text.splitlines())
        if line.strip() == mutant.old.strip()
    ]
    in_function = [
        (path, n) for path, n in equal_lines if functions_of(files[path]).get(n + 1, "") == mutant.function
    ]
    candidates = (
        [candidate for candidate in in_function if candidate[0] == mutant.path] or in_function or equal_lines
    )
    return candidates[0] if len(candidates) == 1 or in_function else None


def judge(mutant: Mutant, tests: list[str]) -> Mutant:
    """Return the mutant with its result: "lost", "caught" with the test, or "survived".

    mutant: The mutant, which is planted in the work tree COPY while tests run.
    tests: Arguments of pytest, which runs them after the test that caught the mutant last.

    The file is restored afterwards. A mutant whose line has moved to another file gets the new path. "by" is
    the failing test, or "" if the mutant survived.
    """
    files = dict(sources(COPY))
    location = find(mutant, files)
    if location is None:
        return replace(mutant, verdict="lost", by="")
    path, number = location
    lines = files[path].splitlines()
    indent = len(lines[number]) - len(lines[number].lstrip())
    lines[number] = " " * indent + mutant.new.strip()
    (COPY / path).write_text("\n".join(lines) + "\n")
    try:
        caught = (mutant.verdict == "caught" and first_failure([mutant.by])) or first_failure(tests)
    finally:
        (COPY / path).write_text(files[path])
    return replace(mutant, path=path, verdict="caught" if caught else "survived", by=caught or "")


def first_failure(tests: list[str]) -> str | None:
    """Return the test that fails first, or why the tests did not end; None if all pass.

    It runs with COPY's modules before the installed ones.

    tests: Arguments of pytest.

    Tests that do not end within LIMIT seconds give "hangs: ...", and another exit status of pytest without a
    failing test "pytest ends with ...". Tests that do not exist count as passed.
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
    if failed or finished.returncode in (0, NO_SUCH_TEST):
        return failed[1] if failed else None
    return f"pytest ends with {finished.returncode}"


def judge_all(only: set[int], tests: list[str]) -> None:
    """Judge mutants in a work tree of its own, and write each result at once.

    only: Ids of the mutants to judge; empty: all.
    tests: Arguments of pytest.

    The results are written to MUTANTS_FILE and printed one by one. The work tree is removed at the end, also
    after an error. Raises CalledProcessError if git fails.
    """
    git("worktree", "add", "--quiet", "--detach", "--force", str(COPY), "HEAD")
    try:
        for mutant in [mutant for mutant in read() if not only or mutant.id in only]:
            judged = judge(mutant, tests)
            write([judged if stored.id == judged.id else stored for stored in read()])
            print(judged.id, judged.verdict, judged.by, flush=True)
    finally:
        git("worktree", "remove", "--force", str(COPY))


def git(*words: str) -> None:
    """Run git in the repository.

    words: Arguments of git.
    Raises CalledProcessError if git fails.
    """
    subprocess.run(["git", *words], cwd=ROOT, check=True)


def read() -> list[Mutant]:
    """Return the stored mutants, in the order of the file."""
    return [Mutant(**fields) for fields in json.loads(MUTANTS_FILE.read_text())["mutants"]]


def write(mutants: list[Mutant], **further_entries: object) -> None:
    """Store the mutants.

    mutants: All mutants.
    further_entries: Further entries of the file, which replace present ones.

    Other entries of the file stay. Raises OSError if the file does not exist.
    """
    page = json.loads(MUTANTS_FILE.read_text()) | further_entries | {"mutants": [*map(asdict, mutants)]}
    MUTANTS_FILE.write_text(json.dumps(page, indent=1) + "\n")


def main() -> int:
    """Run the command; return 1 if mutants are lost, else 0.

    "sample" replaces the stored mutants, "judge" runs tests on them, "find" does neither. All three then
    print the lost mutants, whose line no longer exists, and the number of mutants by result. An unknown verb
    or option ends the process with the status 2.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("sample", "find", "judge"))
    parser.add_argument("tests", nargs="*", default=["tests"])
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only", default="")
    options = parser.parse_intermixed_args()
    if options.verb == "sample":
        write(sample(options.count, options.seed), seed=options.seed)
    elif options.verb == "judge":
        judge_all({int(number) for number in options.only.split(",") if number}, options.tests)
    files = dict(sources(ROOT))
    lost = [mutant for mutant in read() if find(mutant, files) is None]
    print(*(f"lost: {mutant.id} {mutant.path} {mutant.old.strip()}" for mutant in lost), sep="\n")
    print(dict(Counter(mutant.verdict for mutant in read())))
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
