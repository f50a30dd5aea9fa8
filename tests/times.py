"""Records how long tests take: per test for readers, per file so that a run can start with the longest files.

python -m tests.times build/times*.txt          # update tests/times.json from the last run
python -m tests.times --slow build/pure.txt     # update tests/slow.txt, what `make check` leaves out
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

KEPT = Path(__file__).with_name("times.json")
SLOW = Path(__file__).with_name("slow.txt")
# Seconds, the mean of a test's cases. `make check` leaves slower pure tests out. Three of four cases are
# faster, and take a fifth of the time.
MAX_SECONDS = 0.005


def per_test(reports: Iterable[Any]) -> list[tuple[str, float]]:
    """Seconds of each test, the slowest first."""
    spent = Counter[str]()
    for report in reports:
        spent[getattr(report, "nodeid", "")] += getattr(report, "duration", 0.0)
    del spent[""]
    return spent.most_common()


def written(spent: Iterable[tuple[str, float]]) -> str:
    return "".join(f"{seconds:8.3f} {test}\n" for test, seconds in spent)


def per_file(text: str) -> dict[str, float]:
    """Seconds of each file, the longest first, from what `written` wrote."""
    spent = Counter[str]()
    for line in text.splitlines():
        seconds, test = line.split(maxsplit=1)
        spent[test.partition("::")[0]] += float(seconds)
    return {file: round(seconds, 1) for file, seconds in spent.most_common()}


def slow_functions(text: str) -> list[str]:
    """Tests whose cases take longer than MAX_SECONDS in the mean, of what `written` wrote, by name."""
    cases = defaultdict[str, list[float]](list)
    for line in text.splitlines():
        seconds, test = line.split(maxsplit=1)
        cases[function_of(test)].append(float(seconds))
    return sorted(test for test, spent in cases.items() if sum(spent) > MAX_SECONDS * len(spent))


def function_of(nodeid: str) -> str:
    """tests/pure/test_tree.py::test_a_path[3-4] -> tests/pure/test_tree.py::test_a_path"""
    return nodeid.partition("[")[0]


def without_slow(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that tests/slow.txt does not list, as it lists no new test, and those that it does."""
    slow = {*SLOW.read_text().splitlines()}
    kept = [item for item in items if function_of(item.nodeid) not in slow]
    return kept, [item for item in items if function_of(item.nodeid) in slow]


def longest_files_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests by the recorded seconds of their files, the longest file first. Processes that take
    file after file then end at about the same time.

    A file without a record is new and may be long, so it comes first.
    """
    kept: dict[str, float] = json.loads(KEPT.read_text())
    return sorted(items, key=lambda item: -kept.get(item.nodeid.partition("::")[0], math.inf))


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name != "--slow"]
    lines = "".join(Path(name).read_text() for name in names)
    if "--slow" in sys.argv:
        SLOW.write_text("".join(f"{test}\n" for test in slow_functions(lines)))
    else:
        KEPT.write_text(json.dumps(per_file(lines), indent=1) + "\n")
