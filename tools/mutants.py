"""Samples small faults of the product, plants them one at a time, and tells which test notices each.

    python tools/mutants.py sample --seed 18 --count 100   # choose them: tests/mutants.json
    python tools/mutants.py find                       # where each lies in today's tree; which are lost
    python tools/mutants.py record OUT -- tests/...    # run tests under coverage: which touches which line
    python tools/mutants.py judge OUT COPY             # plant each in COPY, run the tests that touch it
    python tools/mutants.py take OUT/verdicts.json     # keep the verdicts; --fast: the fast suite's
    python tools/mutants.py table                      # the verdicts, by room

A mutant is one line of one function, old and new. After moves and renames it is found again by its function
and text, then by its text alone, then by its tokens with other names. `record` needs the package `coverage`;
processes that tests start count where COVERAGE_PROCESS_START reaches them (`import coverage;
coverage.process_startup()` in a .pth file of the environment). COPY is a work tree of its own, with its own
environment: a mutant is never planted in the tree the tool runs from.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "tests" / "mutants.json"
HOMES = ("shared/specsot", "services/*/specsot_*", "app/specsot_app")
LEFT_OUT = ("specsot/v1/", "specsot_app/bench/", "specsot_app/eval/", "specsot_app/train/")  # stubs, the lab
LOGS = {"log", "logger", "warnings"}
FLIPS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
SUMS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
}
OTHERS = {"min": "max", "max": "min", "any": "all", "all": "any"}
BUDGET = 60.0  # seconds of tests, as long as they took when recorded, that are run for one mutant at most
HANG = 6.0  # times as long as that, and a minute: then the mutant is said to hang, which is caught too


@dataclass(frozen=True)
class Mutant:
    """One line changed. `function`: module path and qualified name, at the time it was sampled."""

    id: int
    operator: str
    path: str
    line: int
    function: str
    old: str
    new: str
    verdict: str = ""  # caught, survived, unknown (tests that touch it did not fit, or none was recorded)
    by: str = ""  # the first test that failed
    fast: str = ""  # the same of the fast suite
    fast_by: str = ""


Edit = tuple[str, int, int, int, str]  # operator, line, first and last column, new text


# --- what can be changed ----------------------------------------------------------------------------


class Sites(ast.NodeVisitor):
    """Every change one could make in a module, each within one line."""

    def __init__(self, text: str) -> None:
        self.lines, self.edits, self.functions = text.splitlines(), list[Edit](), dict[int, str]()
        self._names: list[str] = []
        self.visit(ast.parse(text))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                self.functions[line] = ".".join(self._names)
            if self._is_silent(node):
                return
        super().visit(node)

    def _is_silent(self, node: ast.stmt) -> bool:
        """Docstrings, logs, imports, checks for types, assertions: nothing that a test should feel."""
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return True
            case ast.Expr(value=ast.Constant()):
                return True
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))) if name in LOGS:
                return True
            case _:
                return False

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._names.append(node.name)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            self._change_default(default)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._change_default(node.value)
        if node.value:
            self.visit(node.value)
        if not isinstance(node.target, ast.Name):
            self._remove(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._remove(node)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._remove(node)
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        self._remove(node)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and not isinstance(node.value, ast.Constant):
            self._edit("returned", node.value, "None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._edit("loop", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._edit("loop", node, "break")

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_If
    visit_While = visit_If

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, sign, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            self._between("comparison", left, right, *FLIPS[type(sign)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in SUMS and not is_text(node.left) and not is_text(node.right):
            self._between("arithmetic", node.left, node.right, *SUMS[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        both = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:]):
            self._between("and-or", left, right, *both)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._edit("boolean", node, str(not node.value))
        elif isinstance(node.value, int):
            self._edit("off by one", node, str(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return  # words for people

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in OTHERS:
            self._edit("other function", node.func, OTHERS[node.func.id])
        for one, other in zip(node.args, node.args[1:]):
            texts = self._text(one), self._text(other)
            if texts[0] != texts[1] and one.lineno == other.end_lineno and None not in texts:
                between = self.lines[one.lineno - 1].encode()[one.end_col_offset : other.col_offset].decode()
                self.edits.append(
                    (
                        "swapped",
                        one.lineno,
                        one.col_offset,
                        other.end_col_offset or 0,
                        f"{texts[1]}{between}{texts[0]}",
                    )
                )
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._edit("negation", test, self._text(test.operand))
        elif not isinstance(test, ast.Compare | ast.BoolOp | ast.NamedExpr):
            self._edit("negation", test, f"not {self._text(test)}")

    def _change_default(self, value: ast.expr | None) -> None:
        match value:
            case ast.Constant(value=bool() as was):
                self._edit("default", value, str(not was))
            case ast.Constant(value=int() as was):
                self._edit("default", value, str(was * 2 + 1))
            case ast.Constant(value=float() as was):
                self._edit("default", value, str(was * 2 + 0.5))
            case _:
                pass

    def _remove(self, node: ast.stmt) -> None:
        if not self._is_silent(node) and not holds_yield(node):
            self._edit("removed", node, "pass")

    def _text(self, node: ast.expr) -> str | None:
        if node.lineno != node.end_lineno:
            return None
        return self.lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()

    def _edit(self, operator: str, node: ast.expr | ast.stmt, new: str | None) -> None:
        if new is not None and node.lineno == node.end_lineno:
            self.edits.append((operator, node.lineno, node.col_offset, node.end_col_offset or 0, new))

    def _between(self, operator: str, left: ast.expr, right: ast.expr, sign: str, new: str) -> None:
        """Change the sign between two operands of one line."""
        if left.end_lineno != right.lineno:
            return
        text = self.lines[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
        found = re.search(rf"(?<![\w<>=!*/]){re.escape(sign)}(?![\w<>=*/])", text)
        if found:
            start = (left.end_col_offset or 0) + len(text[: found.start()].encode())
            self.edits.append((operator, right.lineno, start, start + len(sign), new))


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def holds_yield(node: ast.stmt) -> bool:
    return any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(node))


def edited(line: str, edit: Edit) -> str:
    _, _, start, end, new = edit
    raw = line.encode()
    return (raw[:start] + new.encode() + raw[end:]).decode()


def compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


# --- sampling ---------------------------------------------------------------------------------------


def sources(root: Path) -> Iterator[str]:
    """Every file of the product that may hold a mutant, from the root."""
    for home in HOMES:
        for path in sorted(root.glob(f"{home}/**/*.py")):
            if not any(part in path.as_posix() for part in LEFT_OUT):
                yield path.relative_to(root).as_posix()


def room_of(path: str) -> str:
    """Where a file lives: its service, or the folder below `shared` or the app."""
    parts = path.split("/")
    if parts[0] == "services":
        return "/".join([parts[1], *parts[3:-1][:1]])
    return "/".join([parts[0], *parts[2:-1][:1]])


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """So many, by lines: each room has its share of them, each line of a room the same chance."""
    rng, rooms = random.Random(seed), defaultdict[str, list[tuple[str, Sites]]](list)
    for path in sources(root):
        rooms[room_of(path)].append((path, Sites((root / path).read_text())))
    sizes = {room: sum(len(sites.lines) for _, sites in files) for room, files in rooms.items()}
    mutants: list[Mutant] = []
    for room, share in shares(sizes, count).items():
        for path, sites, edit in drawn(rooms[room], share, rng):
            old = sites.lines[edit[1] - 1]
            function = f"{path}:{sites.functions.get(edit[1], '')}"
            mutants.append(Mutant(len(mutants), edit[0], path, edit[1], function, old, edited(old, edit)))
    return mutants


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """By largest remainder; every room has one."""
    exact = {room: count * size / sum(sizes.values()) for room, size in sizes.items()}
    given = {room: max(1, int(share)) for room, share in exact.items()}
    for room in sorted(exact, key=lambda room: exact[room] - given[room], reverse=True):
        if sum(given.values()) >= count:
            break
        given[room] += 1
    return given


def drawn(files: list[tuple[str, Sites]], share: int, rng: random.Random) -> list[tuple[str, Sites, Edit]]:
    """An operator first, each as likely, then where: what is frequent weighs no more than what is rare."""
    places = defaultdict[str, list[tuple[str, Sites, Edit]]](list)
    for path, sites in files:
        for edit in sites.edits:
            if edited(sites.lines[edit[1] - 1], edit) != sites.lines[edit[1] - 1]:
                places[edit[0]].append((path, sites, edit))
    chosen: list[tuple[str, Sites, Edit]] = []
    while len(chosen) < share:
        path, sites, edit = rng.choice(places[rng.choice(sorted(places))])
        text = "\n".join(
            [*sites.lines[: edit[1] - 1], edited(sites.lines[edit[1] - 1], edit), *sites.lines[edit[1] :]]
        )
        if compiles(text) and not any(one is sites and edit[1] == other[1] for _, one, other in chosen):
            chosen.append((path, sites, edit))
    return chosen


# --- finding again ----------------------------------------------------------------------------------


def tokens_of(line: str) -> list[tuple[int, str]]:
    """(kind, text); a line that is part of a longer statement may not end well."""
    found: list[tuple[int, str]] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline):
            if token.string.strip():
                found.append((token.type, token.string))
    except (tokenize.TokenError, IndentationError, SyntaxError):
        pass
    return found


WORDS = {"and", "or", "not", "in", "is", "if", "else", "for", "while", "return", "yield", "await", "lambda"}
WORDS |= {"None", "True", "False", "pass"}


def shape_of(line: str) -> tuple[str, ...]:
    """A line without its names."""
    return tuple(
        "N" if kind == tokenize.NAME and text not in WORDS else text for kind, text in tokens_of(line)
    )


def likeness(one: str, other: str) -> float:
    """How many of its names a line kept."""
    pairs = list(zip(tokens_of(one), tokens_of(other)))
    return sum(mine == theirs for mine, theirs in pairs) / max(1, len(pairs))


def renamed(mutant: Mutant, line: str) -> str:
    """The new line, in the words of the line that stands there now."""
    words = {a: b for (_, a), (_, b) in zip(tokens_of(mutant.old), tokens_of(line))}
    old, new = mutant.old, mutant.new
    start = next((n for n, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    while start and (old[start - 1].isalnum() or old[start - 1] == "_"):
        start -= 1
    tail = 0
    while tail < min(len(old), len(new)) - start and old[len(old) - 1 - tail] == new[len(new) - 1 - tail]:
        tail += 1
    while tail and (old[len(old) - tail].isalnum() or old[len(old) - tail] == "_"):
        tail -= 1
    translate = lambda text: re.sub(r"[A-Za-z_]\w*", lambda word: words.get(word[0], word[0]), text)  # noqa: E731
    indent = line[: len(line) - len(line.lstrip())]
    return (
        indent
        + translate(new[:start]).lstrip()
        + translate(new[start : len(new) - tail])
        + translate(new[len(new) - tail :])
    )


@dataclass(frozen=True)
class Found:
    """Where a mutant lies now, and what its line becomes. `how`: place, function, text, names."""

    path: str
    line: int
    new: str
    how: str


class Tree:
    """Today's sources by line, searched for each mutant."""

    def __init__(self, root: Path) -> None:
        self.root, self.files = root, {path: (root / path).read_text() for path in self._paths(root)}
        self._sites: dict[str, Sites] = {}
        self.by_text = defaultdict[str, list[tuple[str, int]]](list)
        self.by_shape = defaultdict[tuple[str, ...], list[tuple[str, int]]](list)
        for path, text in self.files.items():
            for number, line in enumerate(text.splitlines(), 1):
                if line.strip():
                    self.by_text[line.strip()].append((path, number))

    @staticmethod
    def _paths(root: Path) -> Iterator[str]:
        for home in ("shared", "services", "app", "lab"):
            for path in sorted((root / home).glob("**/*.py")):
                if "/v1/" not in path.as_posix():
                    yield path.relative_to(root).as_posix()

    def sites(self, path: str) -> Sites:
        if path not in self._sites:
            self._sites[path] = Sites(self.files[path])
        return self._sites[path]

    def find(self, mutant: Mutant) -> Found | None:
        wanted = mutant.function.partition(":")[2]
        same = self.by_text.get(mutant.old.strip(), [])
        near = [one for one in same if self.function(*one) == wanted]
        near_last = [one for one in same if self.function(*one).split(".")[-1] == wanted.split(".")[-1]]
        for how, places in (("function", near), ("method", near_last), ("text", same)):
            here = [one for one in places if one[0] == mutant.path] or places
            if here:
                path, line = min(here, key=lambda one: abs(one[1] - mutant.line))
                if how == "text" and len(here) > 1:
                    break
                return Found(path, line, self.indented(path, line, mutant.new), how)
        return self.by_names(mutant, wanted)

    def by_names(self, mutant: Mutant, wanted: str) -> Found | None:
        if not self.by_shape:
            for text, places in self.by_text.items():
                self.by_shape[shape_of(text)] += places
        places = self.by_shape.get(shape_of(mutant.old), [])
        ranked = sorted(places, key=lambda one: -self.rank(mutant, wanted, *one))
        if not ranked or self.rank(mutant, wanted, *ranked[0]) < 0.6:
            return None
        path, line = ranked[0]
        return Found(path, line, renamed(mutant, self.files[path].splitlines()[line - 1]), "names")

    def rank(self, mutant: Mutant, wanted: str, path: str, line: int) -> float:
        function, last = self.function(path, line), wanted.split(".")[-1]
        place = 0.3 * (function.split(".")[-1] == last) + 0.2 * (
            path.split("/")[:2] == mutant.path.split("/")[:2]
        )
        return place + 0.6 * likeness(mutant.old, self.files[path].splitlines()[line - 1])

    def function(self, path: str, line: int) -> str:
        return self.sites(path).functions.get(line, "")

    def indented(self, path: str, line: int, new: str) -> str:
        here = self.files[path].splitlines()[line - 1]
        return here[: len(here) - len(here.lstrip())] + new.strip()


# --- recording --------------------------------------------------------------------------------------


def record(out: Path, chosen: list[str]) -> None:
    """Run tests under coverage; `out` then holds times.json and touched.sqlite."""
    out.mkdir(parents=True, exist_ok=True)
    rc = out / "coveragerc"
    homes = "".join(f"\n    {ROOT / home}" for home in ("app", "shared", "services"))
    rc.write_text(
        f"[run]\nsource ={homes}\nparallel = true\ndata_file = {out}/touched\ncontext = ${{MUTANTS_TEST-}}\n"
        "omit = */specsot/v1/*\n"
    )
    more = {"COVERAGE_PROCESS_START": str(rc), "MUTANTS_TIMES": str(out / "times.json")}
    command = [sys.executable, "-m", "pytest", "-p", "touching", *chosen]
    subprocess.run(command, cwd=ROOT, env=with_tools(more), check=False)
    subprocess.run([sys.executable, "-m", "coverage", "combine", "-q", "--rcfile", rc], cwd=out, check=True)


def with_tools(more: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path} | more


class Touched:
    """Which tests ran which line, and how long each test took."""

    def __init__(self, out: Path, root: Path) -> None:
        self._root = root
        self._data = sqlite3.connect(out / "touched")
        self.seconds, self.green = dict[str, float](), set[str]()
        for test, phases in json.loads((out / "times.json").read_text()).items():
            self.seconds[test] = sum(seconds for seconds, _ in phases.values())
            if phases.get("call", (0, ""))[1] == "passed" and all(
                how == "passed" for _, how in phases.values()
            ):
                self.green.add(test)

    def tests(self, path: str, lines: set[int]) -> set[str]:
        """Those that passed and ran one of the lines."""
        rows = self._data.execute(
            "SELECT context.context, numbits FROM line_bits JOIN file ON file.id = file_id"
            " JOIN context ON context.id = context_id WHERE file.path LIKE ?",
            ["%/" + path],
        )
        found = {context for context, bits in rows if any(has(bits, line) for line in lines)}
        return {test for context in found for test in context.split("|") if test in self.green}


def has(bits: bytes, line: int) -> bool:
    byte, bit = divmod(line, 8)
    return byte < len(bits) and bool(bits[byte] >> bit & 1)


# --- judging ----------------------------------------------------------------------------------------


def ordered(tests: set[str], seconds: dict[str, float], first: tuple[str, ...] = ()) -> list[str]:
    """Quickest first, but a few of each file before more of any; as many as fit the budget."""
    by_file = defaultdict[str, list[str]](list)
    for test in sorted(tests, key=lambda test: (seconds.get(test, 1.0), test)):
        by_file[test.partition("::")[0]].append(test)
    ranked = sorted(
        ((rank // 3, sum(seconds.get(one, 1.0) for one in some[: rank // 3 * 3 + 3]), test)
         for some in by_file.values() for rank, test in enumerate(some))
    )  # fmt: skip
    chosen, spent = [test for test in first if test in tests], 0.0
    for _, _, test in ranked:
        if test not in chosen and spent + seconds.get(test, 1.0) <= BUDGET:
            chosen.append(test)
            spent += seconds.get(test, 1.0)
    return chosen


def judge(
    mutant: Mutant, found: Found, touched: Touched, tree: Tree, copy: Path, first: tuple[str, ...]
) -> tuple[str, str]:
    """(verdict, by whom)."""
    tests = touched.tests(found.path, {found.line})
    whole = tests
    if (
        not tree.function(found.path, found.line).split(".")[-1].islower()
    ):  # at the top or in a class: run at import
        whole = tests | touched.tests(found.path, set(range(1, len(tree.files[found.path].splitlines()) + 1)))
    chosen = ordered(whole, touched.seconds, first)
    if not chosen:
        return "unknown", "no test touches it"
    target = copy / found.path
    before = target.read_text()
    lines = before.splitlines()
    lines[found.line - 1] = found.new
    target.write_text("\n".join(lines) + "\n")
    try:
        failed = run(chosen, copy, sum(touched.seconds.get(test, 1.0) for test in chosen))
    finally:
        target.write_text(before)
    if failed:
        return "caught", failed
    left = len(whole) - len(chosen)
    return (
        ("survived", f"{len(chosen)} tests")
        if not left
        else ("unknown", f"{len(chosen)} tests, {left} not run")
    )


def run(tests: list[str], copy: Path, seconds: float) -> str:
    """The first test that fails, or nothing."""
    order = copy / ".mutants-order"
    order.write_text("\n".join(tests))
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    command = [
        str(copy / ".venv/bin/python"),
        "-m",
        "pytest",
        "-x",
        "-p",
        "touching",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    more = {"MUTANTS_ORDER": str(order), "PYTHONDONTWRITEBYTECODE": "1"}
    limit = 60 + HANG * seconds
    process = subprocess.Popen(
        [*command, "--timeout", "100", "-o", "addopts=-q --tb=no -rfE"],
        cwd=copy,
        env=with_tools(more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"hangs: not done after {limit:.0f} s"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    if failed:
        return failed[1]
    return "" if process.returncode == 0 else f"pytest says {process.returncode}: {said[-200:]}"


def judge_all(args: argparse.Namespace) -> None:
    """Every chosen mutant in turn; what is found is written at once."""
    copy, results = Path(args.copy).resolve(), Path(args.out) / args.results
    tree, touched = Tree(copy), Touched(Path(args.out), copy)
    done = json.loads(results.read_text()) if results.exists() else {}
    for mutant in read_kept():
        if str(mutant.id) in done or not chosen_by(args, mutant.id):
            continue
        found, started = tree.find(mutant), time.monotonic()
        first = (mutant.by,) if mutant.by else ()
        verdict = judge(mutant, found, touched, tree, copy, first) if found else ("lost", "")
        done = json.loads(results.read_text()) if results.exists() else {}
        done[str(mutant.id)] = verdict
        results.write_text(json.dumps(done, indent=1))
        spent = time.monotonic() - started
        print(f"{mutant.id:3} {spent:5.0f} s  {mutant.operator:12} {verdict[0]:9} {verdict[1]}", flush=True)


def chosen_by(args: argparse.Namespace, id: int) -> bool:
    if args.only:
        return id in {int(one) for one in args.only.split(",")}
    part, of = map(int, args.part.split("/"))
    return id % of == part


def read_kept() -> list[Mutant]:
    return [Mutant(**one) for one in json.loads(KEPT.read_text())["mutants"]]


def write_kept(mutants: list[Mutant], **about: object) -> None:
    KEPT.write_text(json.dumps({**about, "mutants": [asdict(one) for one in mutants]}, indent=1) + "\n")


def take_in(args: argparse.Namespace) -> None:
    """Write verdicts of `judge` into the kept file: of the whole suite, or of the fast one."""
    kept = json.loads(KEPT.read_text())
    verdicts = {
        int(id): verdict
        for name in args.results
        for id, verdict in json.loads(Path(name).read_text()).items()
    }
    mutants = [
        replace(
            one,
            **dict(
                zip(("fast", "fast_by") if args.fast else ("verdict", "by"), verdicts.get(one.id, ("", "")))
            ),
        )
        for one in read_kept()
    ]
    write_kept(mutants, **{name: value for name, value in kept.items() if name != "mutants"})


def tell_table() -> None:
    mutants, rooms = read_kept(), Counter[tuple[str, str]]()
    for one in mutants:
        for column in ("all", f"verdict {one.verdict}", f"fast {one.fast}"):
            rooms[room_of(one.path), column] += 1
            rooms["all rooms", column] += 1
    columns = sorted({column for _, column in rooms})
    print("| room | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for room in sorted({room for room, _ in rooms}):
        print(f"| {room} | " + " | ".join(str(rooms[room, column] or "") for column in columns) + " |")


def find_all() -> None:
    tree = Tree(ROOT)
    for mutant in read_kept():
        found = tree.find(mutant)
        place = (
            f"{found.how:8} {found.path}:{found.line} {found.new.strip()}"
            if found
            else f"LOST {mutant.function} {mutant.old.strip()}"
        )
        print(f"{mutant.id:3} {place}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    sampling = verbs.add_parser("sample")
    sampling.add_argument("--seed", type=int, default=18)
    sampling.add_argument("--count", type=int, default=100)
    recording = verbs.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("tests", nargs="*")
    judging = verbs.add_parser("judge")
    judging.add_argument("out")
    judging.add_argument("copy")
    judging.add_argument("--results", default="verdicts.json")
    judging.add_argument("--only", default="")
    judging.add_argument("--part", default="0/1", help="every so manieth: 0/2 and 1/2 are two halves")
    taking = verbs.add_parser("take")
    taking.add_argument("results", nargs="+")
    taking.add_argument("--fast", action="store_true")
    verbs.add_parser("find")
    verbs.add_parser("table")
    args = parser.parse_args()
    if args.verb == "sample":
        print(f"seed {args.seed}")
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        write_kept(sample(ROOT, args.count, args.seed), seed=args.seed, sampled_from=commit)
    elif args.verb == "record":
        record(args.out.resolve(), args.tests)
    else:
        acts: dict[str, Callable[[], None]] = {
            "judge": lambda: judge_all(args), "take": lambda: take_in(args),
            "find": find_all, "table": tell_table,
        }  # fmt: skip
        acts[args.verb]()


if __name__ == "__main__":
    main()
