"""What the decoder does with rows, whatever the family: splits, chunks, trees, taps, measured costs."""

from __future__ import annotations

from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specsot.checkpoint.config import make_config
from specsot.core.tree import ancestry, depths
from specsot.errors import InvalidRequest, ModelError
from specsot.members import Range
from specsot_model import cuda_graphs
from specsot_model.cuda_graphs import measure_curve, measure_rows
from specsot_model.decoder import Decoder
from specsot_model.layers import stored_edges
from specsot_model.weights import Fetch, WeightFiles
from tests.model.made_up import MadeUp, step_call
from tests.model.tiny import GROWING, Ring, greedy_reference, load, write_model
from tests.trees import path

PROMPT = [7, 99, 3, 50, 21, 21, 64, 8, 15, 30, 77, 41, 5, 90, 13, 2, 66, 38, 4, 19]
FRONT, BACK = Range(0, 3), Range(3, 8)  # the demo model in two ranges


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, write_model(directory, num_hidden_layers=5)


@pytest.mark.parametrize("cuts", [(1, 5), (4, 5), (2, 3, 5), (1, 2, 5)])
def test_any_split_passes_on_the_same_hidden_rows(
    llama: tuple[Path, torch.nn.Module], cuts: tuple[int, ...]
) -> None:
    whole, _ = Ring.of(load(llama[0], (5,))).feed(PROMPT, 0)
    split, _ = Ring.of(load(llama[0], cuts)).feed(PROMPT, 0)
    assert torch.equal(whole, split)


def test_a_prompt_in_chunks_is_the_prompt(llama: tuple[Path, torch.nn.Module]) -> None:
    whole, _ = Ring.of(load(llama[0], (5,))).feed(PROMPT, 0)
    ring = Ring.of(load(llama[0], (5,)))
    parts = [ring.feed(PROMPT[a:b], a)[0] for a, b in [(0, 3), (3, 15), (15, 16), (16, 20)]]
    # Other numbers of rows, other kernels, other orders of the same sums. Logits are sums of terms as large
    # as the largest of them (here 6, root mean square 1.5), so one near 0 has their error, not its own:
    # 5 layers of fp32 (1.2e-7 of 6 at each rounding) differ by 1.5e-5 with AVX-512.
    assert whole.abs().max() < 10
    torch.testing.assert_close(torch.cat(parts), whole, atol=5e-5, rtol=0)


@pytest.mark.parametrize("prompt", [PROMPT[:5], PROMPT[:13]])  # the second tree crosses a page's end
def test_a_tree_gives_each_path_what_plain_decoding_gives_it(
    llama: tuple[Path, torch.nn.Module], prompt: list[int]
) -> None:
    tokens = [11, 12, 13, 14, 15, 16, 17]
    parents = (0, 0, 0, 1, 1, 2, 3)
    ring = Ring.of(load(llama[0], (2, 5)))
    ring.feed(prompt, 0)
    positions = [len(prompt) + depth for depth in depths(parents)]
    tree, _ = ring.feed(tokens, len(prompt), positions, ancestry(parents))
    for node in range(len(tokens)):
        plain, _ = Ring.of(ring.decoders).feed(prompt + [tokens[n] for n in path(parents, node)], 0)
        torch.testing.assert_close(tree[node], plain[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("cuts", [(5,), (2, 5), (1, 3, 5)])
def test_taps_add_the_inputs_of_their_layers(
    llama: tuple[Path, torch.nn.Module], cuts: tuple[int, ...]
) -> None:
    layers, width = (0, 2, 3, 5), llama[1].config.hidden_size
    blocks = torch.eye(len(layers) * width).view(len(layers), width, -1).transpose(1, 2)
    _, fused = Ring.of(load(llama[0], cuts)).feed(PROMPT, 0, taps=dict(zip(layers, blocks)))
    inputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(llama[1].model.layers):
        layer.register_forward_pre_hook(lambda _, args, index=index: inputs.__setitem__(index, args[0][0]))
    llama[1].model.norm.register_forward_pre_hook(lambda _, args: inputs.__setitem__(5, args[0][0]))
    with torch.inference_mode():
        llama[1](torch.tensor([PROMPT]))
    expected = torch.cat([inputs[layer] for layer in layers], 1)
    torch.testing.assert_close(fused, expected, atol=1e-4, rtol=0)


def test_no_tap_leaves_no_fused_row(llama: tuple[Path, torch.nn.Module]) -> None:
    assert Ring.of(load(llama[0], (2, 5))).feed(PROMPT, 0)[1] is None


def test_bf16_stays_near_fp32(llama: tuple[Path, torch.nn.Module]) -> None:
    exact, _ = Ring.of(load(llama[0], (5,))).feed(PROMPT, 0)
    decoder = Decoder.load(llama[0], Range(0, 5), torch.bfloat16, "cpu")
    rough, _ = Ring.of([decoder]).feed(PROMPT, 0)
    assert rough.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(rough.float(), exact, dim=-1).min() > 0.99


def test_a_range_reads_only_its_own_tensors(tmp_path: Path) -> None:
    write_model(tmp_path, shards="20KB", num_hidden_layers=5)
    middle = Decoder.load(tmp_path, Range(1, 3), torch.float32, "cpu")
    with pytest.raises(ModelError, match="layers 1:3 hold no embedding"):
        middle.embed(torch.tensor([1]))
    with pytest.raises(ModelError, match="layers 1:3 hold no lm_head"):
        middle.logits(torch.zeros(1, 32))


def test_a_head_may_share_what_a_range_holds(tmp_path: Path) -> None:
    write_model(tmp_path, num_hidden_layers=5)
    edges, tokens = load(tmp_path, (5,))[0].edges, torch.tensor([3, 1])
    stored = stored_edges(edges.config, Fetch(WeightFiles(tmp_path), torch.float32, "cpu"))
    torch.testing.assert_close(edges.embedding()[tokens], stored.embedding()[tokens])
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    for held, read in ((edges.final_norm(), stored.final_norm()), (edges.lm_head(), stored.lm_head())):
        torch.testing.assert_close(held(rows), read(rows))
    with pytest.raises(ModelError, match="holds no embedding"):
        Decoder.load(tmp_path, Range(1, 5), torch.float32, "cpu").edges.embedding()


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
@pytest.mark.parametrize("tied", [True, False])
def test_in_few_bits_on_a_cpu_embeddings_are_the_rows_of_a_table_in_8_bits(
    tmp_path: Path, tied: bool
) -> None:
    """One table for both ends of a tied model, where one range has both; the same numbers in two ranges."""
    write_model(tmp_path, num_hidden_layers=2, tie_word_embeddings=tied)
    whole, first, last = (
        Decoder.load(tmp_path, layers, torch.float32, "cpu", quantization="int8")
        for layers in (None, Range(0, 1), Range(1, 2))
    )
    tokens = torch.tensor([3, 1, 40, 3])
    exact = Decoder.load(tmp_path, None, torch.float32, "cpu").embed(tokens)
    rows = whole.embed(tokens)
    assert torch.equal(rows, first.embed(tokens))
    assert ((rows - exact).abs() <= exact.abs().amax(1, keepdim=True) / 127 * 0.51).all()
    assert torch.equal(whole.logits(rows), last.logits(rows))
    assert (whole.edges.embedding() is whole.edges.lm_head().multiply) is tied


@pytest.mark.parametrize("layers", [Range(0, 6), Range(3, 3), Range(-1, 2)])
def test_a_range_that_does_not_fit_is_refused(llama: tuple[Path, torch.nn.Module], layers: Range) -> None:
    with pytest.raises(InvalidRequest, match="do not fit a model of 5 layers"):
        Decoder.load(llama[0], layers, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_what_the_cpu_gives(llama: tuple[Path, torch.nn.Module]) -> None:
    here, _ = Ring.of(load(llama[0], (2, 5))).feed(PROMPT, 0)
    there, _ = Ring.of(load(llama[0], (2, 5), "cuda")).feed(PROMPT, 0)
    torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=0)


EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "kind",
    [
        {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [1]},
        {"model_type": "glm4_moe", **EXPERTS, "n_group": 4, "topk_group": 2, "use_qk_norm": True},
        {"model_type": "minimax_m2", **EXPERTS},
        {"model_type": "gpt_neox", "hidden_act": "gelu", "rotary_pct": 0.25},
        {"model_type": "gpt_neox", "hidden_act": "gelu", "use_parallel_residual": False},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "mistral", "sliding_window": 24},
        {"model_type": "phi3", "partial_rotary_factor": 0.5, "pad_token_id": 0},
        {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 24},
        {"model_type": "gemma2", "sliding_window": 24},
        {"model_type": "gemma3_text", "sliding_window": 24, "head_dim": 256, "sliding_window_pattern": 3},
        {"model_type": "ministral3", "rope_parameters": GROWING},
        {"model_type": "youtu", **LATENT},
        {"model_type": "deepseek_v3", **LATENT, **EXPERTS, "first_k_dense_replace": 1},
        {"model_type": "youtu", **LATENT, "num_attention_heads": 128, "num_key_value_heads": 128},
    ],
    ids=lambda kind: kind["model_type"],
)
@torch.inference_mode()
def test_layers_run_in_graphs_and_give_what_they_give_without(kind: dict[str, Any]) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512}
    rest = {"hidden_size": 256, "num_hidden_layers": 3, "vocab_size": 500}
    config = make_config({"hidden_act": "silu", **heads, **rest, **kind}, {}, Path("made up"))
    decoder = Decoder(config, MadeUp(), Range(0, 3), torch.bfloat16, torch.device("cuda"))
    assert decoder.capturable
    step = step_call(decoder, 64, 40)
    step()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, step()), "the same rows in the same kernels"
    decoder._fused_blocks = None
    assert (step() == found).float().mean() > 0.8, "kernels round otherwise, so near ties may flip"


def test_measured_seconds_never_fall_with_rows(llama: tuple[Path, torch.nn.Module]) -> None:
    (decoder,) = load(llama[0], (5,))
    curve = measure_rows(decoder, sizes=(1, 4, 16), seconds=0.01)
    assert [rows for rows, _ in curve] == [1, 4, 16]
    assert 0 < curve[0][1] <= curve[1][1] <= curve[2][1]


def test_a_disturbed_measurement_goes_on_until_its_least_times_are_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A neighbour holds up all of a size's runs but each fourth; compiling is no part of anything's time."""
    monkeypatch.setattr(cuda_graphs, "PATIENCE_SECONDS", 2.0)
    now, runs = 0.0, Counter[int]()

    def timer(rows: int, busy: bool) -> float:
        nonlocal now
        runs[rows] += 1
        compiles = runs[rows] == 1
        spent = 30.0 if compiles else 0.001 * rows + busy * 0.03 * (1 + runs[rows] % 7) * (runs[rows] % 4 > 0)
        now += spent
        return spent

    for busy, most in ((True, 40), (False, 4)):
        runs.clear()
        timers = {rows: partial(timer, rows, busy) for rows in (1, 4)}
        curve = measure_curve(timers, 0.0, 3, torch.device("cpu"), lambda: now)
        assert curve == ((1, 0.001), (4, 0.004))
        assert runs[1] <= most


def test_the_demo_model_writes_what_transformers_writes(demo_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model / "base", dtype=torch.float32)
    prompt = list(range(300, 330))
    ring = Ring.of([Decoder.load(demo_model / "base", each, torch.float32, "cpu") for each in (FRONT, BACK)])
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(ring.feed(prompt, 0)[0], expected, atol=1e-4, rtol=1e-5)
    assert ring.greedy(prompt, 40) == greedy_reference(model, prompt, 40)
