"""A head that ships with SpecSoT is found by the name and the sizes of its base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsot.checkpoint.released_heads import released_heads
from specsot_app.fleet.bundled_heads import head_for, head_named
from specsot_app.fleet.demo import BUNDLED
from tests.models import Shape, write_base

NAMES = ("tiny-1.5b",)
SHAPE = Shape(hidden=32, heads=2, kv_heads=1, head_dim=16, inner=48, vocabulary=60)


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, ...]:
    """One folder with the head of a model called tiny-1.5b, whose hidden size is 32."""
    head = tmp_path / "models" / "tiny-1.5b" / "eagle3"
    head.mkdir(parents=True)
    fields = {"hidden_size": 16, "target_hidden_size": SHAPE.hidden, "vocab_size": SHAPE.vocabulary}
    (head / "config.json").write_text(json.dumps(fields))
    return (tmp_path / "missing", tmp_path / "models")


@pytest.mark.parametrize("name", ["tiny-1.5b", "Tiny 1.5B", "tiny1_5b"])
def test_a_head_is_named_in_any_spelling(places: tuple[Path, ...], name: str) -> None:
    assert head_named(name, places, NAMES) == places[1] / "tiny-1.5b" / "eagle3"


def test_a_name_that_no_head_has_names_none(places: tuple[Path, ...]) -> None:
    assert head_named("tiny-7b", places, NAMES) is None


@pytest.mark.parametrize("folder", ["Tiny-1.5B-Instruct", "the.tiny-1.5b-q4"])
def test_a_base_gets_the_head_of_its_name(places: tuple[Path, ...], tmp_path: Path, folder: str) -> None:
    base = write_base(tmp_path / folder, SHAPE)
    assert head_for(base, places, NAMES) == places[1] / "tiny-1.5b" / "eagle3"


def test_a_base_of_another_name_gets_none(places: tuple[Path, ...], tmp_path: Path) -> None:
    assert head_for(write_base(tmp_path / "other-1.5b", SHAPE), places, NAMES) is None


def test_a_base_of_another_size_gets_none(places: tuple[Path, ...], tmp_path: Path) -> None:
    wider = Shape(hidden=48, heads=2, kv_heads=1, head_dim=24, inner=48, vocabulary=60)
    assert head_for(write_base(tmp_path / "tiny-1.5b", wider), places, NAMES) is None


def test_every_head_that_ships_is_in_its_place() -> None:
    assert all(head_named(name, BUNDLED) for name in released_heads().heads)
