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

# Token ids.
Ids = tuple[int, ...]
# Characters. Longest part of an error message that is shown. Untuned.
MAX_ERROR_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class HfOutput:
    """What was written.

    tokens: Token ids of the text.
    steps: Pairs of (seconds since the call, number of tokens so far) after each step; the last entry is the
        whole text.
    """

    tokens: Ids
    steps: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        """Return the seconds from the call to the last token."""
        return self.steps[-1][0]


class HfBaseline:
    """A model that Transformers has loaded in another process. Close it after use.

    model: Directory of the model.
    dtype: Data type of the weights.
    device: A torch device.
    assistant: Directory of a small model that may assist it; None: no model can assist.
    """

    def __init__(
        self, model: Path, dtype: torch.dtype, device: str = "cpu", assistant: Path | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, context, _load, (model, dtype, device, assistant))

    def write(
        self, prompt: Ids, max_new_tokens: int, assisted: bool = False, timeout: float | None = None
    ) -> HfOutput:
        """Write exactly so many tokens after a prompt; an end-of-sequence token counts as any other.

        The call blocks until the tokens are there. The first call also waits for the loading, which
        `timeout` does not include.

        prompt: Token ids of the prompt.
        max_new_tokens: Number of tokens to write.
        assisted: True if the small model drafts.
        timeout: Seconds after which the writing stops; None: no limit.
        Raises Unavailable if Transformers cannot load or write with these models, or its process died;
            TimeoutError if the tokens were not written in time.
        """
        try:
            output = self._process.submit(_write, prompt, max_new_tokens, assisted, timeout).result()
        except BrokenProcessPool:
            raise Unavailable("the process of Transformers died") from None
        if isinstance(output, str):
            raise Unavailable(output)
        if len(output.tokens) < max_new_tokens:
            raise TimeoutError
        return output

    def close(self) -> None:
        """End the process, and wait for it."""
        self._process.shutdown()


class TokenTimes:
    """A streamer of `generate`, to which Transformers passes the prompt first, then tokens as they are
    decided. The streamer records how many seconds after its creation they came.

    times: Pairs of (seconds, number of tokens so far); the prompt is left out.
    """

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []
        self._watch = Stopwatch()
        self._tokens = 0
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Record the time of some tokens. The first call brings the prompt, which is not recorded.

        Several tokens that are decided at once are recorded as one entry.

        value: Token ids that were decided at once.
        """
        if self._prompt:
            self._prompt = False
            return
        self._tokens += value.numel()
        self.times.append((self._watch.seconds, self._tokens))

    def end(self) -> None:
        """Record the end, just before `generate` returns, with the same number of tokens."""
        self.times.append((self._watch.seconds, self._tokens))


class HfModel:
    """A model that is loaded in this process.

    model: A loaded model of Transformers.
    assistant: A smaller model with the same tokens; None: no model can assist.
    """

    def __init__(self, model: Any, assistant: Any = None) -> None:
        self._model = model
        self._small = assistant

    @torch.inference_mode()
    def write(
        self, prompt: Ids, max_new_tokens: int, assisted: bool = False, timeout: float | None = None
    ) -> HfOutput:
        """Write greedily; return fewer tokens if the time runs out.

        With `assisted` but no assistant, Transformers gets None as the assistant.

        prompt: Token ids of the prompt.
        max_new_tokens: Number of tokens to write.
        assisted: True if the small model drafts.
        timeout: Seconds after which the writing stops; None: no limit.
        """
        ids = torch.tensor([prompt], device=self._model.device)
        steps = TokenTimes()
        further_arguments = {"assistant_model": self._small} if assisted else {}
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            max_time=timeout,
            do_sample=False,
            pad_token_id=0,
            streamer=steps,
            **further_arguments,
        )
        return HfOutput(tuple(output[0, len(prompt) :].tolist()), tuple(steps.times))


def _open(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Return a model without end tokens, so that all answers are equally long.

    Raises ModelError if Transformers cannot load the model. Warnings of Transformers are silenced in this
    process.

    folder: The model's directory.
    dtype: Data type of its weights.
    device: A torch device.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = load_in_transformers(folder, dtype)
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


# The model of this process, or why there is none.
_held: list[HfModel | str] = []


def _load(model: Path, dtype: torch.dtype, device: str, assistant: Path | None) -> None:
    """Load the models in the child process, and keep them, or the reason of a failure, in `_held`.

    No exception is raised.

    model: Directory of the model.
    dtype: Data type of the weights.
    device: A torch device.
    assistant: Directory of the small model; None: no model can assist.
    """
    try:
        _held.append(HfModel(_open(model, dtype, device), assistant and _open(assistant, dtype, device)))
    except Exception as error:
        _held.append(_error_text(error))


def _write(prompt: Ids, max_new_tokens: int, assisted: bool, timeout: float | None) -> HfOutput | str:
    """Write in the child process. An error is returned as a string, since not every exception can be pickled.

    The string is the reason for which the models could not be loaded, or the error of this call.

    prompt: Token ids of the prompt.
    max_new_tokens: Number of tokens to write.
    assisted: True if the small model drafts.
    timeout: Seconds after which the writing stops; None: no limit.
    """
    (loaded,) = _held
    if isinstance(loaded, str):
        return loaded
    try:
        return loaded.write(prompt, max_new_tokens, assisted, timeout)
    except Exception as error:
        return _error_text(error)


def _error_text(error: Exception) -> str:
    """Return an error in one line: its class, then at most MAX_ERROR_CHARACTERS of its message.

    error: The error.
    """
    return f"Transformers: {type(error).__name__}: {' '.join(str(error).split())[:MAX_ERROR_CHARACTERS]}"
