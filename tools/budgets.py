"""Counts the statements of each room, and reads and writes their budgets, for `tools/house.py budgets`.

Statements are counted, and of an assignment the names that it assigns: `a, b = x, y` counts as much as
`a = x` and `b = y`. Docstrings and comments are free. The values of a TOML table count one each, so that code
does not disappear by becoming data.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Part of its count by which a budget may exceed it, so that a line more or less needs no new budget. Untuned.
MARGIN = 0.02
# First lines of the file of budgets.
HEAD = """\
# How many statements each room may have, and why it was given more. `python tools/house.py gate` fails if a
# room has more. Written by `python tools/house.py budgets --write --reason "..."`: a room that has become
# smaller gets a smaller budget, a room that needs more gets it with the reason.
"""


@dataclass(frozen=True)
class Budget:
    """The budget of a room.

    statements: Maximum number of statements.
    reasons: One line for each time that the maximum was raised, oldest first.
    """

    statements: int
    reasons: tuple[str, ...] = ()


def python_size(text: str) -> int:
    """Return the size of a Python file: the number of its statements, where an assignment counts as many as
    the names that it assigns.

    text: Source of the file.
    """
    tree = ast.parse(text)
    # Expressions, nine of ten nodes, count only for the names that `:=` assigns.
    return sum(map(_size_of, ast.walk(tree) if ":=" in text else _statements_of(tree)))


def _statements_of(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield every statement of a file, and what has statements within it.

    tree: The syntax tree of the file.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, part, ())


def _size_of(node: ast.AST) -> int:
    """Return the count of one node of the syntax tree: statements 1, assignments the number of names,
    docstrings and expressions 0.

    node: The node, without the nodes within it.

    `a, b = x, y` counts 2, and so does `del a, b`; a `with` counts its context managers; `:=` counts 1.
    """
    match node:
        # A docstring.
        case ast.Expr(value=ast.Constant(value=str())):
            return 0
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return sum(map(_names_in, targets))
        case ast.With(items=items) | ast.AsyncWith(items=items):
            return len(items)
        case ast.stmt() | ast.NamedExpr():
            return 1
        case _:
            return 0


def _names_in(target: ast.expr) -> int:
    """Return how many names an assignment's target has: `a, (b, c)` -> 3.

    target: A target of the assignment.

    Anything but a tuple or a list counts 1, also an attribute, an index or `*rest`.
    """
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return sum(map(_names_in, parts))
        case _:
            return 1


def table_size(value: Any) -> int:
    """Return the number of values in a TOML table, those of inner tables and arrays included.

    value: A table, an array, or a single value, which counts 1.

    An empty table or array counts 0.
    """
    match value:
        case dict():
            return sum(map(table_size, value.values()))
        case list():
            return sum(map(table_size, value))
        case _:
            return 1


def over_budget(sizes: Mapping[str, int], budgets: Mapping[str, Budget]) -> list[str]:
    """Return a line for each room that has more than its budget or none at all; no lines if all is well.

    sizes: Statements by room.
    budgets: Budgets by room.

    Rooms are in the order of their names. A room with a budget and no size has no line. Each line says how to
    raise the budget.
    """
    lines: list[str] = []
    remedy = 'raise it in this commit: python tools/house.py budgets --write --reason "..."'
    for room, size in sorted(sizes.items()):
        if room not in budgets:
            lines.append(f"{room} has {size:,} statements and no budget: {remedy}")
        elif size > (allowed := budgets[room].statements):
            excess = size - allowed
            lines.append(
                f"{room} has {size:,} statements, {excess:,} above its budget of {allowed:,}: {remedy}"
            )
    return lines


def renewed(sizes: Mapping[str, int], budgets: Mapping[str, Budget], reason: str | None) -> dict[str, Budget]:
    """Return the budgets for these sizes; a room that shrank gets less.

    sizes: Statements by room.
    budgets: The present budgets by room.
    reason: Reason for which rooms need more; None: no room may have more.
    Raises ValueError if a room needs more and no reason is given.

    A new budget is the size plus the fraction MARGIN; a room that has not grown beyond its budget keeps the
    smaller of the old and the new one, and its reasons. A reason that is equal to the last one is not added
    again. Rooms without a size lose their budget.
    """
    new_budgets: dict[str, Budget] = {}
    for room, size in sizes.items():
        old = budgets.get(room, Budget(0))
        with_margin = Budget(int(size * (1 + MARGIN)))
        if size <= old.statements:
            new_budgets[room] = Budget(min(old.statements, with_margin.statements), old.reasons)
        elif reason:
            reasons = old.reasons if reason in old.reasons[-1:] else (*old.reasons, reason)
            new_budgets[room] = Budget(with_margin.statements, reasons)
        else:
            raise ValueError(f"{room} needs a larger budget: give the --reason")
    return new_budgets


def parse_budgets(text: str) -> dict[str, Budget]:
    """Return the budgets in a TOML file, by room.

    text: Text of the file.
    """
    tables = tomllib.loads(text)
    return {room: Budget(table["statements"], tuple(table["reasons"])) for room, table in tables.items()}


def written_budgets(budgets: Mapping[str, Budget]) -> str:
    """Return the text of a TOML file, sorted by room.

    budgets: Budgets by room.

    The text begins with HEAD, and `parse_budgets` reads it back.
    """
    tables: list[str] = []
    for room, budget in sorted(budgets.items()):
        reasons = "".join(f"    {json.dumps(reason, ensure_ascii=False)},\n" for reason in budget.reasons)
        tables.append(f'\n["{room}"]\nstatements = {budget.statements}\nreasons = [\n{reasons}]\n')
    return HEAD + "".join(tables)
