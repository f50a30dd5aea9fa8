"""The tables of `specsot bench quick` and `full` as Markdown and as LaTeX, row for row the same.

Columns and how they are written are said here once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
NONE = "-"
MANY = 1e5  # from which a figure is written with an exponent

NOTES = """\
tok/s: mean and standard deviation over runs, prompt included. speedup: over plain decoding in the same round,
median (least .. most). TTFT, TPOT: ms. PPL: of what was written, to the base without a window; text: of a
reference text, read as the method reads. accept %: accepted of proposed drafts, without the bonus token.
tok/round: tokens that a forward pass of the base brought. MiB: what the method itself holds at most, besides
the base's weights. evictions, evicted: how often a window gave pages back, and of how many tokens. same: runs
that wrote what plain decoding wrote. How each is computed: docs/bench.md."""


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    cell: Callable[[Row], str]


def number(key: str, digits: int) -> Callable[[Row], str]:
    """A figure; `-` where nothing was measured."""

    def cell(row: Row) -> str:
        value = row[key]
        return NONE if value is None else f"{value:.{digits}f}" if value < MANY else f"{value:.1e}"

    return cell


def rate(row: Row) -> str:
    spread = row["tokens_per_second_sd"]
    return f"{row['tokens_per_second']:.1f}" + (f" ± {spread:.1f}" if spread is not None else "")


def speedup(row: Row) -> str:
    low, high = row["speedup_range"]
    return f"{row['speedup']:.2f} ({low:.2f} .. {high:.2f})" if row["runs"] > 1 else f"{row['speedup']:.2f}"


def same(row: Row) -> str:
    return f"{row['as_plain']}/{row['runs']}"


COLUMNS = (
    Column("method", lambda row: str(row["method"])),
    Column("tok/s", rate),
    Column("speedup", speedup),
    Column("TTFT", number("ttft_ms", 1)),
    Column("TPOT", number("tpot_ms", 2)),
    Column("PPL", number("ppl", 2)),
    Column("PPL text", number("ppl_reference", 2)),
    Column("accept %", number("accept_percent", 1)),
    Column("tok/round", number("tokens_per_round", 2)),
    Column("MiB", number("memory_mib", 2)),
    Column("evictions", number("evictions", 0)),
    Column("evicted", number("evicted_tokens", 0)),
    Column("same", same),
)


def cells(row: Row) -> list[str]:
    """One row as it is shown; one that was skipped says why."""
    if "skipped" in row:
        return [str(row["method"]), f"not measured: {row['skipped']}", *[""] * (len(COLUMNS) - 2)]
    return [column.cell(row) for column in COLUMNS]


def by_length(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Rows of each length, those that were skipped last."""
    found: dict[int, list[Row]] = {tokens: [] for tokens in sorted({row["tokens"] for row in rows})}
    for row in sorted(rows, key=lambda row: "skipped" in row):
        found[row["tokens"]].append(row)
    return found


def markdown(title: str, said: str, rows: Sequence[Row], advice: Sequence[Row]) -> str:
    """A page: what was done, a table for every length, what to set for which goal."""
    parts = [f"# {title}", said]
    headings = [column.heading for column in COLUMNS]
    for tokens, some in by_length(rows).items():
        parts.append(f"## {tokens} tokens")
        parts.append(pipes(headings, (cells(row) for row in some)))
    parts += [NOTES, "## Recommended settings", advised(advice)]
    return "\n\n".join(parts) + "\n"


def advised(advice: Sequence[Row]) -> str:
    """As a Markdown table."""
    headings = ["tokens", "goal", "among methods that write", "method", "figure", "speedup"]
    return pipes(headings, map(_advice_cells, advice))


def _advice_cells(one: Row) -> list[str]:
    figure = f"{one['figure']:.4g} {one['unit']}"
    return [str(one["tokens"]), one["goal"], one["text"], one["method"], figure, f"{one['speedup']:.2f}"]


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


def latex(title: str, rows: Sequence[Row]) -> str:
    """A tabular for every length, for booktabs, as wide as the page."""
    parts = [f"% {title}; needs \\usepackage{{booktabs,graphicx}}"]
    for tokens, some in by_length(rows).items():
        headings = " & ".join(escape(column.heading) for column in COLUMNS)
        body = "\n".join(_latex_line(row) for row in some)
        parts.append(
            f"\\begin{{table}}\n\\caption{{{escape(title)}: {tokens} tokens}}\n"
            "\\resizebox{\\textwidth}{!}{%\n"
            f"\\begin{{tabular}}{{l{'r' * (len(COLUMNS) - 1)}}}\n\\toprule\n"
            f"{headings} \\\\\n\\midrule\n{body}\n"
            "\\bottomrule\n\\end{tabular}}\n\\end{table}"
        )
    return "\n\n".join(parts) + "\n"


def _latex_line(row: Row) -> str:
    shown = cells(row)
    if "skipped" in row:
        rest = f"\\multicolumn{{{len(COLUMNS) - 1}}}{{l}}{{{escape(shown[1])}}}"
        return f"{escape(shown[0])} & {rest} \\\\"
    return " & ".join(map(escape, shown)) + " \\\\"


_SPECIAL = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def escape(text: str) -> str:
    """As LaTeX takes it."""
    return "".join(_SPECIAL.get(sign, f"\\{sign}" if sign in "&%$#_{}" else sign) for sign in text)
