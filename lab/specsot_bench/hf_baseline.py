"""Transformers' own `generate`, as the outside yardstick, alone or assisted by a small model.

Greedy, batch 1, its default attention and settings, the same dtype and
threads; in a process of its own: two OpenMP teams of one process would stand in each other's way.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specsot.errors import Unavailable
from specsot_bench.reference_model import load_in_transformers
from specsot_bench.results import Stopwatch

Ids = tuple[int, ...]
MOST_SAID = 200  # characters of an error


@dataclass(frozen=True, slots=True)
class HfText:
    """What was written. steps: after how many seconds so many tokens had come; the last is the whole."""

    tokens: Ids
    steps: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        return self.steps[-1][0]


class HfBaseline:
    """A model loaded the ordinary way, elsewhere; `small` may assist it. Close it."""

    def __init__(
        self, model: Path, dtype: torch.dtype, device: str = "cpu", small: Path | None = None
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, spawn, _load, (model, dtype, device, small))

    def write(self, prompt: Ids, count: int, assisted: bool = False, seconds: float | None = None) -> HfText:
        """Exactly `count` tokens behind a prompt; an end-of-sequence token is one like any other.

        Raises Unavailable: Transformers cannot load or write with these, or its process died. TimeoutError:
        they were not written within so many seconds.
        """
        try:
            told = self._process.submit(_write, prompt, count, assisted, seconds).result()
        except BrokenProcessPool:
            raise Unavailable("the process of Transformers died") from None
        if isinstance(told, str):
            raise Unavailable(told)
        if len(told.tokens) < count:
            raise TimeoutError
        return told

    def close(self) -> None:
        self._process.shutdown()


class TokenTimes:
    """What `generate` calls a streamer: hears of tokens as they are decided, of the prompt first."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, int]] = []
        self._watch = Stopwatch()
        self._tokens = 0
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self._tokens += value.numel()
        self.heard.append((self._watch.seconds, self._tokens))

    def end(self) -> None:
        """`generate` is about to return."""
        self.heard.append((self._watch.seconds, self._tokens))


class HfModel:
    """A model that is loaded in this process; `small` may assist it."""

    def __init__(self, model: Any, small: Any = None) -> None:
        self._model = model
        self._small = small

    @torch.inference_mode()
    def write(self, prompt: Ids, count: int, assisted: bool = False, seconds: float | None = None) -> HfText:
        """Greedy; fewer tokens where the time is over."""
        ids = torch.tensor([prompt], device=self._model.device)
        steps = TokenTimes()
        more = {"assistant_model": self._small} if assisted else {}
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            max_time=seconds,
            do_sample=False,
            pad_token_id=0,
            streamer=steps,
            **more,
        )
        return HfText(tuple(out[0, len(prompt) :].tolist()), tuple(steps.heard))


def _open(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """No token ends a text: all write equally long ones."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = load_in_transformers(folder, dtype)
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


_held: list[HfModel | str] = []  # or why there is none


def _load(model: Path, dtype: torch.dtype, device: str, small: Path | None) -> None:
    try:
        _held.append(HfModel(_open(model, dtype, device), small and _open(small, dtype, device)))
    except Exception as error:
        _held.append(_said(error))


def _write(prompt: Ids, count: int, assisted: bool, seconds: float | None) -> HfText | str:
    """An error as a text: not every exception survives the way between processes."""
    (held,) = _held
    if isinstance(held, str):
        return held
    try:
        return held.write(prompt, count, assisted, seconds)
    except Exception as error:
        return _said(error)


def _said(error: Exception) -> str:
    return f"Transformers: {type(error).__name__}: {' '.join(str(error).split())[:MOST_SAID]}"
