"""Writes tables as Markdown and LaTeX; a column defines once, for both, how a row's figures are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Figures of a row by key.
Row = Mapping[str, Any]
# Returns the text of a cell from its row.
Cell = Callable[[Row], str]
# The cell of a figure that was not measured.
NONE = "-"
# Figures from this one on are written with an exponent. Untuned.
EXPONENT_FROM = 1e5


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    heading: Heading of the column.
    cell: Returns the cell of a row.
    text: True if the cells are left-aligned text; such columns come first.
    """

    heading: str
    cell: Cell
    text: bool = False


def text(heading: str, key: str) -> Column:
    """Return a column of text, left-aligned.

    heading: Heading of the column.
    key: Key of the entry in a row.
    """
    return Column(heading, lambda row: str(row[key]), text=True)


def figure(heading: str, key: str, digits: int = 2, scale: float = 1.0) -> Column:
    """Return a column of figures; the cell is NONE where nothing was measured.

    A missing key counts as a figure that was not measured.

    heading: Heading of the column.
    key: Key of the entry in a row.
    digits: Number of decimals. A scaled figure from EXPONENT_FROM on is written with an exponent.
    scale: Factor by which the entry is multiplied before it is written.
    """

    def cell(row: Row) -> str:
        """Return a row's figure as text; NONE if the row has no such figure, with an exponent from
        EXPONENT_FROM on.

        row: Figures of the row by key.
        """
        if (value := row.get(key)) is None:
            return NONE
        return f"{value * scale:.{digits}f}" if value * scale < EXPONENT_FROM else f"{value * scale:.1e}"

    return Column(heading, cell)


def cells(columns: Sequence[Column], row: Row) -> list[str]:
    """Return a row's cells. A skipped row has its text columns, then why it was skipped, then empty cells.

    The row's columns of text must come first.

    columns: Columns of the table.
    row: Figures of the row by key; "skipped" is the reason why nothing was measured.
    """
    if "skipped" not in row:
        return [column.cell(row) for column in columns]
    names = [column.cell(row) for column in columns if column.text]
    return [*names, f"not measured: {row['skipped']}", *[""] * (len(columns) - len(names) - 1)]


def markdown(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Return a Markdown table.

    columns: Columns of the table, text columns first.
    rows: Figures of each row by key.
    """
    headings = [column.heading for column in columns]
    return pipes(headings, (cells(columns, row) for row in rows), sum(column.text for column in columns))


def pipes(headings: Sequence[str], rows: Iterable[Sequence[str]], num_text_columns: int = 1) -> str:
    """Return a Markdown table with aligned columns, so that its source is readable, too.

    Figures are as wide as the widest cell of their column in the rows that have figures; text columns as
    wide as their widest cell of all rows.

    headings: Headings of the columns.
    rows: Cells of each row. A row whose last cells are empty ends with a reason that spans them.
    num_text_columns: Number of text columns, at least 1; the figures after them are right-aligned.
    """
    lines = [list(headings), *map(list, rows)]
    full_lines = [line for line in lines if line[-1]]
    widths = [max(map(len, column)) for column in zip(*full_lines)]
    widths[:num_text_columns] = [
        max(len(line[column_index]) for line in lines) for column_index in range(num_text_columns)
    ]
    rule = "|".join(
        "-" * (width + 1) + ("-" if column_index < num_text_columns else ":")
        for column_index, width in enumerate(widths)
    )
    table_lines = [_line(line, widths, num_text_columns) for line in lines]
    return "\n".join([table_lines[0], f"|{rule}|", *table_lines[1:]])


def _line(line: Sequence[str], widths: Sequence[int], num_text_columns: int) -> str:
    """Return one line of the table, text left-aligned and figures right-aligned.

    A line whose last cell is empty is a skipped row: the reason follows its names, and the remaining cells
    are empty and not padded.

    line: Cells of the line.
    widths: Widths of the columns, in characters.
    num_text_columns: Number of columns that are left-aligned.
    """
    names = [cell.ljust(width) for cell, width in zip(line[:num_text_columns], widths)]
    if not line[-1]:
        return (
            f"| {' | '.join([*names, line[num_text_columns]])} |{' |' * (len(line) - num_text_columns - 1)}"
        )
    figures = (cell.rjust(width) for cell, width in zip(line[num_text_columns:], widths[num_text_columns:]))
    return f"| {' | '.join([*names, *figures])} |"


def latex(caption: str, columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Return a LaTeX table for booktabs, as wide as the page.

    The first column is left-aligned, all others are right-aligned.

    caption: Caption as plain text.
    columns: Columns of the table, text columns first.
    rows: Figures of each row by key.
    """
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
    """Return one line of the LaTeX table; the reason of a skipped row spans all columns but the first.

    Cells are escaped; the line ends in a row break.

    columns: Columns of the table.
    row: Figures of the row by key.
    """
    name, *figures = cells(columns, row)
    if "skipped" in row:
        return f"{escape(name)} & \\multicolumn{{{len(columns) - 1}}}{{l}}{{{escape(figures[0])}}} \\\\"
    return " & ".join(map(escape, (name, *figures))) + " \\\\"


# Characters whose escape is not a backslash before them.
_SPECIAL = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def escape(text: str) -> str:
    """Return a text with the characters escaped that LaTeX interprets.

    text: Plain text.
    """
    return "".join(
        _SPECIAL.get(character, f"\\{character}" if character in "&%$#_{}" else character)
        for character in text
    )
