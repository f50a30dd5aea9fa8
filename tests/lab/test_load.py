"""`specsot bench load`: what is counted, and that nothing is counted that was not answered.

A conductor on a fake ring stands behind a real gRPC endpoint.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from specsot.params import Ask
from specsot_app.cli import main
from specsot_app.fleet.options import FleetOptions
from specsot_bench.results import write_results
from specsot_lab.bench.clients import LoadLevel, RequestTimes, ask_at_once, percentiles
from specsot_lab.bench.load import LoadTest, memory_growth, memory_page, page_of, resident_of
from specsot_master.engine import EngineConfig
from tests.endpoints.front import front
from tests.master.letters import DIRECT, SOT

pytestmark = pytest.mark.timeout(60)


def test_what_one_client_felt() -> None:
    heard = RequestTimes(10.0, 12.5, (10.5, 10.5001, 11.0, 12.0), tokens=6)
    assert heard.first_text_seconds == 0.5
    assert [round(gap, 3) for gap in heard.step_gaps] == [0.5, 1.0], "two texts of one step are one"
    assert heard.seconds_per_token == pytest.approx(0.3)


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 1000])
def test_percentiles_are_values_that_were_measured(count: int) -> None:
    values = [(n * 7919 % count) / 64 for n in range(count)]
    found = percentiles(values)
    assert found["p50"] == statistics.median_low(values)
    assert found["p99"] == sorted(values)[-(-99 * count // 100) - 1]


def test_no_value_has_no_percentile() -> None:
    assert percentiles([]) == {"p50": None, "p99": None}


def test_only_answers_count() -> None:
    answered = RequestTimes(0.0, 2.0, (1.0, 2.0), tokens=11)
    gone = RequestTimes(0.0, 0.1, error="Overloaded")
    broken = RequestTimes(0.0, 9.0, (8.0, 9.0), tokens=500, error="failed")
    level = LoadLevel(3, 4.0, (answered, gone, broken, gone))
    row = level.row()
    assert (row["requests"], row["answered"]) == (4, 1)
    assert row["errors"] == {"Overloaded": 2, "failed": 1}
    assert (row["requests_per_second"], row["tokens_per_second"]) == (0.25, 2.8)
    assert row["first_text_seconds"] == {"p50": 1.0, "p99": 1.0}
    assert row["per_token_seconds"] == {"p50": 0.1, "p99": 0.1}


def test_a_level_without_an_answer_has_no_figures() -> None:
    level = LoadLevel(1, 1.0, (RequestTimes(0.0, 0.1, error="Unavailable"),))
    assert level.row()["requests_per_second"] == 0
    assert "|   -/- |" in page_of([level.row()])


def test_the_table_fits_a_terminal() -> None:
    usual = LoadLevel(64, 1.0, (RequestTimes(0.0, 9.0, (1.234, 2.468, 9.0), tokens=9),))
    slow = RequestTimes(0.0, 99.0, (12.345, 99.0), tokens=3)
    refused = LoadLevel(64, 1.0, (slow, RequestTimes(0.0, 0.1, error="Overloaded")))
    assert max(map(len, page_of([usual.row()]).splitlines())) <= 80
    shown = page_of([refused.row()])
    assert "12345/12345" in shown
    assert "1 Overloaded" in shown


async def test_every_request_is_asked_once() -> None:
    asked: list[int] = []

    def ask(number: int) -> Ask:
        asked.append(number)
        return replace(SOT if number % 2 else DIRECT, seed=number)

    async with front() as one:
        numbers = itertools.count()
        for clients in (1, 3):
            level = await ask_at_once(one.address, clients, islice(numbers, 7), ask)
            assert (level.clients, len(level.answered), level.errors) == (clients, 7, {})
            assert all(
                one.sent_at < one.text_times[0] <= one.text_times[-1] <= one.ended_at
                for one in level.requests
            )
            assert all(one.tokens > 5 for one in level.requests)
        await one.quiet()
        assert sorted(asked) == list(range(14))
        assert one.stage.engine.requests().ended == (("stop", 14),)


async def test_refusals_are_counted_as_what_they_are() -> None:
    async with front(config=EngineConfig(model="demo", live=1, queue=1)) as one:
        level = await ask_at_once(one.address, 8, iter(range(40)), lambda _: DIRECT)
        refused = one.stage.engine.requests().refused
    assert refused > 0
    assert level.errors == {"Overloaded": refused}
    assert len(level.answered) == 40 - refused


def test_no_two_questions_are_alike() -> None:
    load = LoadTest((1,), 8, 32, "direct", FleetOptions())
    assert len({load.ask(number).prompt for number in range(100)}) == 100


def test_results_say_what_where_and_how(tmp_path: Path) -> None:
    file = tmp_path / "made" / "load.json"
    level = LoadLevel(2, 1.0, (RequestTimes(0.0, 1.0, (0.5,), tokens=1),))
    write_results(file, "load", {"mode": "direct"}, [level.row()])
    told = json.loads(file.read_text())
    assert list(told) == ["bench", "version", "machine", "settings", "rows"]
    assert told["rows"][0]["name"] == "clients 2"
    assert told["machine"]["cores"] == os.cpu_count()


def test_what_processes_have_grown() -> None:
    looks = [
        {"requests": n, "resident_bytes": {"master": held << 20, "worker-0": 70}}
        for n, held in ((500, 50), (1000, 90), (2000, 60))
    ]
    assert memory_growth(looks) == {"master": 10 << 20, "worker-0": 0}
    page = memory_page(looks)
    assert len(page.splitlines()) == 6
    assert "| master   | 50.0 | 90.0 | 60.0 |  10.0 |      16 |" in page


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_resident_memory_is_read_in_bytes() -> None:
    before = resident_of(os.getpid())
    held = bytearray(os.urandom(1 << 20) * 64)
    assert 32 << 20 < resident_of(os.getpid()) - before < 256 << 20
    assert len(held) == 64 << 20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--clients", "1,none"], "must be numbers > 0, such as 1,2,4, got '1,none'"),
        (["--clients", "0"], "must be numbers > 0"),
        (["--requests", "0"], "'--requests'"),
        (["--memory", "--master", "127.0.0.1:1"], "memory: only of a fleet that is started here"),
        (["--master", "127.0.0.1:1", "--clients", "1"], "no process answers at 127.0.0.1:1"),
    ],
)
def test_an_impossible_option_is_reported_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "load", *arguments]) != 0
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_master_elsewhere_is_shown_what_it_wants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token, ca = tmp_path / "token", tmp_path / "ca.pem"
    token.write_text("secret")
    ca.write_text("nonsense")
    asked = ["bench", "load", "--master", "fleet.example:1", "--token-file", str(token)]
    assert main(asked) == 2
    assert "the token would be sent to fleet.example:1 unencrypted: give --tls-ca" in capsys.readouterr().err
    assert main([*asked, "--tls-ca", str(ca)]) == 2
    assert "ca.pem: no certificates in PEM" in capsys.readouterr().err
