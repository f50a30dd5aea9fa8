"""The lines of a run as a table for people, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from specsot_lab.eval.aggregate import CategoryRow, Wins

Column = tuple[int, str, str, Callable[[CategoryRow], str]]  # width, two rows of heading, cell

NAME = 24
COLUMNS: tuple[Column, ...] = (
    (3, "", "n", lambda line: str(line.questions)),
    (7, "quality", "direct", lambda line: told_quality(line.direct_quality)),
    (6, "", "sot", lambda line: told_quality(line.sot_quality)),
    (9, "judge", "+/=/-", lambda line: told_wins(line.wins)),
    (7, "tok/s", "direct", lambda line: f"{line.direct_speed:.1f}"),
    (7, "", "sot", lambda line: f"{line.sot_speed:.1f}"),
    (8, "", "speedup", lambda line: f"{line.speedup:.2f}"),
)
UNCLEAR = "unclear: no verdict on quality (no score or judge, or 0 both ways)"


def lines_of(lines: Sequence[CategoryRow]) -> Iterator[str]:
    """A task's categories below its name. The judge's column only where one was asked."""
    columns = [one for one in COLUMNS if one[1] != "judge" or any(line.wins for line in lines)]
    yield f"{'':{NAME}}{''.join(f'{title:>{width}}' for width, title, _, _ in columns)}".rstrip()
    yield f"{'':{NAME}}{''.join(f'{title:>{width}}' for width, _, title, _ in columns)}  pays"
    for task, categories in groupby(lines, key=lambda line: line.task):
        yield task
        for line in categories:
            name = f"  {line.category.removeprefix(f'{task}/')}"
            cells = "".join(f"{cell(line):>{width}}" for width, _, _, cell in columns)
            yield f"{name[:NAME]:{NAME}}{cells}  {line.verdict}"
    if any(line.verdict == "unclear" for line in lines):
        yield UNCLEAR


def told_quality(quality: float | None) -> str:
    return "-" if quality is None else f"{quality:.2f}"


def told_wins(wins: Wins | None) -> str:
    return f"{wins.sot}/{wins.ties}/{wins.direct}" if wins and wins.margin is not None else "-"
