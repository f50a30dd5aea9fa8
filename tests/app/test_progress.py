"""Bars while something loads or takes long: seen at a terminal, and only there."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from specsot_app.fleet.opening import summed_progress
from specsot_bench.asking import counting_bar
from tests.app.screen import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_count_is_seen_at_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    seen, unseen = Terminal(), io.StringIO()
    for err in (seen, unseen):
        with counting_bar(err, "asking", 3) as step:
            step()
    assert "asking" in seen.getvalue()
    assert "1/3" in seen.getvalue()
    assert unseen.getvalue() == ""


def test_layers_of_all_workers_add_up() -> None:
    heard: list[tuple[str, int, int]] = []
    loaded = summed_progress(lambda *news: heard.append(news), 8)
    loaded("worker-0", 1)  # to measure it
    loaded("worker-0", 2)
    loaded("worker-1", 1)
    loaded("worker-0", 8)
    assert heard == [("layers", 1, 8), ("layers", 2, 8), ("layers", 3, 8), ("layers", 8, 8)]


@pytest.mark.torch
async def test_an_embedded_fleet_tells_how_much_is_loaded(demo_model: Path) -> None:
    from specsot_app.fleet.opening import open_fleet
    from specsot_app.fleet.options import FleetOptions

    heard: list[tuple[str, int, int]] = []
    wanted = FleetOptions(model=str(demo_model / "base"), stages=2)
    fleet = await open_fleet(wanted, lambda *news: heard.append(news))
    await fleet.close()
    assert heard[-1] == ("layers", 8, 8)
    assert {total for _, _, total in heard} == {8}


@pytest.mark.processes
@pytest.mark.torch
def test_loading_is_seen_and_gone_before_the_answer() -> None:
    words = ["--mode", "direct", "--max-new-tokens", "3", "--drafter", "none", "Why?"]
    with Screen("specsot_app", "infer", *words) as screen:
        screen.wait_for("loading")
        screen.wait_for("3 tokens in 3 steps")
        assert screen.ends() == 0
