"""Transformers' own `generate`, as the outside yardstick.

Refuses to know SpecSoT's engine. Greedy, batch 1, its default attention, the same dtype and threads.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Rival:
    """A model loaded the ordinary way."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, local_files_only=True
        ).eval()

    @torch.inference_mode()
    def write(self, prompt: tuple[int, ...], count: int) -> tuple[tuple[int, ...], float]:
        """Exactly `count` tokens behind a prompt, and the seconds they took."""
        ids = torch.tensor([prompt])
        begun = time.perf_counter()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return tuple(out[0, len(prompt) :].tolist()), time.perf_counter() - begun
