"""Loading heads: any published layout, shapes from tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from specsot.errors import ModelError
from specsot_drafter import loader
from specsot_drafter.loader import measure_levels
from tests.drafter.heads import IDS, SPECULATORS_1, Tensors, answer, change, configure, drop, load


def test_an_eagle_3_head_says_what_the_ring_must_know(folder: Path) -> None:
    head = load(folder)
    assert (head.kind, head.taps, head.width, head.positions) == ("eagle3", (2, 4, 6), 64, 512)
    assert head.row_bytes == 4 * (2 * 2 * 16 + 64)
    assert {tap: tuple(part.shape) for tap, part in head.tap_slices().items()} == dict.fromkeys(
        (2, 4, 6), (64, 64)
    )


def test_an_eagle_1_head_reads_the_last_state_after_the_base_models_norm(first: Path) -> None:
    head, states = load(first), torch.randn(3, 64)
    assert (head.kind, head.taps, head.width, head.draft_vocab) == ("eagle1", (9,), 64, 200)
    assert torch.equal(head.tap_slices()[9], torch.eye(64))
    weight = load_file(first / "base" / "model.safetensors")["model.norm.weight"]
    wanted = torch.nn.functional.rms_norm(states, (64,), weight, 1e-5)
    torch.testing.assert_close(head.features(states), wanted)


def test_an_eagle_1_head_drafts_with_the_base_s_lm_head(first: Path) -> None:
    outputs = torch.randn(3, 64)
    table = load_file(first / "base" / "model.safetensors")["model.embed_tokens.weight"]
    change(first, lambda tensors: tensors.update({"lm_head.weight": torch.randn(200, 64)}))
    head = load(first)
    torch.testing.assert_close(head.logits(outputs), outputs @ table.T)
    assert head.to_target(torch.tensor([0, 199])).tolist() == [0, 199]


def test_the_slices_are_the_head_s_fc(folder: Path) -> None:
    fc = load_file(folder / "head" / "model.safetensors")["fc.weight"]
    states = torch.randn(5, 192)
    parts = zip(states.chunk(3, 1), load(folder).tap_slices().values())
    torch.testing.assert_close(
        sum(part @ weight.T for part, weight in parts), states @ fc.T, atol=1e-5, rtol=0
    )


def test_states_after_a_norm_are_sent_alongside_each_other(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({"input_norm.weight": torch.ones(192)}))
    head, states = load(folder), torch.randn(5, 192)
    parts = zip(states.chunk(3, 1), head.tap_slices().values())
    assert head.width == 192
    assert torch.equal(sum(part @ weight.T for part, weight in parts), states)


def test_ids_are_shifted_by_the_published_offsets(folder: Path) -> None:
    tensors = load_file(folder / "head" / "model.safetensors")
    known = tensors["t2d"].nonzero().flatten()
    assert load(folder).to_target(torch.arange(len(known))).tolist() == known.tolist()


def test_a_config_that_lies_is_not_believed(folder: Path) -> None:
    """Layers, head size, draft vocabulary and tying are what the tensors say."""
    honest = answer(load(folder))
    configure(
        folder, num_hidden_layers=40, head_dim=99, draft_vocab_size=7, tie_word_embeddings=True, hidden_size=1
    )
    head = load(folder)
    torch.testing.assert_close(answer(head), honest)
    assert (head.head_dim, head.kv_heads, head.draft_vocab, head.layers) == (16, 2, 120, 1)


@pytest.mark.parametrize(
    "renamed", [(("midlayer.", "layers.0."),), (("", "model."),), (("midlayer.", "model.layers.0."),)]
)
def test_names_do_not_matter(folder: Path, renamed: tuple[tuple[str, str], ...]) -> None:
    same = answer(load(folder))
    change(folder, lambda tensors: _rename(tensors, renamed))
    torch.testing.assert_close(answer(load(folder)), same)


def test_names_of_an_eagle_1_head_do_not_matter(first: Path) -> None:
    same = answer(load(first))
    change(first, lambda tensors: _rename(tensors, SPECULATORS_1))
    torch.testing.assert_close(answer(load(first)), same)


def _rename(tensors: Tensors, renamed: tuple[tuple[str, str], ...]) -> None:
    known = dict(tensors)
    tensors.clear()
    for name, tensor in known.items():
        for begins, other in renamed:
            if name.startswith(begins):
                name = other + name.removeprefix(begins)
        tensors[name] = tensor


def test_a_nested_config_is_read(folder: Path) -> None:
    configure(folder, rope_theta=777.0)
    same = answer(load(folder))
    inner = json.loads((folder / "head" / "config.json").read_text())
    outer = {"transformer_layer_config": inner, "rms_norm_eps": None, "speculators_config": {}}
    (folder / "head" / "config.json").write_text(json.dumps(outer))
    torch.testing.assert_close(answer(load(folder)), same)


def test_embeddings_of_its_own_take_precedence_and_unknown_ones_are_reported(folder: Path) -> None:
    table = load_file(folder / "base" / "model.safetensors")["model.embed_tokens.weight"]
    same = answer(load(folder))
    change(folder, lambda tensors: tensors.update({"embed_tokens.weight": table.clone()}))
    with capture_logs() as quiet:
        torch.testing.assert_close(answer(load(folder)), same)
    change(folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.randn(200, 64)}))
    with capture_logs() as told:
        assert not torch.allclose(answer(load(folder)), same)
    assert (quiet, [line["log_level"] for line in told]) == ([], ["warning"])


def test_a_full_draft_vocabulary_needs_no_offsets(folder: Path) -> None:
    def widen(tensors: Tensors) -> None:
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = torch.randn(200, 64)

    change(folder, widen)
    assert load(folder).to_target(torch.tensor([0, 199])).tolist() == [0, 199]
    change(folder, lambda tensors: tensors.update({"d2t": torch.ones(200, dtype=torch.long)}))
    assert load(folder).to_target(torch.tensor([0, 199])).tolist() == [0, 199]


def test_pickled_weights_are_read_only_where_asked_for(folder: Path) -> None:
    file = folder / "head" / "model.safetensors"
    torch.save(load_file(file), folder / "head" / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(ModelError):
        load(folder)
    assert load(folder, allow_pickle_bin=True).width == 64


def test_the_rope_base_is_the_head_s_own_else_ten_thousand(folder: Path) -> None:
    """The base's theta is never inherited, and a user's word counts most."""
    named = answer(load(folder))
    configure(folder, "rope_theta")
    base = folder / "base" / "config.json"
    base.write_text(json.dumps(json.loads(base.read_text()) | {"rope_theta": 500000.0}))
    torch.testing.assert_close(answer(load(folder)), named)
    configure(folder, rope_theta=500.0)
    assert not torch.allclose(answer(load(folder)), named)
    torch.testing.assert_close(answer(load(folder, 10000.0, None)), named)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_dynamic_scaling_sets_in_where_drafting_ends(folder: Path, key: str) -> None:
    plain = load(folder)
    configure(folder, rope_scaling={key: "dynamic", "factor": 2.0}, max_position_embeddings=300)
    scaled = load(folder)
    torch.testing.assert_close(answer(scaled), answer(plain))
    assert (plain.positions, scaled.positions) == (512, 300)


@pytest.mark.parametrize(
    ("ids", "taps"),
    [
        ([2, 4, 6], (2, 4, 6)),
        ([1, 3, 5], (2, 4, 6)),  # these name the layers whose output is taken
        ([6, 2, 4], (2, 4, 6)),
        ([0, 4, 9], (0, 4, 9)),
        ([3, 6, 9], (3, 6, 9)),
        (None, (2, 4, 6)),
    ],
)
def test_both_conventions_of_layer_ids(folder: Path, ids: list[int] | None, taps: tuple[int, ...]) -> None:
    configure(folder, **{IDS: ids})
    assert load(folder).taps == taps
    configure(folder, IDS, eagle_config={IDS: ids, "use_aux_hidden_state": True})
    assert load(folder).taps == taps


def test_layers_named_by_a_user_count_as_they_are(folder: Path) -> None:
    configure(folder, **{IDS: [1, 3, 5]})
    assert load(folder, None, (1, 4, 9)).taps == (1, 4, 9)


def test_the_base_s_lm_head_is_shared_only_where_the_config_agrees(folder: Path) -> None:
    change(folder, drop("lm_head.weight", "d2t", "t2d"))
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight, and draft_vocab_size 120"):
        load(folder)
    configure(folder, draft_vocab_size=None)
    assert load(folder).draft_vocab == 200


def test_every_measured_point_takes_time(folder: Path) -> None:
    """By a counting clock: every look at it is a second later."""
    seconds = iter(range(10**6))
    curve = measure_levels(load(folder), lambda: float(next(seconds)))
    assert [rows for rows, _ in curve] == list(loader.MEASURED_ROWS)
    assert all(taken > 0 for _, taken in curve)
