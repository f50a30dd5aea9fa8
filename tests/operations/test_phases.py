"""The phases of a start are logged one by one, and together in one line at its end."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest
from structlog.testing import capture_logs

from specsot import phases
from specsot.phases import add_phase, log_start, note_imported, process_seconds, timed_phase


@pytest.fixture(autouse=True)
def at_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_start", defaultdict(float))


def test_one_line_has_the_seconds_of_all_phases() -> None:
    with capture_logs() as logged:
        note_imported()
        add_phase("read vocabulary", 0.5)
        add_phase("read vocabulary", 0.75)
        with timed_phase("captured graphs", what="steps"):
            time.sleep(0.06)
        log_start()
        log_start()
    captured, started = logged
    assert captured["event"] == "captured graphs"
    assert started["event"] == "started"
    assert started["read_vocabulary_s"] == 1.2
    assert started["captured_graphs_steps_s"] >= 0.1
    assert started["imported_s"] <= started["seconds"]


def test_what_comes_after_the_start_is_logged_by_itself() -> None:
    with capture_logs() as logged:
        log_start()
        note_imported()
        with timed_phase("loaded layers", layers="0:4"):
            pass
        log_start()
    assert [line["event"] for line in logged] == ["started", "loaded layers"]


def test_imports_count_once() -> None:
    note_imported()
    with capture_logs() as logged:
        time.sleep(0.2)
        note_imported()
        log_start()
    assert logged[0]["imported_s"] < logged[0]["seconds"]


def test_a_process_is_as_old_as_it_is() -> None:
    before = process_seconds()
    time.sleep(0.05)
    assert 0 < before < process_seconds()
