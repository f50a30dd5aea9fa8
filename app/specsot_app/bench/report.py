"""What becomes of a run of `specsot bench quick` or `full`: tables, files, pictures, and the look back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specsot_app.bench.core.aggregate import names_of
from specsot_app.bench.core.recommend import recommend
from specsot_app.bench.core.tables import latex, markdown
from specsot_app.bench.plots import draw, drawn
from specsot_app.bench.results import Row, describe_machine, write_results
from specsot_app.bench.rounds import TableRun, measure
from specsot_app.bench.stored_run import StoredRun, compare, lost, read_run, unlike


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """output: the JSON file; Markdown, LaTeX and plots go beside it. against: a stored run."""

    name: str
    output: Path | None = None
    against: Path | None = None
    tolerance: float = 0.1


def publish(task: TableRun, wish: ReportOptions) -> int:
    """Measure, show, keep; 1 where a speedup got worse than the stored one by more than the tolerance."""
    before = read_run(wish.against, names_of(task.course)) if wish.against else None
    settings, rows = measure(task)
    page = page_of(wish, settings, rows)
    print(page)
    if wish.output is not None:
        keep(wish, wish.output, settings, rows, page)
    return 0 if before is None else look_back(settings, rows, before, wish.tolerance)


def page_of(wish: ReportOptions, settings: Row, rows: Sequence[Row]) -> str:
    machine = describe_machine()
    load = os.getloadavg()[0]
    said = (
        f"`specsot bench {wish.name}`: {settings['model']}, {precision_of(settings)}, {settings['device']}"
        f" ({machine['cores']} cores, {machine['processor']}), rounds: {settings['rounds']}, greedy,"
        " end-of-sequence tokens ignored by all."
        f" Load average at the end: {load:.1f}; figures are comparable within this run alone."
    )
    return markdown(title_of(wish, settings), said, rows, recommend(rows))


def precision_of(settings: Row) -> str:
    """As far as it differs from the usual."""
    kept = {"auto": None, "int8": "int8 KV"}.get(str(settings.get("kv_cache_dtype")))
    drafts = settings.get("draft_quantization") or settings.get("draft_dtype")
    told = settings["dtype"], settings.get("quantization"), kept, drafts and f"drafts {drafts}"
    return ", ".join(str(one) for one in told if one)


def title_of(wish: ReportOptions, settings: Row) -> str:
    return f"specsot bench {wish.name}, {settings['model']}"


def keep(wish: ReportOptions, output: Path, settings: Row, rows: Sequence[Row], page: str) -> None:
    """Plots are left out, with a line, where nothing can draw them."""
    write_results(output, wish.name, settings, rows)
    output.with_suffix(".md").write_text(page, encoding="utf-8")
    output.with_suffix(".tex").write_text(latex(title_of(wish, settings), rows), encoding="utf-8")
    drawn(lambda: draw(rows, title_of(wish, settings), output.with_suffix("")))


def look_back(settings: Row, rows: Sequence[Row], before: StoredRun, tolerance: float) -> int:
    """Every row that both runs have; 1 where one is worse, or cannot be measured any more."""
    verdicts, gone = compare(rows, before.rows), lost(rows, before.rows)
    others = unlike(settings, before.settings)
    for line in (*others, *(verdict.line(tolerance) for verdict in verdicts), *gone):
        print(line)
    return int(bool(gone) or any(verdict.worse(tolerance) for verdict in verdicts))
