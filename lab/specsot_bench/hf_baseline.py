"""Runs Transformers' own `generate` as the external baseline, alone or assisted by a small model.

It is greedy, with batch size 1, default attention and settings, and the same dtype and threads. It runs in a
process of its own, because two OpenMP teams in one process would slow each other down.
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
# Characters of an error message.
MAX_ERROR_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class HfOutput:
    """What was written.

    tokens: the token ids.
    steps: (seconds, tokens so far) after each step; the last entry is the whole.
    """

    tokens: Ids
    steps: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.steps[-1][0]


class HfBaseline:
    """A model that Transformers has loaded in another process; `small` may assist it. Close it after use."""

    def __init__(
        self, model: Path, dtype: torch.dtype, device: str = "cpu", small: Path | None = None
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, spawn, _load, (model, dtype, device, small))

    def write(
        self, prompt: Ids, count: int, assisted: bool = False, seconds: float | None = None
    ) -> HfOutput:
        """Write exactly `count` tokens after a prompt; an end-of-sequence token counts as any other.

        Raises Unavailable if Transformers cannot load or write with these models, or its process died;
        TimeoutError if the tokens were not written within so many seconds.
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
        """End the process."""
        self._process.shutdown()


class TokenTimes:
    """A streamer of `generate`: receives tokens as they are decided, the prompt first, and notes
    the times.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[float, int]] = []
        self._watch = Stopwatch()
        self._tokens = 0
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Note the time of some tokens."""
        if self._prompt:
            self._prompt = False
            return
        self._tokens += value.numel()
        self.heard.append((self._watch.seconds, self._tokens))

    def end(self) -> None:
        """Note the end, just before `generate` returns."""
        self.heard.append((self._watch.seconds, self._tokens))


class HfModel:
    """A model that is loaded in this process; `small` may assist it."""

    def __init__(self, model: Any, small: Any = None) -> None:
        self._model = model
        self._small = small

    @torch.inference_mode()
    def write(
        self, prompt: Ids, count: int, assisted: bool = False, seconds: float | None = None
    ) -> HfOutput:
        """Write greedily; return fewer tokens if the time runs out."""
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
        return HfOutput(tuple(out[0, len(prompt) :].tolist()), tuple(steps.heard))


def _open(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Load a model without end tokens, so that all answers are equally long."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = load_in_transformers(folder, dtype)
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


# The model of this process, or why there is none.
_held: list[HfModel | str] = []


def _load(model: Path, dtype: torch.dtype, device: str, small: Path | None) -> None:
    """Load the models in the child process."""
    try:
        _held.append(HfModel(_open(model, dtype, device), small and _open(small, dtype, device)))
    except Exception as error:
        _held.append(_error_text(error))


def _write(prompt: Ids, count: int, assisted: bool, seconds: float | None) -> HfOutput | str:
    """Write in the child process. An error is returned as a string, since not every exception can
    be pickled.
    """
    (held,) = _held
    if isinstance(held, str):
        return held
    try:
        return held.write(prompt, count, assisted, seconds)
    except Exception as error:
        return _error_text(error)


def _error_text(error: Exception) -> str:
    """Return an error in one line."""
    return f"Transformers: {type(error).__name__}: {' '.join(str(error).split())[:MAX_ERROR_CHARACTERS]}"
