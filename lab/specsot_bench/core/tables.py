"""Writes tables as Markdown and LaTeX; a column defines once, for both, how a row's figures are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
NONE = "-"
# Figures from this one on are written with an exponent.
MANY = 1e5


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    heading: its heading.
    cell: returns a row's cell.
    text: its cells are left-aligned; such columns come first.
    """

    heading: str
    cell: Cell
    text: bool = False


def text(heading: str, key: str) -> Column:
    """Return a column of text."""
    return Column(heading, lambda row: str(row[key]), text=True)


def figure(heading: str, key: str, digits: int = 2, scale: float = 1.0) -> Column:
    """Return a column of figures, times `scale`; `-` where nothing was measured."""

    def cell(row: Row) -> str:
        if (value := row.get(key)) is None:
            return NONE
        return f"{value * scale:.{digits}f}" if value * scale < MANY else f"{value * scale:.1e}"

    return Column(heading, cell)


def cells(columns: Sequence[Column], row: Row) -> list[str]:
    """Return a row's cells. A skipped row says why, after its text columns."""
    if "skipped" not in row:
        return [column.cell(row) for column in columns]
    names = [column.cell(row) for column in columns if column.text]
    return [*names, f"not measured: {row['skipped']}", *[""] * (len(columns) - len(names) - 1)]


def markdown(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Return a Markdown table."""
    headings = [column.heading for column in columns]
    return pipes(headings, (cells(columns, row) for row in rows), sum(column.text for column in columns))


def pipes(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table with aligned columns, so that its source is readable, too.

    left: number of text columns; figures after them are right-aligned. A row whose last cells are empty ends
        with a reason that spans them.
    """
    lines = [list(headings), *map(list, rows)]
    whole = [line for line in lines if line[-1]]
    widths = [max(map(len, column)) for column in zip(*whole)]
    widths[:left] = [max(len(line[place]) for line in lines) for place in range(left)]
    rule = "|".join("-" * (width + 1) + ("-" if place < left else ":") for place, width in enumerate(widths))
    shown = [_line(line, widths, left) for line in lines]
    return "\n".join([shown[0], f"|{rule}|", *shown[1:]])


def _line(line: Sequence[str], widths: Sequence[int], left: int) -> str:
    """Return one line, text left-aligned and figures right-aligned."""
    names = [cell.ljust(width) for cell, width in zip(line[:left], widths)]
    if not line[-1]:
        return f"| {' | '.join([*names, line[left]])} |{' |' * (len(line) - left - 1)}"
    figures = (cell.rjust(width) for cell, width in zip(line[left:], widths[left:]))
    return f"| {' | '.join([*names, *figures])} |"


def latex(caption: str, columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Return a LaTeX table for booktabs, as wide as the page."""
    headings = " & ".join(escape(column.heading) for column in columns)
    body = "\n".join(_latex_line(columns, row) for row in rows)
    return (
        f"\\begin{{table}}\n\\caption{{{escape(caption)}}}\n"
        "\\resizebox{\\textwidth}{!}{%\n"
        f"\\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}\n\\toprule\n"
        f"{headings} \\\\\n\\midrule\n{body}\n"
        "\\bottomrule\n\\end{tabular}}\n\\end{table}"
    )


def _latex_line(columns: Sequence[Column], row: Row) -> str:
    """Return one line of the LaTeX table."""
    name, *figures = cells(columns, row)
    if "skipped" in row:
        return f"{escape(name)} & \\multicolumn{{{len(columns) - 1}}}{{l}}{{{escape(figures[0])}}} \\\\"
    return " & ".join(map(escape, (name, *figures))) + " \\\\"


_SPECIAL = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def escape(text: str) -> str:
    """Escape characters that LaTeX interprets."""
    return "".join(_SPECIAL.get(sign, f"\\{sign}" if sign in "&%$#_{}" else sign) for sign in text)
