"""Writes the page of `specsot bench quick` and `full`: the tables, and recommended settings for each goal.

docs/lab.md defines each column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specsot_bench.core.tables import Column, figure, latex, markdown, text

# Figures of a row by key.
Row = Mapping[str, Any]

# Explanation of the columns, below the tables.
NOTES = """\
tok/s: mean and standard deviation over runs, prompt included. speedup: over plain decoding in the same round,
median (least .. most). TTFT, TPOT: ms. PPL: of what was written, to the base without a window; text: of a
reference text, read as the method reads. accept %: accepted of proposed drafts, without the bonus token.
tok/round: tokens that a forward pass of the base brought. MiB: what the method itself holds at most, besides
the base's weights. evicted: tokens that have left the window. same: runs
that wrote what plain decoding wrote. How each is computed: docs/lab.md."""


def rate(row: Row) -> str:
    """Return tokens a second with their standard deviation, such as "31.2 ± 0.4"; without it for a single
    run.

    row: Figures of the row by key.
    """
    spread = row["tokens_per_second_sd"]
    return f"{row['tokens_per_second']:.1f}" + (f" ± {spread:.1f}" if spread is not None else "")


def speedup(row: Row) -> str:
    """Return the speedup with its range, such as "1.82 (1.75 .. 1.90)"; without it for a single run.

    row: Figures of the row by key.
    """
    low, high = row["speedup_range"]
    return f"{row['speedup']:.2f} ({low:.2f} .. {high:.2f})" if row["runs"] > 1 else f"{row['speedup']:.2f}"


def same(row: Row) -> str:
    """Return how many runs wrote the baseline's text, such as "2/3".

    row: Figures of the row by key.
    """
    return f"{row['as_plain']}/{row['runs']}"


# Heading of the perplexity of a reference text.
REFERENCE = "PPL text"
# Columns of the tables.
COLUMNS = (
    text("method", "method"),
    Column("tok/s", rate),
    Column("speedup", speedup),
    figure("TTFT", "ttft_ms", 1),
    figure("TPOT", "tpot_ms"),
    figure("PPL", "ppl"),
    figure(REFERENCE, "ppl_reference"),
    figure("accept %", "accept_percent", 1),
    figure("tok/round", "tokens_per_round"),
    figure("MiB", "memory_mib"),
    figure("evicted", "evicted_tokens", 0),
    Column("same", same),
)
# Columns of the recommended settings.
ADVICE = (
    *(figure("tokens", "tokens", 0), text("goal", "goal"), text("among methods that write", "text")),
    text("method", "method"),
    Column("figure", lambda row: f"{row['figure']:.4g} {row['unit']}"),
    figure("speedup", "speedup"),
)


def columns_of(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Return COLUMNS, without the perplexity of a reference text if no row has one.

    rows: Rows of the table.
    """
    has_reference = any(row.get("ppl_reference") is not None for row in rows)
    return tuple(column for column in COLUMNS if has_reference or column.heading != REFERENCE)


def by_length(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Return the rows of each number of tokens, in ascending order; skipped rows are last. No rows give an
    empty mapping.

    Within a length, rows keep their order otherwise.

    rows: Rows of all lengths.
    """
    rows_by_length: dict[int, list[Row]] = {tokens: [] for tokens in sorted({row["tokens"] for row in rows})}
    for row in sorted(rows, key=lambda row: "skipped" in row):
        rows_by_length[row["tokens"]].append(row)
    return rows_by_length


def page_of(title: str, description: str, rows: Sequence[Row], advice: Sequence[Row]) -> str:
    """Return a page of Markdown: what was done, a table for every length, and recommended settings.

    The notes that explain the columns precede the recommendations.

    title: Heading of the page.
    description: Paragraph that says what was measured.
    rows: Rows of the tables.
    advice: Rows of the recommendations.
    """
    parts = [f"# {title}", description]
    for tokens, length_rows in by_length(rows).items():
        parts += [f"## {tokens} tokens", markdown(columns_of(length_rows), length_rows)]
    return "\n\n".join([*parts, NOTES, "## Recommended settings", markdown(ADVICE, advice)]) + "\n"


def latex_of(title: str, rows: Sequence[Row]) -> str:
    """Return the same tables for a paper, in LaTeX.

    A comment line with the title and the needed packages comes first.

    title: Title of each caption.
    rows: Rows of the tables.
    """
    tables = (
        latex(f"{title}: {tokens} tokens", columns_of(length_rows), length_rows)
        for tokens, length_rows in by_length(rows).items()
    )
    return "\n\n".join([f"% {title}; needs \\usepackage{{booktabs,graphicx}}", *tables]) + "\n"


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal of the recommended settings.

    name: Name of the goal.
    column: Key of the figure that counts.
    maximized: True: larger values are better; False: smaller values are.
    unit: Unit of the column.
    slack: Fraction of the best value. Values within it are equally good, and speed decides among them.
    """

    name: str
    column: str
    maximized: bool
    unit: str
    slack: float


# Goals for which settings are recommended.
GOALS = (
    Goal("throughput", "tokens_per_second", True, "tokens/s", 0.0),
    # The time of a single prompt varies by about half.
    Goal("latency", "ttft_ms", False, "ms to the first token", 0.5),
    Goal("memory", "memory_mib", False, "MiB", 0.05),
)


def recommend(rows: Sequence[Row]) -> list[Row]:
    """Return the best of our methods for every length and goal: of all, and of those that keep the baseline's
    text.

    For each goal and length there is one row for any text and, if some method keeps the baseline's text, a
    second one. Without measured rows, the result is empty.

    rows: Measured rows; skipped rows and those of Transformers are left out.
    """
    ours = [row for row in rows if "skipped" not in row and not row["rival"]]
    recommendations: list[Row] = []
    for tokens in sorted({_number(row, "tokens") for row in ours}):
        rows_of_length = [row for row in ours if row["tokens"] == tokens]
        for goal in GOALS:
            recommendations += _recommendations_for(goal, int(tokens), rows_of_length)
    return recommendations


def _recommendations_for(goal: Goal, tokens: int, rows: Sequence[Row]) -> list[Row]:
    """Return the recommendations for a goal at a length: one among all rows, one among those that keep the
    text.

    A group without rows has no recommendation.

    goal: The goal, which names the column that counts.
    tokens: Length of the answers.
    rows: Rows that were measured at this length.
    """
    groups = {"any text": rows, "plain's text": [row for row in rows if row["exact"]]}
    best = {text: best_for(goal, group) for text, group in groups.items() if group}
    return [
        {"goal": goal.name, "tokens": tokens, "text": text, "method": row["method"],
         "figure": row[goal.column], "unit": goal.unit, "speedup": row["speedup"]}
        for text, row in best.items()
    ]  # fmt: skip


def best_for(goal: Goal, rows: Sequence[Row]) -> Row:
    """Return the fastest of the rows that are within the goal's slack of the best.

    Speed is the number of tokens a second; of equally fast rows the first is returned. With a slack of 0
    only rows with the best value are considered.

    goal: The goal, which names the column that counts.
    rows: Measured rows, at least one.
    """
    values = [_number(row, goal.column) for row in rows]
    best = max(values) if goal.maximized else min(values)
    allowed = best * (1 - goal.slack) if goal.maximized else best * (1 + goal.slack)
    good = [
        row for row, value in zip(rows, values) if (value >= allowed if goal.maximized else value <= allowed)
    ]
    return max(good, key=lambda row: _number(row, "tokens_per_second"))


def _number(row: Row, column: str) -> float:
    """Return a row's figure in a column. Fails if the row has no such column, or if its figure is no number.

    row: Figures of the row by key.
    column: Key of the column, whose figure is a number.
    """
    value = row[column]
    assert isinstance(value, int | float)
    return value
