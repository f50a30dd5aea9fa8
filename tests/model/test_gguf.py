"""GGUF files: the same model as Transformers makes of them, and one clear line for each way to be broken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.integrations.gguf import dequant

from specsot.checkpoint.config import read_config
from specsot.checkpoint.fingerprint import fingerprint
from specsot.checkpoint.resolving import folder_of_model, resolve_model
from specsot.core.vocabulary import read_vocabulary
from specsot.errors import ModelError
from specsot.members import Range
from specsot_bench.reference_model import load_in_transformers
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.decoder import Decoder
from specsot_model.memory_fit import WeightForm, weights_of
from specsot_model.weights import WeightFiles
from tests.model.gguf_files import KINDS, Words, no_words, write_gguf
from tests.model.tiny import Ring, load, write_model

PROMPT = [7, 99, 3, 50, 21, 21, 64, 8, 15, 30, 77, 41, 5, 90, 13, 2, 66, 38, 4, 19]
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, wide heads": ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 128}),  # which is what Transformers takes them to have
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3}
LONG = {"rope_type": "longrope", "rope_theta": 5e3, "long_factor": [1.5, *[2.0] * 7],
        "short_factor": [1.0] * 8, "original_max_position_embeddings": 16}  # fmt: skip
MSCALE = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 40.0, "original_max_position_embeddings": 16,
          "mscale": 0.707, "mscale_all_dim": 0.707}  # fmt: skip
FAR = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
NEAR = {"rope_type": "default", "rope_theta": 5e3}  # of the same base: GGUF has one
GEMMA = {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specsot" / "gguf"


@pytest.fixture
def model(tmp_path: Path) -> torch.nn.Module:
    """A copy, because some tests change it, and those of other files share the model."""
    return deepcopy(write_model(tmp_path / "hf", **SHAPE))


@torch.inference_mode()
def answer(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_quantized_weights_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    file = write_gguf(tmp_path / "m.gguf", write_model(tmp_path / "hf", kind, **SHAPE | changes), KINDS)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    ours, _ = Ring.of(load(resolve_model(file), (1, 3))).feed(PROMPT, 0)
    torch.testing.assert_close(ours, answer(theirs), atol=1e-4, rtol=0)
    assert torch.equal(ours, Ring.of(load(resolve_model(file), (3,))).feed(PROMPT, 0)[0])


def add_frequencies(writer: GGUFWriter) -> None:
    """As llama.cpp works them out of Llama 3's settings."""
    waves = 2 * np.pi * 500000 ** (np.arange(8) / 8)
    smooth = (8192 / waves - 1) / (4 - 1)
    factors = np.where(waves < 2048, 1.0, np.where(waves > 8192, 8.0, 1 / ((1 - smooth) / 8 + smooth)))
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def add_linear(writer: GGUFWriter) -> None:
    writer.add_string("llama.rope.scaling.type", "linear")
    writer.add_float32("llama.rope.scaling.factor", 2.0)


GEMMA4_SMALL = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": SHAPE.get("vocab_size", 101),
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "final_logit_softcapping": 3.0,
}
# Transformers reads no GGUF files of them, or overlooks something: the model they were made of.
OTHERS: dict[str, tuple[str, dict[str, Any], Callable[[GGUFWriter], None]]] = {
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}, lambda writer: None),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}, add_frequencies),
    "linear": ("llama", {"rope_parameters": LINEAR}, add_linear),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, lambda writer: None),
    "qwen3 moe": (
        "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
        lambda writer: None,
    ),
    "pythia": ("gpt_neox", {}, lambda writer: None),
    "qwen3-vl": ("qwen3_vl", {}, lambda writer: None),
    "qwen3-vl moe": ("qwen3_vl_moe", {}, lambda writer: None),
    "qwen3 next": ("qwen3_next", {}, lambda writer: None),
    "qwen3.5": ("qwen3_5_text", {"tie_word_embeddings": True}, lambda writer: None),
    "qwen3.5 moe": ("qwen3_5_moe_text", {}, lambda writer: None),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5}, lambda writer: None),
    "olmo 2": ("olmo2", {}, lambda writer: None),
    "olmo 3": ("olmo3", {"sliding_window": 7, "rope_parameters": FAR | {"sliding_attention": NEAR}},
               lambda writer: None),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True}, lambda writer: None),
    "ministral 3": ("ministral3", {"tie_word_embeddings": True}, lambda writer: None),
    "phi 3": ("phi3", {"sliding_window": 7}, lambda writer: None),
    "phi 4 mini": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 16},
                   lambda writer: None),
    "gemma 2": ("gemma2", {"sliding_window": 7, **GEMMA}, lambda writer: None),
    "gemma 3": ("gemma3_text", {"sliding_window": 7, "rope_parameters": FAR, "num_hidden_layers": 7, **GEMMA},
                lambda writer: None),
    "gemma 4": ("gemma4_text", {"final_logit_softcapping": 3.0, "tie_word_embeddings": True},
                lambda writer: None),
    "gemma 4 dense": ("gemma4_text", {"final_logit_softcapping": 3.0, "enable_moe_block": False},
                      lambda writer: None),
    "gemma 4 e2b": ("gemma4_text", {**GEMMA4_SMALL, "tie_word_embeddings": True}, lambda writer: None),
    "gemma 4 e4b": ("gemma4_text", {**GEMMA4_SMALL, "use_double_wide_mlp": False, "attention_k_eq_v": True},
                    lambda writer: None),
    "youtu": ("youtu", {"tie_word_embeddings": True}, lambda writer: None),
    "deepseek v2": ("deepseek_v2", {"rope_parameters": MSCALE}, lambda writer: None),
    "deepseek v3": ("deepseek_v3", {"rope_parameters": MSCALE}, lambda writer: None),
    "glm 4.7 flash": ("glm4_moe_lite", {}, lambda writer: None),
    "minimax m2": ("minimax_m2", {"rotary_dim": 8}, lambda writer: None),
    "glm 4.5": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
                lambda writer: None),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_the_logits_are_those_of_the_model_a_file_was_made_of(name: str, tmp_path: Path) -> None:
    kind, changes, also = OTHERS[name]
    model = write_model(tmp_path / "hf", kind, **SHAPE | changes)
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model, also=also))
    ours, _ = Ring.of(load(made, (2, read_config(made).layers))).feed(PROMPT, 0)
    torch.testing.assert_close(ours, answer(model), atol=1e-4, rtol=0)
    assert read_config(made).rope == read_config(tmp_path / "hf").rope


@pytest.mark.parametrize("kind", ["deepseek_v2", "glm4_moe_lite"])
def test_latent_attention_packs_the_rows_of_two_tensors_as_one_product(kind: str, tmp_path: Path) -> None:
    """Queries projected directly, and from a vector; in int8, from a GGUF file and from safetensors."""
    made = resolve_model(write_gguf(tmp_path / "m.gguf", write_model(tmp_path / "hf", kind, **SHAPE)))
    told = [
        Ring.of([Decoder.load(one, None, torch.float32, "cpu", quantization="int8")]).feed(PROMPT, 0)[0]
        for one in (made, tmp_path / "hf")
    ]
    assert torch.equal(*told)


def test_gpt_oss_with_experts_in_mxfp4(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 32}
    model = write_model(tmp_path / "hf", "gpt_oss", **SHAPE, rope_parameters={**yarn, "truncate": False})
    for name, matrix in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            rows = gguf.quants.quantize(matrix.data.mT.contiguous().numpy(), GGMLQuantizationType.MXFP4)
            matrix.data = torch.from_numpy(gguf.dequantize(rows, GGMLQuantizationType.MXFP4)).mT.contiguous()
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model))
    whole, _ = Ring.of(load(made, (2, 3))).feed(PROMPT, 0)
    torch.testing.assert_close(whole, answer(model), atol=1e-4, rtol=0)
    assert read_config(made).rope == read_config(tmp_path / "hf").rope
    assert read_config(made).windowed == {0, 2}


def test_layers_that_predict_further_tokens_are_none_of_the_models_layers(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        writer.add_block_count(4)
        for name in ("attn_norm", "nextn.enorm"):
            writer.add_tensor(f"blk.3.{name}.weight", np.zeros(64, np.float32))

    model = write_model(tmp_path / "hf", "glm4_moe", **SHAPE)
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model, also=add))
    assert read_config(made).layers == 3
    in_layer = ("model.layers.3.enorm.weight", "model.layers.3.input_layernorm.weight")
    assert tuple(WeightFiles(made).under("model.layers.3")) == in_layer


@pytest.mark.parametrize("kind", ["gemma3_text", "minimax_m2", "phi3"])
def test_what_verify_compares_with_is_transformers_own_reading(kind: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "hf", kind, **SHAPE)
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model, KINDS))
    ours, _ = Ring.of(load(made, (2, 3))).feed(PROMPT, 0)
    torch.testing.assert_close(ours, answer(load_in_transformers(made, torch.float32)), atol=1e-4, rtol=0)


def test_every_type_that_the_package_dequantizes_is_read(model, tmp_path: Path) -> None:
    """Of random bytes; compared with Transformers' own code, where it has some."""
    kinds = sorted(gguf.quants._type_traits)
    draw = np.random.default_rng(1)
    stored = [draw.integers(0, 60, (3, 2 * GGML_QUANT_SIZES[kind][1]), np.uint8) for kind in kinds]

    def add(writer: GGUFWriter) -> None:
        for number, (kind, rows) in enumerate(zip(kinds, stored)):
            writer.add_tensor(f"blk.{number + 3}.ffn_up.weight", rows, raw_dtype=kind)

    files = WeightFiles(resolve_model(write_gguf(tmp_path / "m.gguf", model, also=add)))
    for number, (kind, rows) in enumerate(zip(kinds, stored)):
        name = f"model.layers.{number + 3}.mlp.up_proj.weight"
        found = files.tensor(name, torch.float32, "cpu")
        assert found.shape == files.shape(name) == (3, 2 * GGML_QUANT_SIZES[kind][0])
        if kind in dequant.GGML_BLOCK:
            torch.testing.assert_close(found, dequant.dequantize(torch.from_numpy(rows), kind).view_as(found))
        else:
            assert np.array_equal(found.numpy(), gguf.dequantize(rows, kind))
    assert len(kinds) >= 24


def test_a_range_reads_only_bytes_of_its_own_layers(model, tmp_path: Path) -> None:
    """The others are not there any more."""
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model))
    files, file = WeightFiles(made), tmp_path / "m.gguf"
    first = files.tensor("model.layers.1.input_layernorm.weight", torch.float32, "cpu")
    data = file.read_bytes()
    file.write_bytes(data[: data.index(first.numpy().tobytes())])
    load(made, (1,))
    with pytest.raises(ModelError, match=r"m\.gguf: model\.layers\.1\..*: "):
        load(made, (1, 2))


def test_weights_are_counted_as_they_are_held(model, tmp_path: Path) -> None:
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model, KINDS))
    config, form, whole = read_config(made), WeightForm(2), Range(0, 3)
    plain = weights_of(WeightFiles(tmp_path / "hf"), read_config(tmp_path / "hf"), whole, form)
    assert weights_of(WeightFiles(made), config, whole, form) == plain


def test_a_vocabulary_that_no_text_has_tokens_in_is_refused(model, tmp_path: Path) -> None:
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model))
    with pytest.raises(ModelError, match="its tokenizer has no tokens for text"):
        Prompts(made, Text(made))


def test_a_fingerprint_is_of_the_weights_wherever_they_lie(model, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", model)
    told = fingerprint(resolve_model(file))
    assert fingerprint(resolve_model(shutil.copy(file, tmp_path / "other.gguf"))) == told
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 3] += 1
    assert fingerprint(resolve_model(write_gguf(tmp_path / "trained.gguf", model))) != told
    assert fingerprint(resolve_model(write_gguf(tmp_path / "q8.gguf", model, KINDS[3:4]))) != told


def test_several_processes_make_one_directory_and_a_new_file_another(model, tmp_path: Path, cache) -> None:
    file = write_gguf(tmp_path / "m.gguf", model)
    with ThreadPoolExecutor(4) as pool:
        (made,) = set(pool.map(resolve_model, [file] * 4))
    assert (made.name, len(list(made.parent.iterdir()))) == ("m", 1)
    assert resolve_model(made) == made
    write_gguf(file, model, KINDS[3:4])
    assert resolve_model(file) != made


def test_a_folder_with_one_model_is_that_model(model, tmp_path: Path) -> None:
    place = tmp_path / "folder"
    place.mkdir()
    file = write_gguf(place / "m.gguf", model)
    (place / "mmproj-m.gguf").write_bytes(b"GGUF")
    (place / "config.json").write_text("{}")  # as uploads of GGUF files have it
    assert resolve_model(place) == resolve_model(file)
    shutil.copy(file, place / "other.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files; name one of m\.gguf, other\.gguf"):
        resolve_model(place)


def test_files_alongside_a_gguf_file_are_the_models_own(model, tmp_path: Path) -> None:
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model))
    assert (folder_of_model(made), folder_of_model(tmp_path / "hf")) == (tmp_path, tmp_path / "hf")


def test_a_model_in_parts_is_whole_or_refused(model, tmp_path: Path) -> None:
    place = tmp_path / "parts"
    place.mkdir()
    first = write_gguf(place / "m.gguf", model, split=12)
    made = resolve_model(place)
    assert (made, made.name) == (resolve_model(sorted(place.iterdir())[1]), "m")
    ours, _ = Ring.of(load(made, (1, 3))).feed(PROMPT, 0)
    torch.testing.assert_close(ours, answer(model), atol=1e-4, rtol=0)
    sorted(place.iterdir())[-1].unlink()
    with pytest.raises(ModelError, match=r"of-00003\.gguf: No such file"):
        resolve_model(first)


def cut(count: int) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(file.read_bytes()[:count])


BROKEN: dict[str, tuple[dict[str, Any], Callable[[Path], object] | None, str]] = {
    "no gguf": ({}, lambda file: file.write_bytes(b"PK"), "a file, but not a GGUF file"),
    "cut within the header": ({}, cut(700), "a broken GGUF header; was the file fetched to its end?"),
    "cut within the weights": ({}, cut(-100), "output.weight ends at byte .*: truncated"),
    "foreign": (
        {"arch": "t5"},
        None,
        "a GGUF of architecture 't5', not one of llama, mistral3, qwen2, qwen3",
    ),
    "doubles": (
        {"also": lambda writer: writer.add_tensor("blk.9.ffn_up.weight", np.zeros((2, 8)))},
        None,
        "ggml type 28 is none that the package gguf dequantizes",
    ),
    "foreign tensor": (
        {"also": lambda writer: writer.add_tensor("blk.0.ssm_a.weight", np.zeros(2, np.float32))},
        None,
        "blk.0.ssm_a.weight: llama has no such tensor here",
    ),
    "other factors": (
        {"also": lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32) * 3)},
        None,
        "rope_freqs.weight is not the scaling of Llama 3",
    ),
    "dynamic": (
        {"also": lambda writer: writer.add_string("llama.rope.scaling.type", "dynamic")},
        None,
        "rope scaling 'dynamic' is not one of none, linear, yarn, llama3, longrope",
    ),
    "another tokenizer": (
        {"words": Words("t5", None, ["a"], [1])},
        None,
        "tokenizer 't5' is not one of gpt2",
    ),
    "another split": (
        {"words": Words(pre="gpt-9", tokens=["a"], types=[1])},
        None,
        "pre 'gpt-9' is not known",
    ),
    "merges of nothing": (
        {"words": Words(pre="gpt-2", tokens=["a"], types=[1], merges=["a b"])},
        None,
        "its metadata make no model",
    ),
    "a word for a number": (
        {"also": lambda writer: writer.add_string("llama.attention.value_length", "x")},
        None,
        "keys and values of different lengths",
    ),
    "no scores": ({"words": Words("llama", None, ["a"], [1])}, None, "1 tokens have 0 scores, and no merges"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_unreadable_file_is_reported_in_one_line(name: str, model, tmp_path: Path, cache) -> None:
    written, harm, said = BROKEN[name]
    file = write_gguf(tmp_path / "m.gguf", model, **written)
    if harm:
        harm(file)
    with pytest.raises(ModelError, match=said) as caught:
        resolve_model(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    assert not list(cache.rglob("*.json"))


def test_a_missing_tensor_is_reported_in_one_line(model, tmp_path: Path) -> None:
    del model.model.layers[1].mlp.up_proj
    file = write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(resolve_model(file), (3,))


def test_answers_end_with_any_token_that_a_file_ends_them_with(model, tmp_path: Path) -> None:
    words = no_words(128)
    words.tokens[5], words.types[5], words.tokens[6] = "<|eot_id|>", 3, "<|im_end|>"  # a word like others
    words.more = {"eos_token_id": 2, "eot_token_id": 9}
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model, words=words))
    assert read_config(made).eos == (2, 5, 9)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ({5: "<end_of_turn>", 6: "<start_of_turn>"}, (2, 5)),
        ({5: "<|end|>", 6: "<|return|>", 7: "<|call|>"}, (2, 6, 7)),
        ({5: "<|end|>", 6: "<|return|>"}, (2, 5, 6)),
        ({5: "<|fim_pad|>", 6: "<|repo_name|>", 7: "<|file_sep|>", 8: "<|fim_prefix|>"}, (2, 5, 6, 7)),
    ],
    ids=["gemma", "gpt-oss", "one of both", "fill in the middle"],
)
def test_ends_of_turns_as_llama_cpp_knows_them(model, tokens, ends, tmp_path: Path) -> None:
    words = no_words(128)
    for id, token in tokens.items():
        words.tokens[id], words.types[id] = token, 3
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model, words=words))
    assert read_config(made).eos == ends


def test_fill_in_the_middle_ends_with_the_tokens_that_the_metadata_name(model, tmp_path: Path) -> None:
    words = no_words(128)
    words.more = {"eos_token_id": 2, "fim_pad_token_id": 7, "fim_rep_token_id": 8, "fim_sep_token_id": 9}
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model, words=words))
    assert read_config(made).eos == (2, 7, 8, 9)


def test_rows_that_a_converter_named_are_no_tokens(model, tmp_path: Path) -> None:
    """[PAD120] is the converter's name of a row without a token; [PAD5] of type 1 is a token."""
    words = no_words(128)
    for id in range(120, 128):
        words.tokens[id], words.types[id] = f"[PAD{id}]", 5
    words.tokens[5], words.tokens[6], words.types[6] = "[PAD5]", "[unused6]", 5
    words.more = {**words.more, "padding_token_id": 127}
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model, words=words))
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert [tokenizer.id_to_token(id) for id in (5, 6, 119, 120, 127)] == [
        "[PAD5]",
        "[unused6]",
        "<119>",
        None,
        None,
    ]
    assert read_vocabulary(made, 128).unnamed == tuple(range(120, 128))
    assert Text(made).vocabulary == 120
