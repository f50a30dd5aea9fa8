"""What drafts without --drafter: a head as a head, a small language model as a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsot.checkpoint.draft_kind import is_language_model
from specsot_app.fleet.fitting import plan_fleet
from specsot_app.fleet.options import FleetOptions, models_of
from tests.drafter.heads import turn_to_eagle_1, write_pair
from tests.model.gguf_files import write_gguf
from tests.model.test_gguf import SHAPE
from tests.model.tiny import write_model
from tests.models import Shape, write_base, write_dflash, write_dspark, write_p_eagle


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_base(tmp_path / "base", Shape(layers=9))


def test_small_language_models_draft_without_a_drafter_option(base: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "small", "llama", **SHAPE | {"vocab_size": 200})
    for small in (tmp_path / "small", write_gguf(tmp_path / "m.gguf", model)):
        options = FleetOptions(base, draft_model=small)
        assert models_of(options).drafts == "model"
        assert plan_fleet(options).draft
        assert models_of(FleetOptions(base, draft_model=small, drafter="suffix")).drafts == "suffix"


def test_weights_in_several_files_are_recognized(base: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "small", "qwen2", shards="20KB", **SHAPE)
    assert (tmp_path / "small/model.safetensors.index.json").exists()
    assert is_language_model(tmp_path / "small")


def test_heads_of_every_kind_draft_as_heads(base: Path, tmp_path: Path) -> None:
    heads = [
        write_pair(tmp_path / "eagle3") / "head",
        turn_to_eagle_1(write_pair(tmp_path / "eagle1")) / "head",
        write_dflash(tmp_path / "dflash", base),
        write_dspark(tmp_path / "dspark", base),
        write_p_eagle(tmp_path / "p-eagle", base),
    ]
    for head in heads:
        assert models_of(FleetOptions(base, draft_model=head)).drafts == "eagle"


def test_without_a_draft_model_suffixes_draft_in_a_fleet_of_one_process_on_a_cpu(base: Path) -> None:
    assert models_of(FleetOptions(base)).drafts == "suffix"
    assert models_of(FleetOptions(base, drafter="none")).drafts == "none"
    assert models_of(FleetOptions(base, kind="processes")).drafts == "none"
    assert models_of(FleetOptions(base, device="cuda")).drafts == "none"


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\x02" + bytes(7) + b"[]"])
def test_a_broken_file_is_left_to_the_loader(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert not is_language_model(tmp_path)
