"""GGUF files: the same model as Transformers makes of them, and one clear line for each way to be broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specsot.model.resolving import resolve_model
from tests.model.gguf_files import KINDS, write_gguf
from tests.model.tiny import Ring, load, write_model

pytestmark = pytest.mark.torch

PROMPT = [7, 99, 3, 50, 21, 21, 64, 8, 15, 30, 77, 41, 5, 90, 13, 2, 66, 38, 4, 19]
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, wide heads": ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 128}),  # which is what Transformers takes them to have
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specsot" / "gguf"


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
