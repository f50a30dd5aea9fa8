"""The source tree as values: its files, modules, top-level names, imports, sizes and import circles.

Used by `restructure.py`; reads the work tree once and writes it back once.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median, quantiles

ROOTS = ("shared", "app", "lab", "services/master", "services/worker", "services/drafter")
GENERATED = "shared/specsot/v1/"
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".cfg", ".txt", ".sh", ".html", ".json", ""}
ALARM = 500  # lines of a file; the gate

Origin = tuple[str, str]  # module, name


@dataclass
class House:
    """Every file of the work tree that git does not ignore: path -> text; None for data that only moves."""

    root: Path
    files: dict[str, str | None]
    moved: dict[str, str] = field(default_factory=dict[str, str])  # data files: new path -> old path
    _known: tuple[tuple[int, int], dict[str, str]] = field(
        default_factory=lambda: ((0, 0), dict[str, str]()), init=False, compare=False
    )
    _tops: dict[str, dict[str, Origin | None]] = field(
        default_factory=dict[str, "dict[str, Origin | None]"], init=False
    )

    @staticmethod
    def read(root: Path) -> House:
        listed = git(root, "ls-files", "-co", "--exclude-standard", "-z").split("\0")
        return House(
            root, {path: text_of(root / path) for path in listed if path and (root / path).is_file()}
        )

    def python(self) -> Iterator[tuple[str, str]]:
        """Every Python file that is not generated: path, text."""
        for path, text in list(self.files.items()):
            if path.endswith(".py") and text is not None and not path.startswith(GENERATED):
                yield path, text

    @property
    def modules(self) -> dict[str, str]:
        """Dotted name -> path, of everything that can be imported; read anew when files came or went."""
        key = (len(self.files), hash(frozenset(self.files)))
        if self._known[0] != key:
            self._known = key, {name: path for path in self.files if (name := module_of(path))}
        return self._known[1]

    def path_of(self, module: str) -> str:
        """Where a module that may not be there yet belongs."""
        top = module.partition(".")[0]
        known = {name.partition(".")[0]: path for name, path in self.modules.items()}
        root = "" if top == "tests" else known[top].rpartition(f"{top}/")[0] if top in known else home_of(top)
        folder = root + module.replace(".", "/")
        return f"{folder}/__init__.py" if self.is_folder(folder) else f"{folder}.py"

    def is_folder(self, folder: str) -> bool:
        return any(path.startswith(folder + "/") for path in self.files)

    def tops(self, module: str) -> dict[str, Origin | None]:
        """A module's top-level names; those it imports with where from."""
        if module not in self._tops:
            path = self.modules.get(module)
            text = self.files.get(path) if path else None
            self._tops[module] = top_level(text) if text else {}
        return self._tops[module]

    def origin(self, module: str, name: str) -> Origin:
        """Where a name is defined that a module may only import."""
        for _ in range(8):
            found = self.tops(module).get(name)
            if found is None:
                break
            module, name = found
        return module, name

    def write(self, before: House) -> list[str]:
        """Bring the work tree from `before` to this; the paths that changed and still stand."""
        for new, old in self.moved.items():
            (self.root / new).parent.mkdir(parents=True, exist_ok=True)
            (self.root / old).rename(self.root / new)
        gone = [path for path in before.files if path not in self.files and (self.root / path).exists()]
        for path in gone:
            (self.root / path).unlink()
        changed = [
            path for path, text in self.files.items() if text is not None and text != before.files.get(path)
        ]
        for path in changed:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(self.files[path] or "", encoding="utf-8")
        return changed


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout


def text_of(path: Path) -> str | None:
    if path.suffix not in TEXT:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def home_of(top: str) -> str:
    """The import root of a top-level package that does not exist yet."""
    return {"specsot": "shared/", "specsot_app": "app/", "specsot_lab": "lab/"}.get(
        top, f"services/{top.removeprefix('specsot_')}/"
    )


def module_of(path: str) -> str | None:
    """The dotted name of a file, if it can be imported."""
    if not path.endswith(".py"):
        return None
    for root in ROOTS:
        if path.startswith(root + "/"):
            return dotted(path.removeprefix(root + "/"))
    return dotted(path) if path.startswith("tests/") else None


def dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def top_level(text: str) -> dict[str, Origin | None]:
    """Name -> where it is imported from, or None if it is defined here."""
    found: dict[str, Origin | None] = {}
    for node in statements(ast.parse(text).body):
        match node:
            case ast.ImportFrom(module=str(module)):
                found |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
            case ast.Import():
                found |= {
                    alias.asname or alias.name.partition(".")[0]: (alias.name, "") for alias in node.names
                }
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found[node.name] = None
            case ast.Assign() | ast.AnnAssign() | ast.For() | ast.With() | ast.AugAssign():
                found |= {
                    name.id: None for name in ast.walk(node) if isinstance(name, ast.Name) and is_store(name)
                }
            case _:
                pass
    return found


def is_store(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs at import time, through `if`, `try` and `with`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
                yield from statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


# Circles --------------------


def edges_of(house: House) -> dict[str, set[str]]:
    """Module -> what it imports, lazily or for types too; tests left out."""
    modules = house.modules
    edges: dict[str, set[str]] = {}
    for path, text in house.python():
        module = module_of(path)
        if module and not module.startswith("tests"):
            found = {target for node in ast.walk(ast.parse(text)) for target in targets(node, modules)}
            edges[module] = found - {module}
    return edges


def targets(node: ast.AST, modules: dict[str, str]) -> Iterator[str]:
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
    """Strongly connected sets of more than one module (Tarjan), largest first."""
    edges = edges_of(house)
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for target in sorted(edges.get(module, ())):
            if target not in number:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], number[target])
        if low[module] == number[module]:
            at = stack.index(module)
            found.append(stack[at:])
            del stack[at:]

    for module in sorted(edges):
        if module not in number:
            visit(module)
    return sorted((sorted(ring) for ring in found if len(ring) > 1), key=len, reverse=True)


def way_round(house: House, ring: list[str]) -> list[str]:
    """One shortest way round a circle, for people."""
    edges = edges_of(house)
    start = ring[0]
    ways = [[start]]
    while ways:
        way = ways.pop(0)
        for target in sorted(edges[way[-1]] & set(ring)):
            if target == start:
                return [*way, start]
            if target not in way:
                ways.append([*way, target])
    return ring


# Sizes --------------------


def room_of(path: str) -> str:
    """`shared/specsot/model/kv.py` -> `shared/specsot/model`: folders one below the package are rooms."""
    parts = path.split("/")
    depth = 3 if parts[0] == "services" else 2
    return "/".join(parts[: min(depth + 1, len(parts) - 1)])


def sizes(house: House) -> str:
    """Files, lines, median, p90 and longest file, classes: per room, for the product and the laboratory."""
    product = {p: t for p, t in house.python() if p.startswith(ROOTS) and not p.startswith("lab/")}
    lab = {path: text for path, text in house.python() if path.startswith("lab/")}
    rooms = sorted({room_of(path) for path in product | lab})
    rows = [
        row(room, {path: text for path, text in (product | lab).items() if room_of(path) == room})
        for room in rooms
    ]
    tops = sorted({room.rpartition("/")[0] if room.count("/") > 1 else room for room in rooms})
    whole = [
        row(f"all of {top}", {p: t for p, t in (product | lab).items() if p.startswith(top + "/")})
        for top in tops
    ]
    tests = {path: text for path, text in house.python() if path.startswith("tests/")}
    rows += ["", *whole, "", row("PRODUCT", product), row("LAB", lab), row("tests", tests)]
    rings = circles(house)
    rows += [
        "",
        f"{len(rings)} import circles (lazy imports counted)",
        *(" -> ".join(way_round(house, ring)) for ring in rings),
    ]
    return "\n".join([f"{'room':44} {'files':>5} {'lines':>6} {'median/p90/max':>15} {'classes':>7}", *rows])


def row(name: str, texts: dict[str, str]) -> str:
    lines = [text.count("\n") for text in texts.values()]
    classes = sum(
        isinstance(node, ast.ClassDef) for text in texts.values() for node in ast.walk(ast.parse(text))
    )
    if not lines:
        return f"{name:44} {0:5}"
    p90 = quantiles(lines, n=10)[-1] if len(lines) > 1 else lines[0]
    spread = f"{median(lines):.0f}/{p90:.0f}/{max(lines)}"
    return f"{name:44} {len(lines):5} {sum(lines):6} {spread:>15} {classes:7}"
