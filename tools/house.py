"""Reports how large the source tree is, room by room, and whether its imports form circles.

python tools/house.py sizes
python tools/house.py features    # lines by feature, as docs/results/house.toml says which files make one
python tools/house.py budgets     # statements of each room, and its budget (tools/house.toml)
python tools/house.py budgets --write --reason "..."    # give rooms the budgets that they need now
python tools/house.py words       # words of the private dialect, by room
python tools/house.py gate        # 1 for an import circle (lazy ones count) or a room above its budget
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median, quantiles

from budgets import (
    Budget,
    over_budget,
    parse_budgets,
    python_size,
    renewed,
    table_size,
    written_budgets,
)
from dialect import dialect_report

# Import roots of the product and the lab.
ROOTS = ("shared", "app", "lab", "services/master", "services/worker", "services/drafter")
# Folder of generated files, which are left out.
GENERATED = "shared/specsot/v1/"
# Matches an import statement at the beginning of a line, lazy ones too.
IMPORT = re.compile(r"^[ \t]*((?:from [\w.]+ )?import (?:\([^)]*\)|.+))", re.MULTILINE)
MAX_LINES = 500  # Lines of a file of the product or the lab. The gate warns of more. Untuned.
MAX_CORE_LINES = 9000  # Lines of the core path in docs/walk.md. The gate warns of more. Untuned.
# Page that lists the core path, and file of the budgets.
WALK, BUDGETS = "docs/walk.md", "tools/house.toml"


@dataclass(frozen=True)
class House:
    """The files of the work tree that git does not ignore and nothing generates.

    files: Sources of the Python files, by path.
    tables: Texts of the TOML files of the product and the lab, by path.
    """

    files: dict[str, str]
    tables: dict[str, str]

    @staticmethod
    def read(root: Path) -> House:
        """Return the files of a work tree.

        root: Root folder of the repository.

        Files that are listed but do not exist, and generated ones, are left out. `tables` leaves out
        pyproject.toml. Raises CalledProcessError if git fails.
        """
        command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z", "*.py", "*.toml"]
        listed_paths = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
        paths = [path for path in listed_paths if (root / path).is_file() and not path.startswith(GENERATED)]
        texts = {path: (root / path).read_text(encoding="utf-8") for path in paths}
        tables = {
            path: text
            for path, text in texts.items()
            if path.endswith(".toml") and path.startswith(ROOTS) and not path.endswith("pyproject.toml")
        }
        return House({path: text for path, text in texts.items() if path.endswith(".py")}, tables)

    @property
    def modules(self) -> dict[str, str]:
        """Return the path of each module of the product and the lab, by dotted name."""
        return {name: path for path in self.files if (name := module_of(path))}


def module_of(path: str) -> str | None:
    """Return the dotted name of a file below an import root; None for any other file.

    path: Path of the file in the repository.

    "shared/specsot/core/tree.py" -> "specsot.core.tree"; a package's __init__.py has the name of the package.
    """
    for root in ROOTS:
        if path.startswith(root + "/"):
            below = path.removeprefix(root + "/")
            return below.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return None


# Circles --------------------


def edges_of(house: House) -> dict[str, set[str]]:
    """Return for each module which modules it imports, lazily or for types too.

    house: Files of the work tree.

    A module is never among its own imports, and one that imports no other module has an empty set. Modules
    outside of the work tree are left out.
    """
    modules = house.modules
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        nodes = imports_of(house.files[path])
        edges[module] = {target for node in nodes for target in targets(node, modules)} - {module}
    return edges


def imports_of(text: str) -> list[ast.stmt]:
    """Return a file's import statements, lazy ones too. Only they are parsed, since the whole tree takes two
    seconds.

    text: Source of the file.

    If a line that looks like an import cannot be parsed, the whole file is, and all of its statements are
    returned, of which `targets` ignores those that import nothing.
    """
    try:
        return [node for statement in IMPORT.findall(text) for node in ast.parse(statement).body]
    # Lines of a docstring may begin with the word "import".
    except SyntaxError:
        return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]


def targets(node: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    """Yield the modules that a statement imports; none for other statements, and for modules that are not in
    the work tree.

    node: The statement.
    modules: Paths of the modules by dotted name.

    `from package import name` yields the module package.name if there is one, else the package itself.
    """
    match node:
        case ast.ImportFrom(module=str(module)):
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield from (name for name in ([full] if full in modules else [module]) if name in modules)
        case ast.Import():
            yield from (alias.name for alias in node.names if alias.name in modules)
        case _:
            pass


def circles(house: House) -> list[list[str]]:
    """Return the strongly connected sets of more than one module (Tarjan), largest first; none if no imports
    form a circle.

    house: Files of the work tree.

    Each set is sorted by name.
    """
    edges = edges_of(house)
    number: dict[str, int] = {}
    lowest_reached: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        """Number a module and all modules that it reaches, and record the sets that are complete.

        module: Dotted name of the module.
        """
        number[module] = lowest_reached[module] = len(number)
        stack.append(module)
        for target in sorted(edges.get(module, ())):
            if target not in number:
                visit(target)
                lowest_reached[module] = min(lowest_reached[module], lowest_reached[target])
            elif target in stack:
                lowest_reached[module] = min(lowest_reached[module], number[target])
        if lowest_reached[module] == number[module]:
            start = stack.index(module)
            components.append(stack[start:])
            del stack[start:]

    for module in sorted(edges):
        if module not in number:
            visit(module)
    return sorted((sorted(ring) for ring in components if len(ring) > 1), key=len, reverse=True)


def shortest_circle(house: House, ring: list[str]) -> list[str]:
    """Return one shortest way round a circle, with the first module also at the end.

    house: Files of the work tree.
    ring: Set of modules as `circles` returns it.

    Ways are searched breadth first. If no way leads back, which a set of `circles` excludes, the set itself
    is returned.
    """
    edges = edges_of(house)
    start = ring[0]
    paths = [[start]]
    while paths:
        path = paths.pop(0)
        for target in sorted(edges[path[-1]] & set(ring)):
            if target == start:
                return [*path, start]
            if target not in path:
                paths.append([*path, target])
    return ring


# Sizes --------------------


def room_of(path: str) -> str:
    """Return the room of a file: folders one below the package are rooms. `shared/specsot/core/tree.py` ->
    `shared/specsot/core`.

    path: Path of the file in the repository.

    A file that lies above its room's depth has the folder that it is in; a file of the root has "".
    """
    parts = path.split("/")
    depth = 3 if parts[0] == "services" else 2
    return "/".join(parts[: min(depth + 1, len(parts) - 1)])


def sizes(house: House) -> str:
    """Return a table of files, lines, median, p90 and longest file, and classes: per room, for product, lab
    and tests; then the import circles.

    house: Files of the work tree.

    Generated files are not counted. Each circle has a line with one shortest way round it.
    """
    product = {p: t for p, t in house.files.items() if p.startswith(ROOTS) and not p.startswith("lab/")}
    lab = {path: text for path, text in house.files.items() if path.startswith("lab/")}
    rooms = sorted({room_of(path) for path in product | lab})
    rows = [
        row(room, {path: text for path, text in (product | lab).items() if room_of(path) == room})
        for room in rooms
    ]
    tops = sorted({room.rpartition("/")[0] if room.count("/") > 1 else room for room in rooms})
    product_rows = [
        row(f"all of {top}", {p: t for p, t in (product | lab).items() if p.startswith(top + "/")})
        for top in tops
    ]
    tests = {path: text for path, text in house.files.items() if path.startswith("tests/")}
    rows += ["", *product_rows, "", row("PRODUCT", product), row("LAB", lab), row("tests", tests)]
    rings = circles(house)
    rows += [
        "",
        f"{len(rings)} import circles (lazy imports counted)",
        *(" -> ".join(shortest_circle(house, ring)) for ring in rings),
    ]
    return "\n".join([f"{'room':44} {'files':>5} {'lines':>6} {'median/p90/max':>15} {'classes':>7}", *rows])


def row(name: str, texts: dict[str, str]) -> str:
    """Return one line of that table.

    name: Name of the room. texts: Sources of its files by path; empty: the line has only the name and 0
    files.

    p90 is the ninth decile of the lines of a file; with one file, the lines of that file.
    """
    lines = [text.count("\n") for text in texts.values()]
    classes = sum(
        isinstance(node, ast.ClassDef) for text in texts.values() for node in ast.walk(ast.parse(text))
    )
    if not lines:
        return f"{name:44} {0:5}"
    p90 = quantiles(lines, n=10)[-1] if len(lines) > 1 else lines[0]
    line_figures = f"{median(lines):.0f}/{p90:.0f}/{max(lines)}"
    return f"{name:44} {len(lines):5} {sum(lines):6} {line_figures:>15} {classes:7}"


# Budgets --------------------


def room_sizes(house: House) -> dict[str, int]:
    """Return the statements by room: of the product, the lab and the tools; tests have no budget.

    house: Files of the work tree.

    Files of the root are in the room ".". The values of a TOML file count one each.
    """
    size_by_room: dict[str, int] = {}
    for path, text in (house.files | house.tables).items():
        if not path.startswith("tests/"):
            size = python_size(text) if path.endswith(".py") else table_size(tomllib.loads(text))
            room = room_of(path) or "."
            size_by_room[room] = size_by_room.get(room, 0) + size
    return size_by_room


def read_budgets(root: Path) -> dict[str, Budget] | None:
    """Return the budgets by room; None if the tree has no file of budgets.

    root: Root folder of the repository.
    """
    page = root / BUDGETS
    return parse_budgets(page.read_text(encoding="utf-8")) if page.is_file() else None


def budget_report(sizes: dict[str, int], budgets: dict[str, Budget]) -> str:
    """Return a table of each room's statements and budget; a room without budget has 0.

    sizes: Number of statements by room.
    budgets: Budgets by room.

    The last line is the sum of all rooms. Rooms that have a budget and no files are left out.
    """
    rows = [f"{'room':44} {'now':>6} {'budget':>6}"]
    for room, size in sorted(sizes.items()):
        allowed = budgets[room].statements if room in budgets else 0
        rows.append(f"{room:44} {size:6} {allowed:6}")
    return "\n".join([*rows, f"{'ALL':44} {sum(sizes.values()):6}"])


def write_budgets(root: Path, sizes: dict[str, int], reason: str | None) -> int:
    """Write the budgets that are needed now; return 2, after a line, if a reason is needed and missing, else
    0.

    root: Root folder of the repository.
    sizes: Number of statements by room.
    reason: Reason for which rooms need more; None: no reason was given.

    An existing file is replaced; nothing is written if 2 is returned.
    """
    try:
        budgets = renewed(sizes, read_budgets(root) or {}, reason)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    (root / BUDGETS).parent.mkdir(exist_ok=True)
    (root / BUDGETS).write_text(written_budgets(budgets), encoding="utf-8")
    return 0


def words(house: House) -> str:
    """Return the report of the dialect's words by room, of the product alone.

    house: Files of the work tree.

    A room with no file of the product has no line.
    """
    rooms: dict[str, list[str]] = {}
    for path, text in house.files.items():
        if path.startswith(ROOTS) and not path.startswith("lab/"):
            rooms.setdefault(room_of(path), []).append(text)
    return dialect_report(rooms)


def features(house: House, page_text: str) -> str:
    """Return a row for each feature, largest first; then a line for each file that belongs to no feature.

    house: Files of the work tree.
    page_text: Text of a page like docs/results/house.toml.

    A file belongs to the first feature one of whose patterns matches its path below its import root. Lines of
    features without files have 0. Raises KeyError for a page without features.
    """
    feature_tables = tomllib.loads(page_text)["feature"]
    paths_of: dict[str, list[str]] = {feature["name"]: [] for feature in feature_tables}
    homeless = list[str]()
    for path in house.modules.values():
        root = next(root for root in ROOTS if path.startswith(root + "/"))
        below = path.removeprefix(root + "/")
        matching = (
            feature["name"]
            for feature in feature_tables
            if any(fnmatchcase(below, pattern) for pattern in feature["files"])
        )
        paths_of.get(next(matching, ""), homeless).append(path)
    lines = {name: sum(house.files[path].count("\n") for path in paths) for name, paths in paths_of.items()}
    sorted_features = sorted(feature_tables, key=lambda feature: -lines[feature["name"]])
    rows = [
        f"| {name} | {len(paths_of[name])} | {lines[name]:,} | {feature['asked']} | {feature['without']} |"
        for feature in sorted_features
        for name in [feature["name"]]
    ]
    head = "| feature | files | lines | asked for by | without it |\n|---|---|---|---|---|"
    return "\n".join([head, *rows, *(f"{path} is of no feature" for path in homeless)])


def main(arguments: list[str] | None = None, root: Path | None = None) -> int:
    """Run the command; return the exit status.

    arguments: Words of the command line; None: those of this process.
    root: Root folder of the repository; None: this repository.

    The status is 0, except for "gate" (1 if there is a problem) and "budgets --write" (2 if a reason is
    missing). An unknown verb or option ends the process with the status 2.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=["sizes", "features", "budgets", "words", "gate"])
    parser.add_argument("--write", action="store_true", help="budgets: write those that are needed now")
    parser.add_argument("--reason", help="budgets --write: why rooms need more, in one line")
    options = parser.parse_args(arguments)
    root = root or Path(__file__).resolve().parents[1]
    house = House.read(root)
    match options.verb:
        case "sizes":
            print(sizes(house))
        case "features":
            page = root / "docs" / "results" / "house.toml"
            print(features(house, page.read_text(encoding="utf-8")))
        case "budgets" if options.write:
            return write_budgets(root, room_sizes(house), options.reason)
        case "budgets":
            print(budget_report(room_sizes(house), read_budgets(root) or {}))
        case "words":
            print(words(house))
        case _:
            return gate(house, root)
    return 0


def gate(house: House, root: Path) -> int:
    """Print every problem (an import circle, or a room above its budget) and every warning; return 1 if there
    is a problem, else 0.

    house: Files of the work tree.
    root: Root folder of the repository.

    Warnings, of long files and of a long core path, do not fail. Without a file of budgets, budgets are not
    checked.
    """
    problems = [" -> ".join(shortest_circle(house, ring)) for ring in circles(house)]
    budgets = read_budgets(root)
    if budgets is not None:
        problems += over_budget(room_sizes(house), budgets)
    warnings = [f"files with more than {MAX_LINES} lines: {len(long)}"] if (long := too_long(house)) else []
    if (lines := core_lines(root)) > MAX_CORE_LINES:
        warnings.append(f"the core path in {WALK} has {lines:,} lines, more than {MAX_CORE_LINES:,}")
    for line in (*problems, *(f"warning: {warning}" for warning in warnings)):
        print(line)
    return bool(problems)


def core_lines(root: Path) -> int:
    """Return the number of lines of the files that docs/walk.md lists as the core; 0 if the tree has no such
    page.

    root: Root folder of the repository.

    Only the section "The core" is read, of which each numbered line names a file. Files that do not exist
    count 0.
    """
    page = root / WALK
    if not page.is_file():
        return 0
    core = page.read_text(encoding="utf-8").partition("\n## The core")[2].partition("\n## ")[0]
    files = [root / path for path in re.findall(r"^\d+\. `([^`]+)`", core, re.MULTILINE)]
    return sum(file.read_text(encoding="utf-8").count("\n") for file in files if file.is_file())


def too_long(house: House) -> list[str]:
    """Return the paths of modules with more than MAX_LINES lines, sorted.

    house: Files of the work tree.
    """
    return sorted(path for path in house.modules.values() if house.files[path].count("\n") > MAX_LINES)


if __name__ == "__main__":
    sys.exit(main())
