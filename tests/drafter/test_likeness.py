"""A draft model must write with its base's tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from specsot.checkpoint.gguf.finding import POINTER
from specsot.checkpoint.gguf.layout import Place
from specsot.errors import HeadMismatch
from specsot.service.options import DraftModelOptions
from specsot_app.fleet.fitting import plan_fleet
from specsot_app.fleet.options import FleetOptions
from specsot_drafter.loader import LanguageModelBackend, check_tokenizers


def changed(source: Path, target: Path, swap: tuple[str, str] | None = None) -> Path:
    """The same tokenizer laid out otherwise, with two tokens' ids swapped where asked for."""
    target.mkdir()
    said = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    if swap:
        ids, (one, other) = said["model"]["vocab"], swap
        ids[one], ids[other] = ids[other], ids[one]
    (target / "tokenizer.json").write_text(json.dumps(said, separators=(" ,", " : ")), encoding="utf-8")
    return target


def test_the_same_tokenizer_fits_whatever_the_padding(demo_model: Path, tmp_path: Path) -> None:
    base, copy = demo_model / "base", tmp_path / "copy"
    copy.mkdir()
    shutil.copy(base / "tokenizer.json", copy)
    check_tokenizers(base, 8192, copy, 9000)
    check_tokenizers(base, 8192, changed(base, tmp_path / "written-anew"), 8192)


def test_a_token_that_means_something_else_is_named(demo_model: Path, tmp_path: Path) -> None:
    base = demo_model / "base"
    other = changed(base, tmp_path / "other", swap=("a", "b"))
    with pytest.raises(
        HeadMismatch, match=r"not the base's tokenizer: its token \d+ is b'b', the base's b'a'"
    ):
        check_tokenizers(base, 8192, other, 8192)


def test_the_file_that_the_user_named_is_named_and_not_the_cache_s(demo_model: Path, tmp_path: Path) -> None:
    other = changed(demo_model / "base", tmp_path / "cached", swap=("a", "b"))
    place = asdict(Place("/home/me/small.gguf", 0, (1,), 0, 4))
    (other / POINTER).write_text(json.dumps({"model.norm.weight": place}))
    with pytest.raises(HeadMismatch, match=r"^/home/me/small\.gguf: not the base's tokenizer: its token"):
        check_tokenizers(demo_model / "base", 8192, other, 8192)


def test_without_tokenizers_the_numbers_of_ids_must_agree(demo_model: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    check_tokenizers(one, 200, other, 200)
    with pytest.raises(HeadMismatch, match="it has 100 token ids, the base 200"):
        check_tokenizers(one, 200, other, 100)
    with pytest.raises(HeadMismatch, match="is missing"):
        check_tokenizers(demo_model / "base", 8192, other, 8192)


def test_a_model_with_gated_delta_layers_does_not_draft(demo_model: Path, tmp_path: Path) -> None:
    """Nor is it planned."""
    small = {"model_type": "qwen3_next", "vocab_size": 8192, "num_hidden_layers": 4, "hidden_size": 64}
    small |= {"num_attention_heads": 4, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(small), encoding="utf-8")
    options = DraftModelOptions(demo_model / "base", drafter="model", draft_model=tmp_path)
    with pytest.raises(HeadMismatch, match="gated delta layers cannot draft"):
        _ = LanguageModelBackend(options).model
    base, drafts = str(demo_model / "base"), {"drafter": "model", "draft_model": str(tmp_path)}
    with pytest.raises(HeadMismatch, match="gated delta layers cannot draft"):
        plan_fleet(FleetOptions(base, devices="h#cpu=1G", **drafts))  # type: ignore[arg-type]
