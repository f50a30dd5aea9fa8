"""Moves, merges and renames the house by tables, and rewrites every reference to what it moved.

    python tools/restructure.py check  tools/moves/30_master.toml   # a dry run
    python tools/restructure.py apply  tools/moves/30_master.toml --only names  # words, modules
    python tools/restructure.py refs     # references only: after merging a moved main
    python tools/restructure.py sizes | circles [MODULE-PREFIX...]  # the report; a gate

A table, any part of it:

    [names]      # with the modules' names of the moment when this part is applied: usually before [modules]
    "specsot_worker.part:WorkerPart" = "Worker"          # class, function, constant at the top of a module
    "specsot_worker.part:WorkerPart.hear" = "receive"    # a member; refused where others have `hear`
    "*.lie_down" = "pause"                               # this attribute, field or method in every class
    [modules]
    "specsot_worker.part" = "specsot_worker.worker"      # a move; to what exists, or twice to one: a merge
    "specsot_app.bench.*" = "specsot_lab.bench.*"        # a package with all it holds, data too
    [docstrings]
    "specsot_worker.worker" = "Turns one worker's part of the ring."    # of a merge, a move, a new package
    [options]
    keep_strings = ["services/master/specsot_master/gateway/*"]  # strings here are not module names
    [[words]]
    files = ["services/worker/specsot_worker/*.py"]      # renames of identifiers, never in strings
    old = "patience"
    new = "draft_timeout"

Files of a merge follow the table's order (the standing target first if not listed); what is needed while
importing comes first all the same. `apply` marks the table (`applied = [...]`), formats what it changed
and says what to look at by hand. It commits nothing.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from io import StringIO
from pathlib import Path
from tokenize import NAME, STRING, generate_tokens

from house import ALARM, House, circles, module_of, sizes, top_level, way_round
from merging import clashes, merged, part_of
from references import Plan, Rewriter, in_braces
from tables import Table, Word, plan_of

KINDS = ("names", "words", "modules")
HISTORY = (
    "CHANGELOG.md",
    "docs/results/*",
    "tools/*",
    "tests/golden/*.json",
    "tests/vectors/*",
    "tests/fuzz/corpus/*",
    "protos/*",
    "*.json",
)


# Doing it to the tree in memory --------------------


def rewritten(house: House, plan: Plan) -> House:
    """All references under a plan; files stay where they are."""
    files = dict(house.files)
    touched = words_of(plan)
    for path, text in house.python():
        if not fnmatch(path, "tools/*") and (touched.search(text) or module_of(path) in plan.modules):
            files[path] = Rewriter(plan, path, text).text()
    paths, ticked = moved_paths(house, plan), unmistakable(plan)
    for path, text in files.items():
        if text is not None and not any(fnmatch(path, glob) for glob in HISTORY):
            files[path] = in_document(plan, paths, ticked, path, text)
    return replace(house, files=files)


def words_of(plan: Plan) -> re.Pattern[str]:
    """What a file must say somewhere to be worth reading."""
    words = (
        {old.rpartition(".")[2] for old in plan.modules}
        | set(plan.attributes)
        | {name for _, name in plan.names}
    )
    return re.compile(rf"\b({'|'.join(map(re.escape, sorted(words))) or '(?!)'})\b")


def moved_paths(house: House, plan: Plan) -> dict[str, str]:
    """Old path -> new path, from the repository's root and from the import root."""
    found: dict[str, str] = {}
    for old, new in plan.modules.items():
        there = house.modules.get(new) or house.path_of(new)
        here = house.modules.get(old) or house.path_of(old)
        top = old.partition(".")[0]
        if here.endswith("/__init__.py"):
            found[here.removesuffix("__init__.py")] = (
                there.removesuffix(".py").removesuffix("__init__").rstrip("/") + "/"
            )
        found[here] = there
        found[here[here.index(top) :]] = there[there.index(new.partition(".")[0]) :]
    return {old: new for old, new in found.items() if old != new}


def in_document(plan: Plan, paths: dict[str, str], ticked: dict[str, str], path: str, text: str) -> str:
    """Paths everywhere; dotted and backticked names outside Python."""
    if paths:
        words = "|".join(re.escape(old) for old in sorted(paths, key=len, reverse=True))
        text = re.sub(rf"(?<![\w./-])({words})(?![\w])", lambda found: paths[found[1]], text)
    if path.endswith(".py"):
        return text
    text = plan.in_text(text)
    if path.endswith(".md"):
        for old, new in ticked.items():
            text = text.replace(f"`{old}`", f"`{new}`")
    return without_repeats(text) if path == "pyproject.toml" else text


def unmistakable(plan: Plan) -> dict[str, str]:
    """Renamed names that no second module defines: safe to follow in documents. Late, none is: a document
    that came since may mean anything else by the word.
    """
    if plan.late:
        return {}
    defined = [
        name for _, text in plan.house.python() for name, origin in top_level(text).items() if origin is None
    ]
    return {old: new for (_, old), new in plan.names.items() if defined.count(old) <= 1}


def without_repeats(text: str) -> str:
    """Lines of one list that a merge has made equal."""
    kept: list[str] = []
    seen: set[str] = set()
    for line in text.splitlines(keepends=True):
        if line.strip() in ("]", "") or line.rstrip().endswith("["):
            seen.clear()
        if not (line.startswith('    "') and line in seen):
            kept.append(line)
        seen.add(line)
    return "".join(kept)


def relocated(house: House, plan: Plan, table: Table) -> House:
    """Files where the plan wants them; several for one module are merged."""
    modules = house.modules
    gathered: dict[str, list[str]] = {}
    for old, new in plan.modules.items():
        if new in modules and new not in plan.modules and new not in gathered:
            gathered[new] = [new]  # the standing target first
        gathered.setdefault(new, []).append(old)
    now = replace(house, files=dict(house.files), moved={})
    for olds in gathered.values():
        for old in olds:
            now.files.pop(modules[old], None)
    packages = {
        ".".join(new.split(".")[:depth]) for new in gathered for depth in range(1, new.count(".") + 1)
    }
    for new, olds in gathered.items():
        path = destination(
            now,
            new,
            packages | {o for o in olds if modules[o].endswith("/__init__.py") and o == new},
            house,
            olds,
        )
        texts = [house.files[modules[old]] or "" for old in olds]
        now.files[path] = (
            texts[0] if len(olds) == 1 else joined(plan, olds, modules, texts, table.docstrings.get(new))
        )
        if len(olds) == 1 and new in table.docstrings:
            now.files[path] = with_docstring(texts[0], table.docstrings[new])
    with_data(house, now, plan)
    return with_packages(now, table, plan)


def destination(now: House, new: str, packages: set[str], house: House, olds: list[str]) -> str:
    path = now.path_of(new)
    package = new in packages or (len(olds) == 1 and house.modules[olds[0]].endswith("/__init__.py"))
    return (
        path.removesuffix(".py") + "/__init__.py" if package and not path.endswith("/__init__.py") else path
    )


def joined(
    plan: Plan, olds: list[str], modules: dict[str, str], texts: list[str], docstring: str | None
) -> str:
    parts = [part_of(modules[old], text) for old, text in zip(olds, texts)]
    plan.refused += clashes(parts)
    return merged(parts, docstring)


def with_docstring(text: str, docstring: str) -> str:
    """The text with this in place of its docstring."""
    first = next(iter(ast.parse(text).body), None)
    rest = text.splitlines(keepends=True)
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        rest = rest[first.end_lineno or 0 :]
    return f'"""{docstring}"""\n' + ("\n" if rest and rest[0].strip() else "") + "".join(rest)


def with_data(house: House, now: House, plan: Plan) -> None:
    """What is not Python in a package that moved as a whole."""
    modules = house.modules
    for old, new in plan.modules.items():
        if modules[old].endswith("/__init__.py") and old not in now.modules:
            here = modules[old].removesuffix("__init__.py")
            there = now.path_of(new).removesuffix("__init__.py").removesuffix(".py").rstrip("/") + "/"
            for path in [path for path in now.files if path.startswith(here) and not path.endswith(".py")]:
                below = path.removeprefix(here)
                if not any(
                    modules[o].startswith(here + below.partition("/")[0] + "/")
                    for o in plan.modules
                    if "/" in below and o != old and o.startswith(old + ".")
                ):
                    now.files[there + below] = now.files.pop(path)
                    if now.files[there + below] is None:
                        now.moved[there + below] = path


def with_packages(now: House, table: Table, plan: Plan) -> House:
    """An `__init__` where one is wanted, none where a package is empty."""
    modules = now.modules
    for new in set(plan.modules.values()):
        for depth in range(1, new.count(".") + 1):
            package = ".".join(new.split(".")[:depth])
            if package not in modules:
                path = now.path_of(package)
                docstring = table.docstrings.get(package, "")
                now.files[path] = f'"""{docstring}"""\n' if docstring else ""
                modules = now.modules
    for old in sorted(plan.modules, key=len, reverse=True):
        package = old.rpartition(".")[0]
        path = now.modules.get(package, "")
        folder = path.removesuffix("__init__.py")
        if path.endswith("/__init__.py") and not any(p.startswith(folder) and p != path for p in now.files):
            if any(not isinstance(node, ast.Expr) for node in ast.parse(now.files[path] or "").body):
                plan.noted.append(f"{path}: its package is empty, but it says something")
            else:
                del now.files[path]
    return now


def worded(house: House, words: Iterable[Word], formerly: dict[str, str] | None = None) -> House:
    """Identifiers renamed in the files that a pattern names; `formerly`: path -> path then."""
    files = dict(house.files)
    for word in words:
        for path, text in files.items():
            before = (formerly or {}).get(path, path)
            if (
                text
                and path.endswith(".py")
                and word.old in text
                and any(fnmatch(before, glob) for glob in word.files)
            ):
                files[path] = retoken(text, word)
    return replace(house, files=files)


def retoken(text: str, word: Word) -> str:
    """One identifier renamed, in the fields of f-strings too."""
    lines = text.splitlines(keepends=True)
    for token in reversed(list(generate_tokens(StringIO(text).readline))):
        row, column = token.start
        if token.type == NAME and token.string == word.old:
            line = lines[row - 1]
            lines[row - 1] = line[:column] + word.new + line[column + len(word.old) :]
        elif (
            token.type == STRING
            and "f" in token.string.partition(token.string[-1])[0].lower()
            and row == token.end[0]
        ):
            line, last = lines[row - 1], token.end[1]
            lines[row - 1] = line[:column] + in_braces(token.string, {(word.old, word.new)}) + line[last:]
    return "".join(lines)


# What still points nowhere --------------------


def lost(house: House) -> Iterator[str]:
    """Imports of ours that find nothing, in the product, the laboratory and the tests."""
    modules = house.modules
    ours = {name.partition(".")[0] for name in modules}
    packages = {name.rpartition(".")[0] for name in modules}
    for path, text in house.python():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in ours:
                tops = house.tops(node.module)
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    if (
                        full not in modules
                        and full not in packages
                        and alias.name not in tops
                        and "__getattr__" not in tops
                        and ".v1" not in node.module
                    ):
                        yield f"{path}:{node.lineno}: no {alias.name} in {node.module}"


# Verbs --------------------


def one_kind(house: House, table: Table, kind: str) -> tuple[House, Plan]:
    if kind == "words":
        return worded(house, table.words), Plan(house)
    plan = plan_of(house, table, kind)
    after = rewritten(house, plan)
    return (relocated(after, plan, table) if kind == "modules" else after), plan


def apply(root: Path, table: Table, only: str | None, *, dry: bool) -> int:
    before = now = House.read(root)
    refused: list[str] = []
    kinds = [
        kind for kind in KINDS if getattr(table, kind) and kind not in table.applied and only in (None, kind)
    ]
    for kind in kinds:
        now, plan = one_kind(now, table, kind)
        refused += [f"{kind}: {why}" for why in plan.refused]
        print(*(f"look at {note}" for note in sorted(set(plan.noted))), sep="\n")
    known = set(lost(before))
    refused += [f"lost: {why}" for why in lost(now) if why not in known] if not refused else []
    if refused:
        print(*sorted(set(refused)), sep="\n", file=sys.stderr)
    if dry:
        report(now, table)
    elif not refused:
        tidy(root, now.write(before))
        for kind in kinds:
            Table.read(table.path).mark(kind)
    return bool(refused)


def report(now: House, table: Table) -> None:
    """Circles and the sizes of what the table makes."""
    for ring in circles(now):
        print("circle:", " -> ".join(way_round(now, ring)))
    for module in sorted(set(table.modules.values())):
        text = now.files.get(now.modules.get(module, "")) or ""
        print(f"{text.count(chr(10)):5} {module}{'   too long' if text.count(chr(10)) > ALARM else ''}")


def refs(root: Path) -> int:
    """References only, by every table that is marked applied, in the order of their names."""
    before = now = House.read(root)
    for path in sorted((root / "tools" / "moves").glob("*.toml")):
        table = Table.read(path)
        for kind in table.applied:
            if kind == "words":
                now = worded(now, table.words)
            else:
                plan = plan_of(now, table, kind, late=True)
                now = rewritten(now, plan)
                print(*(f"look at {why}" for why in sorted({*plan.refused, *plan.noted})), sep="\n")
    tidy(root, now.write(before))
    print(*lost(now), sep="\n")
    return 0


LATE_IMPORT = re.compile(
    r"^from (\S+) import (?:\(  # noqa: E402\n((?:    .*\n)+)\)|((?:(?! as )[^(\n])+?)  # noqa: E402)\n",
    re.MULTILINE,
)


def with_late_imports_joined(text: str) -> str:
    """One statement for each module among imports that carry a comment, which ruff would not join."""
    names: dict[str, list[str]] = {}
    for found in LATE_IMPORT.finditer(text):
        listed = (found[2] or found[3]).replace("# noqa: E402", "").replace("\n", " ").split(",")
        names.setdefault(found[1], []).extend(name.strip() for name in listed if name.strip())

    def one(found: re.Match[str]) -> str:
        listed = sorted(set(names.pop(found[1], [])))
        line = f"from {found[1]} import {', '.join(listed)}  # noqa: E402\n"
        if not listed or len(line) <= 111:
            return line if listed else ""
        return (
            f"from {found[1]} import (  # noqa: E402\n" + "".join(f"    {name},\n" for name in listed) + ")\n"
        )

    return LATE_IMPORT.sub(one, text)


def tidy(root: Path, changed: list[str]) -> None:
    """Imports sorted and unused ones dropped, then the house's format; only in files that changed."""
    python = [path for path in changed if path.endswith(".py")]
    for path in (root / path for path in python):
        if "# noqa: E402" in (text := path.read_text(encoding="utf-8")):
            path.write_text(with_late_imports_joined(text), encoding="utf-8")
    if python:
        ruff = [str(Path(sys.executable).parent / "ruff")]
        subprocess.run(
            [*ruff, "check", "--quiet", "--fix", "--select", "I,F401", *python], cwd=root, check=False
        )
        subprocess.run([*ruff, "format", "--quiet", *python], cwd=root, check=False)
    print(f"{len(changed)} files changed")


def main(words: list[str] | None = None, root: Path | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=["apply", "check", "refs", "sizes", "circles"])
    parser.add_argument("table", nargs="*")
    parser.add_argument("--only", choices=KINDS)
    given = parser.parse_args(words)
    root = root or Path(__file__).resolve().parents[1]
    match given.verb:
        case "apply" | "check":
            tables = [Table.read(Path(one).resolve()) for one in given.table]
            return max(apply(root, table, given.only, dry=given.verb == "check") for table in tables)
        case "refs":
            return refs(root)
        case "sizes":
            print(sizes(House.read(root)))
            return 0
        case _:
            house = House.read(root)
            rings = [
                ring
                for ring in circles(house)
                if not given.table or any(m.startswith(tuple(given.table)) for m in ring)
            ]
            print(*(" -> ".join(way_round(house, ring)) for ring in rings), sep="\n")
            return bool(rings)


if __name__ == "__main__":
    sys.exit(main())
