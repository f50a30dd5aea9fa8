"""Transformers' own `generate`, as the outside yardstick.

Refuses to know SpecSoT's engine. Greedy, batch 1, its default attention, the same dtype and threads; in a
process of its own: two OpenMP teams of one process would stand in each other's way.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch


class Rival:
    """A model loaded the ordinary way, elsewhere. Close it."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, spawn, _load, (model, dtype))

    def write(self, prompt: tuple[int, ...], count: int) -> tuple[tuple[int, ...], float]:
        """Exactly `count` tokens behind a prompt, and the seconds they took over there."""
        return self._process.submit(_write, prompt, count).result()

    def close(self) -> None:
        self._process.shutdown()


class _Model:
    """What the other process holds."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, local_files_only=True
        ).eval()

    @torch.inference_mode()
    def write(self, prompt: tuple[int, ...], count: int) -> tuple[tuple[int, ...], float]:
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


_held: list[_Model] = []


def _load(model: Path, dtype: torch.dtype) -> None:
    _held.append(_Model(model, dtype))


def _write(prompt: tuple[int, ...], count: int) -> tuple[tuple[int, ...], float]:
    return _held[0].write(prompt, count)
