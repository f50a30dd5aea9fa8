"""Loading heads: any published layout, shapes from tensors, and both shapes where something does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from specsot.errors import HeadMismatch, InvalidRequest, ModelError
from specsot.members import Overrides
from specsot.model.attention import Span, plan_attention
from specsot.model.kv import KVPages
from specsot_drafter.heads.loading import load_head
from specsot_drafter.measure import ROWS, measure_levels
from tests.models import Shape, write_base, write_head

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], object]
BASE = Shape(layers=9)
SPECULATORS_1 = (("layers.0.", "transformer."), ("fc.", "fusion_fc."))
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base and an EAGLE-3 head."""
    write_base(tmp_path / "base", BASE)
    write_head(tmp_path / "head", BASE)
    return tmp_path


@pytest.fixture
def first(folder: Path) -> Path:
    """The same base and an EAGLE-1 head."""

    def turn(tensors: Tensors) -> None:
        kept = {name: tensors[name] for name in tensors if "mlp" in name or "o_proj" in name}
        kept |= {f"midlayer.self_attn.{n}_proj.weight": torch.randn(s, 64) * 0.1 for n, s in SIZES.items()}
        kept["midlayer.post_attention_layernorm.weight"] = torch.ones(64)
        tensors.clear()
        tensors |= {name.replace("midlayer.", "layers.0."): tensor for name, tensor in kept.items()}
        tensors |= {"fc.weight": torch.randn(64, 128) * 0.1, "fc.bias": torch.randn(64)}

    change(folder, turn)
    return folder


SIZES = {"q": 64, "k": 32, "v": 32}


def load(folder: Path, *overrides: Any, **more: Any) -> Any:
    theta, layers = overrides or (None, None)
    told = Overrides(theta, layers)
    return load_head(folder / "head", folder / "base", torch.float32, "cpu", **more, overrides=told)


def change(folder: Path, edit: Edit) -> None:
    file = folder / "head" / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def configure(folder: Path, *without: str, **fields: object) -> None:
    file = folder / "head" / "config.json"
    known = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in known.items() if name not in without}))


@torch.inference_mode()
def answer(head: Any) -> torch.Tensor:
    """Log-probabilities behind a text of 9 rows, the same text for every head."""
    tokens = torch.arange(30, 39)
    features = torch.randn(9, head.hidden, generator=torch.Generator().manual_seed(5))
    kv = KVPages(head.layers, 1, 9, head.kv_heads, head.head_dim, head.dtype, head.device)
    plan = plan_attention([Span(9, 0, 9, (0,))], 9, head.group, "packed", head.dtype, "cpu")
    rows = torch.arange(9)
    return head.log_probs(head.forward(tokens, features, rows, rows, plan, kv))


def test_an_eagle_3_head_says_what_the_ring_must_know(folder: Path) -> None:
    head = load(folder)
    assert (head.kind, head.taps, head.width, head.positions) == ("eagle3", (2, 4, 6), 64, 512)
    assert head.row_bytes == 4 * (2 * 2 * 16 + 64)
    assert {tap: tuple(part.shape) for tap, part in head.tap_slices().items()} == dict.fromkeys(
        (2, 4, 6), (64, 64)
    )


def test_an_eagle_1_head_reads_the_last_state_behind_the_base_s_norm(first: Path) -> None:
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


def test_states_behind_a_norm_travel_side_by_side(folder: Path) -> None:
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
    "renamed",
    [
        (("midlayer.", "layers.0."),),
        (("", "model."),),
        (("midlayer.", "model.layers.0."),),
    ],
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


def test_embeddings_of_its_own_win_and_strange_ones_are_told(folder: Path) -> None:
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


@pytest.mark.parametrize("layers", [(), (4, 2, 6), (2, 2, 6), (2, 4, 10)])
def test_layers_that_cannot_be_are_refused(folder: Path, layers: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="aux_layers must be"):
        load(folder, None, layers)


def test_an_eagle_1_head_has_no_layers_to_name(first: Path) -> None:
    with pytest.raises(InvalidRequest, match="an EAGLE-1 head has no aux_layers"):
        load(first, None, (2, 4, 6))


def _drop(*names: str) -> Edit:
    return lambda tensors: [tensors.pop(name) for name in names]


def _put(name: str, *shape: int) -> Edit:
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_put("fc.weight", 64, 128), r"fc.weight is \[64, 128\].*\[64, 192\]"),
        (_put("fc.weight", 64, 256), r"fc.weight is \[64, 256\].*\[64, 192\]"),
        (_put("fc.bias", 63), r"fc.bias is \[63\].*\[64\]"),
        (_put("midlayer.self_attn.q_proj.weight", 64, 64), r"midlayer.* is \[64, 64\].*\[64, 128\]"),
        (_put("midlayer.self_attn.k_proj.weight", 40, 128), "64 rows for 4 heads.*40"),
        (_put("midlayer.self_attn.v_proj.weight", 16, 128), r"\[16, 128\].*\[32, 128\]"),
        (_put("midlayer.self_attn.o_proj.weight", 64), r"o_proj.weight is \[64\], which is no matrix"),
        (_put("midlayer.self_attn.q_norm.weight", 8), r"q_norm.weight is \[8\].*\[16\]"),
        (_put("midlayer.self_attn.q_proj.bias", 8), r"q_proj.bias is \[8\].*\[64\]"),
        (_put("midlayer.mlp.down_proj.weight", 64, 95), r"\[64, 95\].*\[64, 96\]"),
        (_put("midlayer.hidden_norm.weight", 63), r"\[63\].*\[64\]"),
        (_put("layers.1.self_attn.q_proj.weight", 64, 128), r"\[64, 128\].*\[64, 64\]"),
        (_put("norm.weight", 63), r"\[63\].*\[64\]"),
        (_put("input_norm.weight", 64), r"input_norm.weight is \[64\].*\[192\]"),
        (_put("fc_norm.0.weight", 192), r"fc_norm.0.weight is \[192\].*\[64\]"),
        (_put("d2t", 119), r"d2t is \[119\].*\[120\]"),
        (lambda tensors: tensors.update(d2t=torch.full((120,), 100)), "ids 100..219, the base has 200"),
        (lambda tensors: tensors.update(d2t=torch.full((120,), -1)), "ids -1..118, the base has 200"),
        (_drop("d2t"), r"lm_head.weight is \[120, 64\].*\[200, 64\]"),
        (_put("lm_head.weight", 120, 48), r"lm_head.weight is \[120, 48\].*\[120, 64\]"),
        (_put("embed_tokens.weight", 200, 48), r"\[200, 48\].*\[200, 64\]"),
        (_put("embed_tokens.weight", 199, 64), r"\[199, 64\].*\[200, 64\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_shapes(folder: Path, edit: Edit, words: str) -> None:
    change(folder, edit)
    with pytest.raises(HeadMismatch, match=words):
        load(folder)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_put("fc.weight", 64, 192), r"fc.weight is \[64, 192\].*\[64, 128\]"),
        (_put("fc.weight", 48, 128), r"fc.weight is \[48, 128\].*\[64, 128\]"),
        (_put("fc.bias", 1), r"fc.bias is \[1\].*\[64\]"),
        (_put("embedding_layernorm.weight", 63), r"\[63\].*\[64\]"),
        (_put("layers.0.self_attn.q_proj.weight", 64, 65), r"\[64, 65\].*\[64, 64\]"),
        (_put("layers.0.mlp.gate_proj.weight", 96, 65), r"\[96, 65\].*\[96, 64\]"),
    ],
)
def test_an_eagle_1_head_that_does_not_fit_is_refused(first: Path, edit: Edit, words: str) -> None:
    change(first, edit)
    with pytest.raises(HeadMismatch, match=words):
        load(first)


@pytest.mark.parametrize("kind", ["folder", "first"])
def test_a_head_of_another_base_is_refused(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    write_base(folder / "base", Shape(hidden=96, layers=9))
    words = r"\[64, 192\].*\[64, 288\]" if kind == "folder" else r"\[64, 128\].*\[96, 192\]"
    with pytest.raises(HeadMismatch, match=words):
        load(folder)


def test_a_narrow_head_needs_embeddings_and_lm_head_of_its_own(folder: Path) -> None:
    """Its base is wider than it is."""
    write_base(folder / "base", Shape(hidden=96, layers=9))
    change(folder, _put("fc.weight", 64, 288))
    with pytest.raises(HeadMismatch, match=r"embed_tokens.weight.*\[200, 64\].*\[200, 96\]"):
        load(folder)
    change(folder, _put("embed_tokens.weight", 200, 64))
    assert load(folder).hidden == 64
    change(folder, _drop("lm_head.weight", "d2t"))
    configure(folder, "draft_vocab_size")
    with pytest.raises(HeadMismatch, match=r"lm_head.weight.*64.*\[200, 96\]"):
        load(folder)
    configure(folder, eagle_config={"use_aux_hidden_state": False})
    with pytest.raises(HeadMismatch, match=r"last state.*\[96\].*\[64\]"):
        load(folder)


def test_a_base_with_too_few_layers_is_refused_unless_told_what_to_tap(folder: Path) -> None:
    write_base(folder / "base", Shape(layers=6))
    with pytest.raises(HeadMismatch, match="6 layers"):
        load(folder)
    assert load(folder, None, (1, 3, 6)).taps == (1, 3, 6)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([2, 4, 10], r"must be in 0..9, as the base has 9 layers, got \[2, 4, 10\]"),
        ([1, 3, 9], r"must be in 0..9.*got \[2, 4, 10\]"),
        ([-1, 3, 5], r"must be in 0..9"),
        ([2, 2, 5], "must be different layers"),
        ([], "must be different layers"),
        ([2, 4], r"fc.weight is \[64, 192\].*\[64, 128\]"),
        ([2, "4", 6], "must be layer numbers"),
        ("2,4,6", "must be layer numbers"),
    ],
)
def test_layer_ids_that_cannot_be_are_refused(folder: Path, ids: object, words: str) -> None:
    configure(folder, **{IDS: ids})
    with pytest.raises(HeadMismatch, match=words):
        load(folder)


@pytest.mark.parametrize("heads", [None, 3, 0, -4, "four", True])
def test_a_number_of_heads_that_cannot_be_is_refused(folder: Path, heads: object) -> None:
    configure(folder, num_attention_heads=heads)
    with pytest.raises(HeadMismatch, match="64 rows"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "midlayer.self_attn.o_proj.weight",
        "midlayer.mlp.up_proj.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.post_attention_layernorm.weight",
    ],
)
def test_a_missing_tensor_is_named_as_the_file_would(folder: Path, name: str) -> None:
    change(folder, _drop(name))
    with pytest.raises(ModelError, match=name):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"norm_before_fc": True}, "input_norm.weight"),
        ({"fc_norm": True}, "fc_norm.0.weight"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"norm_output": "yes"}, "norm_output must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {}}, "quantized weights"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number > 0"),
        ({"rope_theta": "large"}, "rope_theta must be a number > 0"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn'"),
        ({"transformer_layer_config": 3}, "transformer_layer_config must be an object"),
        ({"eagle_config": []}, "eagle_config must be an object"),
    ],
)
def test_a_config_that_asks_for_what_is_not_there_is_refused(
    folder: Path, fields: dict[str, object], words: str
) -> None:
    configure(folder, **fields)
    with pytest.raises(ModelError, match=words):
        load(folder)


def test_the_base_s_lm_head_is_shared_only_where_the_config_agrees(folder: Path) -> None:
    change(folder, _drop("lm_head.weight", "d2t", "t2d"))
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight, and draft_vocab_size 120"):
        load(folder)
    configure(folder, draft_vocab_size=None)
    assert load(folder).draft_vocab == 200


def test_two_names_of_one_tensor_are_refused(folder: Path) -> None:
    change(folder, _put("layers.0.hidden_norm.weight", 64))
    with pytest.raises(ModelError, match=r"are both layers\.0\.hidden_norm\.weight"):
        load(folder)


def test_an_ordinary_model_is_no_head(folder: Path) -> None:
    shutil.rmtree(folder / "head")
    write_base(folder / "head", Shape(layers=1))
    with pytest.raises(ModelError, match=r"fc\.weight"):
        load(folder)
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    with pytest.raises(ModelError, match="no EAGLE head"):
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
