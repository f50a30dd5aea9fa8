"""A pytest plugin of `mutants.py`: tells coverage which test runs, how long each took, and keeps an order."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

PHASES: dict[str, dict[str, tuple[float, str]]] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What this process covers from now on, and every process it starts, was touched by this test."""
    os.environ["MUTANTS_TEST"] = item.nodeid.replace("$", "_")
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        current = coverage.Coverage.current()
        if current:
            current.switch_context(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    PHASES.setdefault(report.nodeid, {})[report.when or ""] = (round(report.duration, 3), report.outcome)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        current = coverage.Coverage.current()
        if current:  # xdist ends its workers without ceremony
            current.stop()
            current.save()
    if "MUTANTS_TIMES" in os.environ and not hasattr(session.config, "workerinput"):
        Path(os.environ["MUTANTS_TIMES"]).write_text(json.dumps(PHASES))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only the tests that are asked for, in their order."""
    if "MUTANTS_ORDER" in os.environ:
        wanted = {
            name: n for n, name in enumerate(Path(os.environ["MUTANTS_ORDER"]).read_text().splitlines())
        }
        items[:] = sorted(
            (item for item in items if item.nodeid in wanted), key=lambda item: wanted[item.nodeid]
        )
