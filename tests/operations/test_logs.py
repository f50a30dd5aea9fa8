"""Log lines as machines and people read them."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime

import pytest
import structlog

from specsot.errors import Unavailable
from specsot.service.lifecycle import write_logs
from specsot_master.core.inputs import MasterLeaving
from specsot_master.engine import Caller
from tests.master.letters import DIRECT, SAYS, SOT
from tests.master.stage import Stage


def test_a_line_from_any_thread_names_its_service(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_console_lines_use_local_time_and_json_lines_use_utc(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "JST-9")
    time.tzset()
    try:
        write_logs("master", "console", "info")
        hour = datetime.now(UTC).hour
        structlog.get_logger().info("finished")
        write_logs("master", "json", "info")
        structlog.get_logger().info("finished")
    finally:
        monkeypatch.undo()
        time.tzset()
    people, machines = capsys.readouterr().err.splitlines()
    assert int(people[:2]) in ((hour + 9) % 24, (hour + 10) % 24)
    assert json.loads(machines)["timestamp"].endswith("Z")


def test_what_a_peer_says_stays_on_one_line_and_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    write_logs("master", "console", "info")
    for reason in ("gone\n12:00:00 [info] all well\x1b[2J", "gone\x1b[2J\u202e"):
        structlog.get_logger().warning("lost\x1b[2J", reason=reason)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(r"reason='gone\n12:00:00 [info] all well\x1b[2J'")
    assert second.endswith(r"reason=gone\x1b[2J\u202e")
    assert "\x1b" not in first + second


@pytest.mark.parametrize("format", ["console", "json"])
def test_a_failure_is_logged_without_the_values_of_its_frames(
    format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_logs("master", format, "info")

    def fail(prompt: str) -> None:
        raise KeyError(len(prompt))

    try:
        fail("my " + "secret")
    except KeyError as error:
        structlog.get_logger().error("a call failed", exc_info=error)
    told = capsys.readouterr().err
    assert "KeyError: 9" in told
    assert "my secret" not in told


async def test_every_request_that_begins_has_an_end() -> None:
    """Finished, abandoned by its client, failed with its ring: one line each, with its name."""
    stage = Stage(SAYS)
    with structlog.testing.capture_logs() as lines:
        await stage.play(stage.listen(DIRECT, "r-done"))
        left = stage.requests.generate(SOT, Caller("r-left"))
        await anext(left)
        await left.aclose()
        broken = stage.listen(SOT, "r-broken")
        await stage.step()
        stage.engine.handle(MasterLeaving("w0 is gone"))
        with pytest.raises(Unavailable):
            await broken
    told = [(line["event"], line["request_id"]) for line in lines]
    assert [one for one in told if one[0] != "request"] == [
        ("finished", "r-done"),
        ("abandoned", "r-left"),
        ("request failed", "r-broken"),
    ]
    assert [id for event, id in told if event == "request"] == ["r-done", "r-left", "r-broken"]
