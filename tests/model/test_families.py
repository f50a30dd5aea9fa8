"""Every family against Transformers, fp32: logits within 1e-4, greedy text identical, any split.

The models are tiny, random, and of odd shapes on purpose.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specsot.checkpoint.config import read_config
from specsot.checkpoint.families import text_name
from specsot.checkpoint.fingerprint import fingerprint
from specsot.core.tree import ancestry, depths
from specsot.errors import ModelError
from specsot.members import Layout, Range
from specsot_model.attention import RowSpan
from specsot_model.cuda_graphs import measure_rows
from specsot_model.decoder import Decoder
from specsot_model.linear import Linear
from specsot_model.loaded_parts import measured_range
from specsot_model.mlp import Experts, GatedMlp, GroupedExperts, LoopedExperts
from tests import trees
from tests.conftest import some
from tests.model.tiny import FEW_EXPERTS, GROWING, PAGE_ROWS, Ring, load, pickle_weights, write_model

PROMPT = [7, 99, 3, 50, 21, 21, 64, 8, 15, 30, 77, 41, 5, 90, 13, 2, 66, 38, 4, 19]
WRITTEN, ALL_WRITTEN = 13, 200  # tokens, past windows and the end of a page; all of them by `make test-all`
NEAR = 1e-4  # a top-2 gap below this may be decided either way by rounding
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3}
YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "rope_theta": 5e3, "long_factor": [1.1, 2.0, 3.0, 5.0],
        "short_factor": [1.0, 1.0, 1.5, 2.0], "original_max_position_embeddings": 16}  # fmt: skip
NEAR_AND_FAR = {
    "full_attention": {**LINEAR},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
MSCALE = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 40.0, "original_max_position_embeddings": 16,
          "mscale": 0.707, "mscale_all_dim": 1.0}  # fmt: skip
OF_TEXT = ("model.layers.", "model.embed_tokens.", "model.norm.")
MOE = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama untied": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama in files": ("llama", {"shards": "20KB"}),
    "llama wide heads": ("llama", {"head_dim": 24}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama one layer": ("llama", {"num_hidden_layers": 1}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "vicuna": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-6}),
    "vicuna 16k": ("llama", {"num_key_value_heads": 4, "rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 10}),
    "mistral window": ("mistral", {"sliding_window": 21}),
    "smollm3": ("smollm3", {"tie_word_embeddings": True}),
    "smollm3 biases": ("smollm3", {"attention_bias": True, "mlp_bias": True, "rope_parameters": {**YARN},
                                   "no_rope_layers": [0, 1, 0, 1], "num_hidden_layers": 4}),
    "smollm3 windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 5, "shards": "20KB"}),
    "olmo2": ("olmo2", {"attention_bias": True, "rope_parameters": LINEAR}),
    "olmo3": ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": NEAR_AND_FAR[
                        "sliding_attention"]}, "shards": "20KB"}),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granite 4": ("granitemoehybrid", {"tie_word_embeddings": True}),
    "granite 4 unrotated": ("granitemoehybrid", {"position_embedding_type": None, "shards": "20KB"}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral odd": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 24}),
    "mixtral one each": ("mixtral", {"num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2 windows": ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"head_dim": 16, "attention_bias": True, "shards": "20KB"}),
    "qwen3 moe": ("qwen3_moe", {**MOE, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3 moe unnormalised": ("qwen3_moe", {**MOE, "tie_word_embeddings": True}),
    "qwen3 moe and dense": ("qwen3_moe", {**MOE, "mlp_only_layers": [1], "head_dim": 10, "shards": "20KB"}),
    "qwen3 moe every second": ("qwen3_moe", {**MOE, "decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "qwen3 moe of odd rows": ("qwen3_moe", {**MOE, "moe_intermediate_size": 22, "norm_topk_prob": True}),
    "qwen3 next": ("qwen3_next", {}),
    "qwen3 next of odd rows": ("qwen3_next", {"linear_conv_kernel_dim": 3, "head_dim": 24, "shards": "20KB",
                                              "layer_types": ["full_attention", *["linear_attention"] * 2]}),
    "qwen3.5": ("qwen3_5_text", {"tie_word_embeddings": True, "linear_conv_kernel_dim": 3}),
    "qwen3.5 with images": ("qwen3_5", {"head_dim": 24, "shards": "20KB"}),
    "qwen3.5 moe": ("qwen3_5_moe_text", {}),
    "qwen3.5 moe with images": ("qwen3_5_moe", {"moe_intermediate_size": 22, "shards": "20KB"}),
    "glm": ("glm4_moe", {"attention_bias": True}),
    "glm with norms": ("glm4_moe", {"use_qk_norm": True, "head_dim": 12, "routed_scaling_factor": 2.5,
                                    "first_k_dense_replace": 2, "n_shared_experts": 2, "shards": "20KB"}),
    "glm in groups": ("glm4_moe", {"n_routed_experts": 12, "n_group": 4, "topk_group": 2,
                                   "norm_topk_prob": False, "first_k_dense_replace": 0}),
    "minimax": ("minimax_m2", {"head_dim": 12, "rotary_dim": 8}),
    "minimax all turned": ("minimax_m2", {"num_key_value_heads": 1, "shards": "20KB"}),
    "gpt-oss": ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False}, "swiglu_limit": 0.5}),
    "gpt-oss of odd rows": ("gpt_oss", {"intermediate_size": 22, "head_dim": 12, "attention_bias": False,
                                        "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}),
    "phi3": ("phi3", {"sliding_window": 21}),
    "phi3 longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 16}),
    "phi4 mini": ("phi3", {"rope_parameters": {**LONG, "partial_rotary_factor": 0.5, "long_factor": [1, 3.0],
                  "short_factor": [1.0, 1.5]}, "original_max_position_embeddings": 16, "head_dim": 8}),
    "gemma2": ("gemma2", {"sliding_window": 21, "query_pre_attn_scalar": 11, "tie_word_embeddings": True}),
    "gemma2 uncapped": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {"sliding_window": 21, "sliding_window_pattern": 2, "head_dim": 10,
               "rope_parameters": NEAR_AND_FAR}),
    "gemma4": ("gemma4_text", {"final_logit_softcapping": 3.0, "shards": "20KB"}),
    "gemma4 dense": ("gemma4_text", {"enable_moe_block": False, "num_key_value_heads": 1}),
    "gemma4 of own values": ("gemma4_text", {"attention_k_eq_v": False, "moe_intermediate_size": 22}),
    "gemma4 12b": ("gemma4_unified_text", {}),
    "ministral3": ("ministral3", {"shards": "20KB"}),
    "mistral small": ("mistral3", {"sliding_window": None, "rope_theta": 5e3}),
    "ministral3 with images": ("mistral3", {"model_type": "ministral3", "rope_parameters": GROWING,
                               "tie_word_embeddings": True, "shards": "20KB"}),
    "gemma3 with images": ("gemma3", {"sliding_window": 21, "sliding_window_pattern": 2, "head_dim": 10}),
    "qwen3-vl": ("qwen3_vl", {"tie_word_embeddings": True}),
    "qwen3-vl moe": ("qwen3_vl_moe", {"mlp_only_layers": [1], "shards": "20KB"}),
    "qwen3-vl moe of odd rows": ("qwen3_vl_moe", {"moe_intermediate_size": 22}),
    "youtu": ("youtu", {}),
    "youtu in halves": ("youtu", {"rope_interleave": False, "tie_word_embeddings": True,
                                  "qk_rope_head_dim": 8, "shards": "20KB"}),
    "deepseek v2 lite": ("deepseek_v2", {"rope_parameters": MSCALE}),
    "deepseek v2": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
                                    "q_lora_rank": 20, "routed_scaling_factor": 3.0}),
    "deepseek v3": ("deepseek_v3", {"rope_parameters": MSCALE, "shards": "20KB"}),
    "moonlight": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "v_head_dim": 10,
                                  "rope_interleave": False}),
    "deepseek sparse": ("deepseek_v32", {}),
    "glm_5": ("glm_moe_dsa", {"rope_parameters": MSCALE}),
    "glm 4.7 flash": ("glm4_moe_lite", {"moe_intermediate_size": 22, "first_k_dense_replace": 2}),
    "mistral small 4": ("mistral4", {"n_shared_experts": 2}),
    "mistral small 4 with images": ("mistral3", {**FEW_EXPERTS["mistral4"], "model_type": "mistral4",
                                                 "head_dim": 12, "shards": "20KB"}),
    "pythia": ("gpt_neox", {"hidden_size": 64}),
    "neox one by one": ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
    "neox half turned": ("gpt_neox", {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}),
    "neox all turned": ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 500, "hidden_act": "gelu_fast"}),
    "neox no bias": ("gpt_neox", {"attention_bias": False, "hidden_act": "relu", "shards": "20KB"}),
    "neox tied": ("gpt_neox", {"tie_word_embeddings": True, "hidden_size": 36, "num_attention_heads": 3,
                               "rotary_pct": 0.5}),
}  # fmt: skip
# Families in which layers differ in what they do with positions, or in what they add.
OF_NODES_AND_BRANCHES = (
    "smollm3", "olmo3", "granite", "granitemoehybrid", "qwen3_vl_moe", "gemma4_text", "youtu", "deepseek_v3",
    "mistral4",
)  # fmt: skip
FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
    "gpt_neox",
    "phi3",
    "gemma2",
    "gemma3_text",
    "ministral3",
    "smollm3",
    "olmo3",
    "granite",
    "gemma4_text",
    "deepseek_v2",
    "glm4_moe_lite",
    "mistral4",
)


@torch.inference_mode()
def answer(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Transformers' logits of every position."""
    return model(torch.tensor([tokens])).logits[0]


# Whose one trait another kind has too; as files and in ranges these families run below.
ALIKE = (
    "llama untied", "llama tied", "llama in files", "llama wide heads", "llama one kv head", "vicuna",
    "mistral", "mixtral", "qwen2", "qwen3.5 moe", "minimax", "neox half turned",
)  # fmt: skip


@pytest.mark.parametrize("name", some(KINDS, *(n for n, name in enumerate(KINDS) if name not in ALIKE)))
def test_logits_and_greedy_tokens_are_those_of_transformers(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind, changes = KINDS[name]
    model = write_model(tmp_path, kind, **changes)
    layers = changes.get("num_hidden_layers", 3)
    tokens = ALL_WRITTEN if request.config.getoption("--full") else WRITTEN
    written, told = Ring.of(load(tmp_path, tuple(range(1, layers + 1)))).write(PROMPT, tokens)
    expected = answer(model, PROMPT + written[:-1])
    torch.testing.assert_close(told, expected, atol=1e-4, rtol=0)
    first, second = expected[len(PROMPT) - 1 :].topk(2).values.unbind(-1)
    wanted = expected[len(PROMPT) - 1 :].argmax(-1)
    wrong = (torch.tensor(written) != wanted) & (first - second >= NEAR)
    assert not wrong.any()
    assert len(set(written)) > 1


@dataclass(frozen=True)
class Written:
    """A family's model on the disk and as Transformers made it, and its logits behind PROMPT."""

    kind: str
    folder: Path
    model: torch.nn.Module
    logits: torch.Tensor


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("family")
    model = write_model(folder, request.param)
    return Written(request.param, folder, model, Ring.of(load(folder)).feed(PROMPT, 0)[0])


@pytest.mark.parametrize("cuts", some([((1, 3),), ((2, 3),), ((1, 2, 3),)], 2))
def test_any_split_gives_the_same_rows(family: Written, cuts: tuple[int, ...]) -> None:
    split, _ = Ring.of(load(family.folder, cuts)).feed(PROMPT, 0)
    assert torch.equal(family.logits, split)


def test_taps_add_the_inputs_of_their_layers(family: Written) -> None:
    trunk = family.model.base_model
    inputs: dict[int, torch.Tensor] = {}
    ends = [*trunk.layers, trunk.final_layer_norm if family.kind == "gpt_neox" else trunk.norm]
    for index, part in enumerate(ends):
        part.register_forward_pre_hook(lambda _, args, index=index: inputs.__setitem__(index, args[0][0]))
    answer(family.model, PROMPT)
    taps = dict(zip((0, 2, 3), torch.eye(96).view(3, 32, 96).transpose(1, 2)))
    ring = Ring.of(load(family.folder, (1, 3)))
    held = {layer: ring.decoders[0].hold_tap(weight) for layer, weight in taps.items()}
    _, fused = ring.feed(PROMPT, 0, taps=held)
    torch.testing.assert_close(fused, torch.cat([inputs[i] for i in (0, 2, 3)], 1), atol=1e-4, rtol=0)


def test_bf16_stays_near_fp32(family: Written) -> None:
    rough, _ = Ring.of([Decoder.load(family.folder, Range(0, 3), torch.bfloat16, "cpu")]).feed(PROMPT, 0)
    assert rough.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(rough.float(), family.logits, dim=-1).median() > 0.99


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rms_norm_eps": 1.0}),
        ("llama", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3", {"rope_parameters": {**LINEAR}}),
        ("glm4_moe", {"routed_scaling_factor": 2.0}),
        ("glm4_moe", {"norm_topk_prob": False}),
        ("glm4_moe", {"n_group": 3, "topk_group": 2}),
        ("glm4_moe", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
        ("minimax_m2", {"num_experts_per_tok": 1}),
        ("gpt_oss", {"swiglu_limit": 0.2}),
        ("smollm3", {"no_rope_layers": [1, 1, 1]}),
        ("olmo3", {"rope_parameters": {"full_attention": LINEAR}}),
        ("granite", {"embedding_multiplier": 2.0}),
        ("gemma4_text", {"top_k_experts": 1}),
        ("gemma4_text", {"sliding_window": 3}),
        ("granite", {"residual_multiplier": 0.5}),
        ("granite", {"attention_multiplier": 0.3}),
        ("ministral3", {"rope_parameters": {**GROWING, "llama_4_scaling_beta": 0.1}}),
        ("gpt_oss", {"swiglu_alpha": 0.2}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("gpt_neox", {"layer_norm_eps": 1.0}),
        ("gpt_neox", {"hidden_act": "relu"}),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0}}),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 77.0}}),
    ],
)
def test_what_the_config_says_is_what_runs(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Another value of a field is another model: the comparison above can fail."""
    write_model(tmp_path, kind, **({"rotary_pct": 0.5} if kind == "gpt_neox" else {}))
    before, name = Ring.of(load(tmp_path)).feed(PROMPT, 0)[0], fingerprint(tmp_path)
    source = tmp_path / "config.json"
    source.write_text(json.dumps({**json.loads(source.read_text()), **changes}))
    assert (Ring.of(load(tmp_path)).feed(PROMPT, 0)[0] - before).abs().max() > 1e-2
    assert fingerprint(tmp_path) != name


@pytest.mark.parametrize("width", [24, 22], ids=["grouped", "looped"])
def test_experts_are_the_same_published_one_by_one_or_in_one_tensor(tmp_path: Path, width: int) -> None:
    write_model(tmp_path, "qwen3_5_moe_text", moe_intermediate_size=width)
    apart, _ = Ring.of(load(tmp_path)).feed(PROMPT, 0)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}.{expert}.{name}_proj.weight") for expert in range(5)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{experts}.gate_up_proj": torch.cat((gate, up), 1), f"{experts}.down_proj": down}
    save_file(tensors, file)
    assert torch.equal(Ring.of(load(tmp_path)).feed(PROMPT, 0)[0], apart)


@pytest.mark.parametrize("width", [24, 22], ids=["grouped", "looped"])
def test_experts_of_qwen3_vl_are_the_same_with_inputs_first(tmp_path: Path, width: int) -> None:
    """As they are published; Transformers writes them with outputs first."""
    write_model(tmp_path, "qwen3_vl_moe", moe_intermediate_size=width)
    outputs_first, _ = Ring.of(load(tmp_path)).feed(PROMPT, 0)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file)
    assert torch.equal(Ring.of(load(tmp_path)).feed(PROMPT, 0)[0], outputs_first)


def test_rows_of_mixed_experts_are_what_they_are_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "mixtral")
    together, _ = Ring.of(load(tmp_path)).feed(PROMPT, 0)
    ring = Ring.of(load(tmp_path))
    apart = torch.cat([ring.feed([token], at)[0] for at, token in enumerate(PROMPT)])
    # Logits as large as these differ so much by the order of their sums: 1.3e-5 with AVX-512.
    torch.testing.assert_close(together, apart, atol=5e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_are_those_of_a_loop(dtype: torch.dtype) -> None:
    """Also where an expert has no row, or there is one row only."""
    draw = torch.Generator().manual_seed(3)
    gate_up, down = (torch.randn(5, *size, generator=draw).div(6).to(dtype) for size in ((48, 32), (32, 24)))
    grouped = GroupedExperts(gate_up, down)
    looped = LoopedExperts([GatedMlp(Linear(a), Linear(b)) for a, b in zip(gate_up, down)])
    for experts in ([4], [0, 0, 2, 2, 2, 4], [1] * 17 + [3] * 3):
        rows = torch.randn(len(experts), 32, generator=draw).to(dtype)
        wanted = looped(rows, torch.tensor(experts))
        torch.testing.assert_close(grouped(rows, torch.tensor(experts)), wanted)


def test_a_tuner_sees_that_more_rows_read_more_experts(tmp_path: Path) -> None:
    """Rows that a curve is measured with choose different experts."""
    write_model(tmp_path, "qwen3_moe", **MOE, mlp_only_layers=[1])
    layers = measured_range(read_config(tmp_path))
    assert layers == Range(0, 1), "the one between is dense"
    (block,) = (decoder := Decoder.load(tmp_path, layers, torch.float32, "cpu"))._blocks
    assert isinstance(block.mlp, Experts)
    read, run = {}, block.mlp.run

    def note(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        read[len(rows) // 3] = len(experts.unique())
        return run(rows, experts)

    block.mlp.run = note
    measure_rows(decoder, sizes=(1, 32), seconds=0.0)
    assert read == {1: 3, 32: 5}


@pytest.mark.parametrize("layout", ["packed", "batched"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_a_nodes_window_counts_positions(kind: str, layout: Layout, tmp_path: Path) -> None:
    """Not columns: siblings lie between a node and what it sees. The tree is deeper than that."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    asked = {"use_sliding_window": True} if kind == "qwen3" else {}
    write_model(tmp_path, kind, layer_types=kinds, sliding_window=3, **asked)
    assert read_config(tmp_path).windowed == {0, 2}
    drafted, at = [11, 40, 52, 63, 70, 81, 90], len(PROMPT)
    parents = (None, 0, 0, 2, 3, 3, 5)
    told, _ = (tree := Ring.of(load(tmp_path, (1, 3)), layout)).feed(PROMPT, 0)
    depths, seen = list[int](), list[int]()
    for row, parent in enumerate(parents):
        depths.append(0 if parent is None else depths[parent] + 1)
        seen.append(1 << row | (0 if parent is None else seen[parent]))
    told, _ = tree.feed(drafted, at, [at + depth for depth in depths], tuple(seen))
    for path in ([0, 1], [0, 2, 3, 4], [0, 2, 3, 5, 6]):
        (chain := Ring.of(load(tmp_path))).feed(PROMPT, 0)
        expected, _ = chain.feed([drafted[row] for row in path], at)
        torch.testing.assert_close(told[path], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", OF_NODES_AND_BRANCHES)
def test_trees_in_branches_of_a_prefix_give_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    """One frame holds both trees. The branches share their first page."""
    model = write_model(tmp_path, kind)
    prefix, drafted, parents = PROMPT[:PAGE_ROWS], [11, 40, 52, 63, 70], (0, 0, 0, 2, 3)
    ring = Ring.of(load(tmp_path, (1, 3)))
    ring.feed(prefix, 0)
    starts = {(5, 2): [8, 15, 30], (5, 3): [77, 41, 13]}
    for pages, start in starts.items():
        replace(ring, pages=pages).feed(start, PAGE_ROWS)
    base = PAGE_ROWS + 3
    rows, visible = len(drafted), ancestry(parents)
    spans = [RowSpan(rows, base, rows, pages, visible) for pages in starts]
    positions = torch.tensor([base + depth for depth in depths(parents)] * 2)
    slots = torch.tensor([pages[1] * PAGE_ROWS + 3 + row for pages in starts for row in range(rows)])
    plan = ring.decoders[0].plan(spans, PAGE_ROWS, "packed")
    hidden = ring.decoders[0].embed(torch.tensor(drafted * 2))
    for decoder, kv in zip(ring.decoders, ring.kvs):
        hidden, _ = decoder.forward(hidden, positions, slots, plan, kv)
    told = ring.decoders[-1].logits(hidden).view(2, rows, -1)
    for branch, start in enumerate(starts.values()):
        for leaf in (1, 4):
            nodes = trees.path(parents, leaf)
            wanted = answer(model, [*prefix, *start, *(drafted[node] for node in nodes)])
            torch.testing.assert_close(told[branch, list(nodes)], wanted[base:], atol=1e-4, rtol=0)
            first, second = wanted.topk(2).values.unbind(-1)
            assert (first - second).median() > 0.1, "near ties would hide a difference"


@pytest.mark.parametrize("start", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_text_is_served_without_any_tensor_of_images(kind: str, start: str, tmp_path: Path) -> None:
    """Under both names by which such models are published."""
    model, file = write_model(tmp_path, kind), tmp_path / "model.safetensors"
    tensors = {text_name(name): tensor for name, tensor in load_file(file).items()}
    names = {name: f"{start}{name.removeprefix('model.')}" for name in tensors if name.startswith(OF_TEXT)}
    names["lm_head.weight"] = "lm_head.weight" if start[0] == "m" else "language_model.lm_head.weight"
    assert len(names) < len(tensors)
    save_file({names[name]: tensor for name, tensor in tensors.items() if name in names}, file)
    told, _ = Ring.of(load(tmp_path, (1, 3))).feed(PROMPT, 0)
    torch.testing.assert_close(told, answer(model, PROMPT), atol=1e-4, rtol=0)
    assert read_config(tmp_path).text_of == kind


@pytest.mark.parametrize("changes", [{}, {"shards": "20KB"}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt_neox"])
def test_pickled_weights_run_when_asked_for(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(tmp_path, kind, **changes)
    pickle_weights(tmp_path)
    with pytest.raises(ModelError, match="--model-format bin"):
        load(tmp_path)
    told, _ = Ring.of(load(tmp_path, (1, 3), pickles=True)).feed(PROMPT, 0)
    torch.testing.assert_close(told, answer(model, PROMPT), atol=1e-4, rtol=0)


def test_a_tied_flag_gives_way_to_a_table_of_its_own(tmp_path: Path) -> None:
    """As in Transformers: what is in the file counts."""
    model = write_model(tmp_path)
    source = tmp_path / "config.json"
    source.write_text(json.dumps({**json.loads(source.read_text()), "tie_word_embeddings": True}))
    told, _ = Ring.of(load(tmp_path)).feed(PROMPT, 0)
    torch.testing.assert_close(told, answer(model, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("mixtral", "model.layers.2.block_sparse_moe.experts.3.w2.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("glm4_moe", "model.layers.2.mlp.shared_experts.up_proj.weight"),
        ("minimax_m2", "model.layers.0.block_sparse_moe.e_score_correction_bias"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias"),
        ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value.bias"),
        ("gpt_neox", "embed_out.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.q_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(kind: str, name: str, tmp_path: Path) -> None:
    write_model(tmp_path, kind, **({"num_local_experts": 4} if kind == "mixtral" else {}))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        Decoder.load(tmp_path, Range(0, 3), torch.float32, "cpu", allow_pickle_bin=True)


@pytest.mark.parametrize("index", some(range(4), 0))
def test_published_bases_write_what_was_recorded(
    reference: Path, index: int, request: pytest.FixtureRequest
) -> None:
    """Bases of the golden cases: logits behind a prompt, and greedy tokens; all 73 by `make test-all`."""
    tokens = ALL_WRITTEN if request.config.getoption("--full") else WRITTEN
    for folder in sorted((reference / "golden" / "eagle").glob("*/base")):
        case = json.loads((folder.parent / "vectors.json").read_text())
        vectors = load_file(folder.parent / "vectors.safetensors")
        layers = read_config(folder).layers
        assert len(case["prompts"]) == 4
        prompt = case["prompts"][index]
        ring = Ring.of(load(folder, (1, layers - 1, layers)))
        wanted = prompt["base_greedy_ids"][:tokens]
        written, told = ring.write(prompt["prompt_ids"], len(wanted))
        at = len(prompt["prompt_ids"]) - 1
        torch.testing.assert_close(told[at], vectors[f"p{index}.base_logits"], atol=1e-4, rtol=0)
        assert written == wanted
