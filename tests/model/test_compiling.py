"""Kernels of all graphs are compiled in parallel before the first graph is captured."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from specsot.members import Range
from specsot_model.attention import RowSpan
from specsot_model.cuda_graphs import BUCKETS, CapturedSteps, GraphCapture, compile_steps, prompt_buckets
from specsot_model.decoder import Decoder
from tests.model.tiny import write_model

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
import triton

from specsot_kernels.gpu import launching

SIZES: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 896,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_no_kernel_is_compiled_while_the_graphs_of_a_measured_model_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: torch.dtype
) -> None:
    """One layer is measured, over pages of another size; then the graphs of the whole model are captured, and
    prompts run that have no graph.
    """
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    write_model(tmp_path, "qwen2", num_hidden_layers=3, max_position_embeddings=1024, **SIZES)
    one = Decoder.load(tmp_path, Range(1, 2), kind, "cuda")
    reports = list[tuple[int, int]]()
    compile_steps(one)
    total = launching.await_compiled(lambda done, total: reports.append((done, total)))
    assert total
    assert reports == [(done, total) for done in range(1, total + 1)]

    compiled = list[str]()
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda *given, **named: compiled.append(str(named.get("repr", named.get("key")))),
    )
    whole = Decoder.load(tmp_path, Range(0, 3), kind, "cuda")
    kv = whole.make_kv(40, 64)
    CapturedSteps(whole, kv, {}, GraphCapture(), BUCKETS, prompt_buckets(whole, kv))
    rows = BUCKETS[-1] + 9
    hidden = torch.zeros(rows, whole.config.hidden, dtype=kind, device="cuda")
    positions = torch.arange(rows, device="cuda")
    whole.forward(
        hidden, positions, positions, whole.plan([RowSpan(rows, 0, rows, (*range(9),))], 64, "packed"), kv
    )
    assert compiled == []


def test_nothing_is_compiled_ahead_in_the_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted here")
    launching.compile_ahead(lambda: pytest.fail("the work would run kernels"))
