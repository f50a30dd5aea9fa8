"""Records how long tests take: per test for readers, per file so that a run can start with the longest files.

python -m tests.times build/times*.txt    # update tests/times.json from the last run
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

KEPT = Path(__file__).with_name("times.json")


def per_test(reports: Iterable[Any]) -> list[tuple[str, float]]:
    """Seconds of each test, the slowest first."""
    spent = Counter[str]()
    for report in reports:
        spent[getattr(report, "nodeid", "")] += getattr(report, "duration", 0.0)
    del spent[""]
    return spent.most_common()


def written(spent: Iterable[tuple[str, float]]) -> str:
    return "".join(f"{seconds:8.2f} {test}\n" for test, seconds in spent)


def per_file(text: str) -> dict[str, float]:
    """Seconds of each file, the longest first, from what `written` wrote."""
    spent = Counter[str]()
    for line in text.splitlines():
        seconds, test = line.split(maxsplit=1)
        spent[test.partition("::")[0]] += float(seconds)
    return {file: round(seconds, 1) for file, seconds in spent.most_common()}


def longest_files_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests by the recorded seconds of their files, the longest file first. Processes that take
    file after file then end at about the same time.

    A file without a record is new and may be long, so it comes first.
    """
    kept: dict[str, float] = json.loads(KEPT.read_text())
    return sorted(items, key=lambda item: -kept.get(item.nodeid.partition("::")[0], math.inf))


if __name__ == "__main__":
    lines = "".join(Path(name).read_text() for name in sys.argv[1:])
    KEPT.write_text(json.dumps(per_file(lines), indent=1) + "\n")
