"""What becomes of a run of `specsot bench quick` or `full`: its page and its files."""

from __future__ import annotations

import os
from pathlib import Path

from specsot_app.bench import results
from specsot_app.bench.core.method_page import latex_of, page_of, recommend
from specsot_app.bench.core.tables import Row
from specsot_app.bench.plots import draw
from specsot_app.bench.rounds import TableRun, measure


def publish(task: TableRun, name: str, output: Path | None = None) -> int:
    """Measure, show, keep. output: the JSON file; Markdown, LaTeX and plots go beside it."""
    settings, rows = measure(task)
    title = f"specsot bench {name}, {settings['model']}"
    page = page_of(title, _said(name, settings), rows, recommend(rows))
    results.publish(name, settings, rows, page, output, lambda stem: draw(rows, title, stem))
    if output is not None:
        output.with_suffix(".tex").write_text(latex_of(title, rows), encoding="utf-8")
    return 0


def _said(name: str, settings: Row) -> str:
    machine = results.describe_machine()
    return (
        f"`specsot bench {name}`: {settings['model']}, {precision_of(settings)}, {settings['device']}"
        f" ({machine['cores']} cores, {machine['processor']}), rounds: {settings['rounds']}, greedy,"
        " end-of-sequence tokens ignored by all."
        f" Load average at the end: {os.getloadavg()[0]:.1f}; figures are comparable within this run alone."
    )


def precision_of(settings: Row) -> str:
    """As far as it differs from the usual."""
    kept = {"auto": None, "int8": "int8 KV"}.get(str(settings.get("kv_cache_dtype")))
    drafts = settings.get("draft_quantization") or settings.get("draft_dtype")
    told = settings["dtype"], settings.get("quantization"), kept, drafts and f"drafts {drafts}"
    return ", ".join(str(one) for one in told if one)
