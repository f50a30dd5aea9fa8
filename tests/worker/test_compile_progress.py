"""A worker that compiles kernels says how far it is, every few seconds."""

from __future__ import annotations

from structlog.testing import capture_logs

from specsot_worker.loader import REPORT_SECONDS, CompileProgress


def test_progress_is_logged_every_few_seconds_and_never_for_a_quick_compilation() -> None:
    now = 0.0
    progress = CompileProgress(lambda: now)
    with capture_logs() as logs:
        for done in range(1, 21):
            now += REPORT_SECONDS / 4
            progress(done, 20)
    assert [(log["event"], log["done"], log["of"]) for log in logs] == [
        ("compiling kernels", done, 20) for done in (4, 8, 12, 16, 20)
    ]
    with capture_logs() as logs:
        quick = CompileProgress(lambda: now)
        for done in range(1, 21):
            quick(done, 20)
    assert logs == []
