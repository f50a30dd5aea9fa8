"""Writes docs/metrics.md, the metrics of a master, from their tables. Run by `make docs`; a test holds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from specsot_master.telemetry import HISTOGRAMS, LABELS, RESULT_COUNTERS, families_of

PAGE = Path(__file__).with_name("metrics.md")
HEAD = f"""# Metrics of a master

Written by `make docs`. [Operations](operations.md#metrics) says where they are served, and has those of
workers and drafters. All have the labels {" and ".join(f"`{label}`" for label in LABELS)}. Names and buckets
follow vLLM's where vLLM has the metric.

| metric | type | further labels | meaning |
|---|---|---|---|
"""


def rows() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield name, type, labels in addition to LABELS, and help text of each metric."""
    for family in families_of((), "specsot"):
        ending = "_total" if family.type == "counter" else ""
        labels = tuple(label for label in family._labelnames if label not in LABELS)  # noqa: SLF001
        yield family.name + ending, family.type, labels, family.documentation
    for name, (about, *counter_labels) in RESULT_COUNTERS.items():
        yield f"specsot:{name}_total", "counter", tuple(counter_labels), about
    for name, (about, _, *histogram_labels) in HISTOGRAMS.items():
        yield f"specsot:{name}", "histogram", tuple(histogram_labels), about


def written() -> str:
    """Return the page."""
    return HEAD + "".join(
        f"| `{name}` | {kind} | {' '.join(f'`{label}`' for label in labels)} | {about} |\n"
        for name, kind, labels, about in rows()
    )


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
