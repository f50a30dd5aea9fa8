"""Transformers' own decoding of the same shapes on the same GPU, with weights as random as ours.

Refuses to know our own decoding.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specsot_app.bench.shapes import SHAPES

FEW, MANY = 16, 144  # tokens of two answers: their difference has no prompt in it


def measure_rivals(name: str, text: int) -> Iterator[dict[str, object]]:
    """Milliseconds a token of `generate`, as it comes and with a static cache, which it compiles itself."""
    settings = dict(SHAPES[name])
    config: Any = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.randint(1000, (1, text), device="cuda")
    for what, more in (("eager", {}), ("static cache, compiled", {"cache_implementation": "static"})):
        seconds = _seconds_of_a_token(model, prompt, more)
        yield {
            "what": f"Transformers generate, {what}",
            "ms": round(seconds * 1e3, 3),
            "tokens/s": round(1 / seconds, 1),
        }
    del model
    gc.collect()
    torch.cuda.empty_cache()


def _seconds_of_a_token(model: Any, prompt: torch.Tensor, more: dict[str, str]) -> float:
    few, many = (_seconds(model, prompt, count, more) for count in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def _seconds(model: Any, prompt: torch.Tensor, count: int, more: dict[str, str]) -> float:
    """Of an answer of so many tokens; the second of two, so that everything is compiled."""
    settings = {
        "max_new_tokens": count,
        "min_new_tokens": count,
        "do_sample": False,
        "pad_token_id": 0,
        **more,
    }
    begun = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        torch.cuda.synchronize()
    return time.perf_counter() - begun
