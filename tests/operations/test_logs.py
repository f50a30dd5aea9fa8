"""Log lines as machines and people read them."""

from __future__ import annotations

import json
import threading

import pytest
import structlog

from specsot.process.logs import write_logs


def test_a_line_from_any_thread_says_whose(capsys: pytest.CaptureFixture[str]) -> None:
    write_logs("worker", "json", "info")
    log = structlog.get_logger()
    thread = threading.Thread(target=lambda: log.info("fits", what="layers 0:4", trace_id=None))
    thread.start()
    thread.join()
    log.debug("not told")
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    del told["timestamp"]
    assert told == {"event": "fits", "level": "info", "service": "worker", "what": "layers 0:4"}


def test_people_get_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    write_logs("master", "console", "info")
    structlog.get_logger().info("finished", request_id="r1", trace_id=None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("finished request_id=r1")
    assert "service" not in line
