"""Loading EAGLE-3 heads: shapes come from tensors, and what does not fit is refused with both shapes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specsot.errors import HeadMismatch, ModelError
from specsot_drafter.heads.eagle3 import Eagle3Head
from specsot_drafter.heads.loading import load_head
from specsot_drafter.measure import ROWS, measure_levels
from tests.models import Shape, write_base, write_head

Tensors = dict[str, torch.Tensor]
BASE = Shape(layers=9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", BASE)
    write_head(tmp_path / "head", BASE)
    return tmp_path


def load(folder: Path, **more: Any) -> Any:
    return load_head(folder / "head", folder / "base", torch.float32, "cpu", **more)


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    file = folder / "head" / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def configure(folder: Path, **fields: object) -> None:
    file = folder / "head" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_head_says_what_the_ring_must_know(folder: Path) -> None:
    head = load(folder)
    assert head.taps == (2, 4, 6)
    assert head.width == 64
    assert head.row_bytes == 4 * (2 * 2 * 16 + 64)
    assert head.positions == 512
    assert {layer: tuple(weight.shape) for layer, weight in head.tap_slices().items()} == dict.fromkeys(
        (2, 4, 6), (64, 64)
    )


def test_the_slices_are_the_head_s_fc(folder: Path) -> None:
    fc = load_file(folder / "head" / "model.safetensors")["fc.weight"]
    states = torch.randn(5, 192)
    parts = zip(states.chunk(3, 1), load(folder).tap_slices().values())
    torch.testing.assert_close(
        sum(part @ weight.T for part, weight in parts), states @ fc.T, atol=1e-5, rtol=0
    )


def test_ids_are_shifted_by_the_published_offsets(folder: Path) -> None:
    tensors = load_file(folder / "head" / "model.safetensors")
    known = tensors["t2d"].nonzero().flatten()
    assert load(folder).to_target(torch.arange(len(known))).tolist() == known.tolist()


def test_a_config_that_lies_is_not_believed(folder: Path) -> None:
    """Layers, head size, draft vocabulary and tying are what the tensors say."""
    honest = load(folder)
    configure(
        folder, num_hidden_layers=40, head_dim=99, draft_vocab_size=7, tie_word_embeddings=True, hidden_size=1
    )
    head, outputs = load(folder), torch.randn(3, 64)
    torch.testing.assert_close(head.log_probs(outputs), honest.log_probs(outputs))
    assert (head.head_dim, head.kv_heads, head.draft_vocab) == (16, 2, 120)


def test_embeddings_of_its_own_win(folder: Path) -> None:
    own = torch.randn(200, 64)
    change(folder, lambda tensors: tensors.update({"embed_tokens.weight": own}))
    assert torch.equal(load(folder)._table, own)


def test_a_full_draft_vocabulary_needs_no_offsets(folder: Path) -> None:
    def widen(tensors: Tensors) -> None:
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = torch.randn(200, 64)

    change(folder, widen)
    assert load(folder).to_target(torch.tensor([0, 199])).tolist() == [0, 199]


def test_pickled_weights_are_read_only_where_asked_for(folder: Path) -> None:
    file = folder / "head" / "model.safetensors"
    torch.save(load_file(file), folder / "head" / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(ModelError):
        load(folder)
    assert load(folder, allow_pickle_bin=True).width == 64


def test_the_rope_base_is_the_head_s_own_else_ten_thousand(folder: Path) -> None:
    """The base's theta is never inherited."""
    named = load(folder)
    file = folder / "head" / "config.json"
    fields = json.loads(file.read_text())
    del fields["rope_theta"]
    file.write_text(json.dumps(fields))
    base = folder / "base" / "config.json"
    base.write_text(json.dumps(json.loads(base.read_text()) | {"rope_theta": 500000.0}))
    positions = torch.tensor([3, 77])
    torch.testing.assert_close(load(folder)._rotary.table(positions), named._rotary.table(positions))
    configure(folder, rope_theta=500000.0)
    assert not torch.allclose(load(folder)._rotary.table(positions), named._rotary.table(positions))


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_put("fc.weight", 64, 128), r"fc.weight is \[64, 128\].*\[64, 192\]"),
        (_put("midlayer.self_attn.q_proj.weight", 64, 64), r"\[64, 64\].*\[64, 128\]"),
        (_put("midlayer.self_attn.k_proj.weight", 40, 128), "64 rows for 4 heads.*40"),
        (_put("norm.weight", 63), r"\[63\].*\[64\]"),
        (_put("d2t", 119), r"d2t is \[119\].*\[120\]"),
        (lambda tensors: tensors.update(d2t=torch.full((120,), 100)), "ids 100..219, the base has 200"),
        (_drop("d2t"), r"lm_head.weight is \[120, 64\].*\[200, 64\]"),
        (_put("embed_tokens.weight", 200, 48), r"\[200, 64\].*\[200, 48\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_shapes(
    folder: Path, edit: Callable[[Tensors], object], words: str
) -> None:
    change(folder, edit)
    with pytest.raises(HeadMismatch, match=words):
        load(folder)


def test_a_head_of_another_base_is_refused(folder: Path) -> None:
    write_base(folder / "base", Shape(hidden=96))
    with pytest.raises(HeadMismatch, match=r"\[64, 192\].*\[64, 288\]"):
        load(folder)


def test_a_base_with_too_few_layers_is_refused(folder: Path) -> None:
    write_base(folder / "base", Shape(layers=6))
    with pytest.raises(HeadMismatch, match="6 layers"):
        load(folder)


@pytest.mark.parametrize("heads", [None, 3, "four"])
def test_a_number_of_heads_that_cannot_be_is_refused(folder: Path, heads: object) -> None:
    configure(folder, num_attention_heads=heads)
    with pytest.raises(HeadMismatch, match="64 rows"):
        load(folder)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.mlp.up_proj.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    change(folder, _drop(name))
    with pytest.raises(ModelError, match=name):
        load(folder)


def test_a_broken_or_absent_head_is_one_clear_line(folder: Path) -> None:
    (folder / "head" / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(folder)
    shutil.rmtree(folder / "head")
    with pytest.raises(ModelError):
        load(folder)


def test_every_measured_point_takes_time(folder: Path) -> None:
    """By a counting clock: every look at it is a second later."""
    seconds = iter(range(10**6))
    curve = measure_levels(load(folder), lambda: float(next(seconds)))
    assert [rows for rows, _ in curve] == list(ROWS)
    assert all(taken > 0 for _, taken in curve)
