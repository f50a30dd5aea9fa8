"""What captured graphs take is counted before they are captured, and is no less than they really take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from specsot.checkpoint.config import make_config
from specsot.checkpoint.families import FAMILIES, Delta, Routing
from specsot.core.tree import ancestry
from specsot.errors import ModelError
from specsot.members import Range
from specsot.service.options import ModelOptions
from specsot_drafter.eagle_kv import DraftPages
from specsot_drafter.heads.fused import FusedHead
from specsot_drafter.overlap.graph_growth import TreeGraphs, tree_graph_bytes
from specsot_model.attention import RowSpan
from specsot_model.core.walks import BLOCK_ROWS
from specsot_model.cuda_graphs import PROMPT_ROWS, CapturedSteps, GraphCapture, StepRows, prompt_buckets
from specsot_model.decoder import Decoder
from specsot_model.fp8 import runs_kernels
from specsot_model.fused import can_capture
from specsot_model.loaded_parts import AbsentWeights
from specsot_model.memory_fit import Need, check_fit, kv_page_bytes, step_bytes, token_bytes
from specsot_model.weights import HeldWeights
from specsot_worker.loader import capture_tokens
from specsot_worker.memory import LayerMemory
from tests.model.made_up import MadeUp, llama_8b, made_up_head

CONFIG = replace(llama_8b(), layers=2, vocab=32_000)  # every layer uses the same memory again
WIDTH = CONFIG.hidden
K, LEVELS, PAGE = 10, 8, 64
TWO_KINDS = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 1024,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def test_they_count() -> None:
    with pytest.raises(ModelError, match=r"need 1 B of weights and 2 B of KV pages, and 3 B for captured"):
        check_fit("layers 0:1", Need(1, 2, 3), "cuda:0", 5)
    check_fit("layers 0:1", Need(1, 2, 3), "cuda:0", 6)


def test_who_has_any() -> None:
    assert not runs_kernels(torch.device("cpu"))
    assert can_capture(CONFIG, kernels=True, any_quantized=False)
    assert not can_capture(CONFIG, kernels=False, any_quantized=False)
    assert not can_capture(CONFIG, kernels=True, any_quantized=True)
    experts = replace(CONFIG, mlp="experts", routing=Routing(experts=8, chosen=2, width=512))
    assert can_capture(experts, kernels=True, any_quantized=False)
    narrow = replace(experts, routing=Routing(experts=8, chosen=2, width=508))
    assert not can_capture(narrow, kernels=True, any_quantized=False)
    for dtype in (torch.float16, torch.float32):
        assert can_capture(CONFIG, kernels=True, any_quantized=False, dtype=dtype)
        assert not can_capture(experts, kernels=True, any_quantized=False, dtype=dtype)
    other = replace(CONFIG, norm="layer", mlp="plain", parallel=True, out_bias=True)
    assert can_capture(other, kernels=True, any_quantized=False)
    sunk = replace(CONFIG, names=FAMILIES["gpt_oss"].names, window=128, windowed=frozenset({0}))
    assert can_capture(sunk, kernels=True, any_quantized=False)
    assert can_capture(replace(CONFIG, delta=Delta()), kernels=True, any_quantized=False)
    assert step_bytes(replace(CONFIG, delta=Delta()), 2, 0) > step_bytes(CONFIG, 2, 0)
    for each in (experts, other):
        assert not can_capture(each, kernels=True, any_quantized=False, all_in_8_bits=True)


def test_more_rows_of_prompts_are_counted_where_frames_have_them(tmp_path: Path) -> None:
    """Not for ranges, nor for layers that are split over devices."""
    options = ModelOptions(tmp_path, dtype="bf16", device="cuda:0", draft_invariant=False)
    counted = LayerMemory(options, CONFIG, HeldWeights({}, "nobody"))
    whole, narrow, last = (
        counted.graphs(True, layers=layers) for layers in (Range(0, 2), Range(0, 1), Range(1, 2))
    )
    assert whole - last > PROMPT_ROWS * 8 * CONFIG.hidden * 2
    assert last - narrow == token_bytes(CONFIG.vocab), "the last stage chooses tokens"
    assert counted.graphs(True) == counted.graphs(True, room=1) == whole
    assert counted.graphs(True, room=-1) == last, "not all layers can be here"
    assert replace(counted, options=replace(options, tensor_parallel=2)).graphs(True) == narrow
    by_default = replace(counted, options=replace(options, draft_invariant=None))
    # Triton has the kernels of small steps.
    assert (by_default.graphs(True) > whole) == (find_spec("triton") is not None), "tables of small steps"
    demanded = replace(counted, options=replace(options, draft_invariant=True))
    assert demanded.graphs(True) == by_default.graphs(True)
    assert "draft-invariant" in demanded.rounding, "workers of a ring must agree on it"
    assert "draft-invariant" not in counted.rounding
    split = replace(CONFIG, delta=Delta())
    assert step_bytes(split, 2, 0) - step_bytes(split, 2, 0, long_prompt_frames=False) > whole - last
    assert BLOCK_ROWS == PROMPT_ROWS, "a walk is as long as the frames that are counted"


@pytest.mark.parametrize("layers", [None, Range(1, 2), Range(1, 4), Range(0, 8)])
def test_pages_of_two_kinds_of_layers_fit_what_is_granted(layers: Range | None, tmp_path: Path) -> None:
    """As the master counts them: a row's bytes in so many layers, whichever those turn out to be."""
    config = make_config(TWO_KINDS, {}, tmp_path)
    for granted in (16 << 20, 1 << 30):
        counted = LayerMemory(
            ModelOptions(tmp_path, kv_memory=granted, dtype="bf16"), config, HeldWeights({}, "nobody")
        )
        every = [Range(first, last) for first in range(8) for last in range(first + 1, 9)]
        for own in [layers] if layers else every:
            rows = granted // (counted.row_in(layers) * len(own))
            assert kv_page_bytes(config, own, rows, 2) <= granted
            assert not layers or kv_page_bytes(config, own, rows + rows // 100 + 257, 2) > granted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_no_more_is_taken_than_is_counted() -> None:
    from specsot_kernels.gpu.growing import grow

    whole, device = Range(0, CONFIG.layers), torch.device("cuda", 0)
    decoder = Decoder(CONFIG, MadeUp(), whole, torch.bfloat16, device)
    kv, taps = decoder.make_kv(8, PAGE), {1: torch.eye(WIDTH, dtype=torch.bfloat16, device=device)}
    steps = taken(
        lambda: CapturedSteps(decoder, kv, taps, GraphCapture(), prompt_sizes=prompt_buckets(decoder, kv))
    )
    assert 0 < steps <= step_bytes(CONFIG, 2, WIDTH)
    chosen = taken(lambda: capture_tokens(decoder, decoder.logits))
    assert 0 < chosen <= token_bytes(CONFIG.vocab)
    head = FusedHead(made_up_head(decoder))
    memory = DraftPages(made_up_head(decoder), 8, PAGE)
    drafts = taken(lambda: TreeGraphs(head, memory, K, LEVELS, GraphCapture(), grow))
    counted = tree_graph_bytes(head.shape, 2, K, LEVELS)
    assert 0 < drafts <= counted
    print(f"steps {steps >> 20} of {step_bytes(CONFIG, 2, WIDTH) >> 20} MiB", end=", ")
    print(f"tokens {chosen >> 20} of {token_bytes(CONFIG.vocab) >> 20} MiB", end=", ")
    print(f"drafts {drafts >> 20} of {counted >> 20} MiB counted")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_a_sequence_that_lost_its_states_takes_no_more_memory_than_is_counted() -> None:
    """However long it is: what follows the last state runs in blocks."""
    config = make_config({**TWO_KINDS, "mlp_only_layers": list(range(8))}, {}, Path("made up"))
    files, device = AbsentWeights((f"{config.names.embedding}.weight",), config), torch.device("cuda", 0)
    decoder, rows = Decoder(config, files, Range(0, 8), torch.bfloat16, device), 50_000
    kv, tree = decoder.make_kv(-(-rows // PAGE) + 1, PAGE), ancestry([0, 0, 1])

    def step() -> object:
        steps = CapturedSteps(decoder, kv, {}, GraphCapture(), prompt_sizes=prompt_buckets(decoder, kv))
        span = RowSpan(3, rows, 3, tuple(range(kv.pages)), tree)
        at = torch.arange(rows, rows + 3, device=device)
        assert steps.fill(StepRows([0, 1, 2], [rows, rows + 1, rows + 2], at.tolist(), [span])) is None
        return steps, decoder.forward(decoder.embed(at % 3), at, at, decoder.plan([span], PAGE, "packed"), kv)

    assert 0 < taken(step) <= step_bytes(config, 2, 0)


def taken(capture: Callable[[], object]) -> int:
    """Bytes of the device that were taken at most while something was captured."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    kept = capture()
    assert kept is not None
    return torch.cuda.max_memory_reserved() - before
