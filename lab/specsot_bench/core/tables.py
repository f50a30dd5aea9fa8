"""Tables as Markdown and as LaTeX: a column says how a row's figures are written, once for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
NONE = "-"
MANY = 1e5  # from which a figure is written with an exponent


@dataclass(frozen=True, slots=True)
class Column:
    """text: its cells stand to the left; such columns come first."""

    heading: str
    cell: Cell
    text: bool = False


def text(heading: str, key: str) -> Column:
    return Column(heading, lambda row: str(row[key]), text=True)


def figure(heading: str, key: str, digits: int = 2, scale: float = 1.0) -> Column:
    """A figure, times `scale`; `-` where nothing was measured."""

    def cell(row: Row) -> str:
        if (value := row.get(key)) is None:
            return NONE
        return f"{value * scale:.{digits}f}" if value * scale < MANY else f"{value * scale:.1e}"

    return Column(heading, cell)


def cells(columns: Sequence[Column], row: Row) -> list[str]:
    """One row as it is shown; one that was skipped says why, behind its texts."""
    if "skipped" not in row:
        return [column.cell(row) for column in columns]
    names = [column.cell(row) for column in columns if column.text]
    return [*names, f"not measured: {row['skipped']}", *[""] * (len(columns) - len(names) - 1)]


def markdown(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    headings = [column.heading for column in columns]
    return pipes(headings, (cells(columns, row) for row in rows), sum(column.text for column in columns))


def pipes(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose columns are as wide as what they hold, so that it reads well as it is, too.

    left: columns of text; figures behind them stand to the right. A row whose last cells are empty ends with
    a reason that runs over them.
    """
    lines = [list(headings), *map(list, rows)]
    whole = [line for line in lines if line[-1]]
    widths = [max(map(len, column)) for column in zip(*whole)]
    widths[:left] = [max(len(line[place]) for line in lines) for place in range(left)]
    rule = "|".join("-" * (width + 1) + ("-" if place < left else ":") for place, width in enumerate(widths))
    shown = [_line(line, widths, left) for line in lines]
    return "\n".join([shown[0], f"|{rule}|", *shown[1:]])


def _line(line: Sequence[str], widths: Sequence[int], left: int) -> str:
    """Texts to the left, figures to the right."""
    names = [cell.ljust(width) for cell, width in zip(line[:left], widths)]
    if not line[-1]:
        return f"| {' | '.join([*names, line[left]])} |{' |' * (len(line) - left - 1)}"
    figures = (cell.rjust(width) for cell, width in zip(line[left:], widths[left:]))
    return f"| {' | '.join([*names, *figures])} |"


def latex(caption: str, columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """A table with a tabular for booktabs, as wide as the page."""
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
    name, *figures = cells(columns, row)
    if "skipped" in row:
        return f"{escape(name)} & \\multicolumn{{{len(columns) - 1}}}{{l}}{{{escape(figures[0])}}} \\\\"
    return " & ".join(map(escape, (name, *figures))) + " \\\\"


_SPECIAL = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def escape(text: str) -> str:
    return "".join(_SPECIAL.get(sign, f"\\{sign}" if sign in "&%$#_{}" else sign) for sign in text)
