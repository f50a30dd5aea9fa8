"""What a text is compared with: where greedy decoding by itself would have written something else.

Refuses to know who wrote the text. Transformers decides, which knows nothing of SpecSoT's engine; about a
base whose matrices or KV rows are rounded only the base itself can, for nobody else rounds as it does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from specsot.errors import ModelError
from specsot.model.decoder import Decoder
from specsot_app.hush import no_import_warnings
from specsot_app.verify.passes import read_base
from specsot_app.verify.report import TokenDifference


class TransformersReference:
    """A model as Transformers loads and runs it."""

    def __init__(self, model: Path, dtype: torch.dtype, device: str) -> None:
        """Raises ModelError where Transformers cannot load it."""
        logging.disable_progress_bar()
        try:
            with no_import_warnings():
                loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            line = str(error).strip().partition("\n")[0]
            raise ModelError(f"{model}: Transformers cannot load it ({line})") from error
        self._model, self._device = loaded.to(device).eval(), device

    @torch.inference_mode()
    def compare(
        self, prompt: Sequence[int], written: Sequence[int], ends: Collection[int] | None
    ) -> list[TokenDifference]:
        """Every token that is not the reference's choice behind the tokens before it.

        With none, greedy decoding by the reference writes exactly this. ends: one of these must come
        next; None where the answer was cut off.
        """
        fed = torch.tensor([[*prompt, *written]], device=self._device)
        logits = self._model(fed, logits_to_keep=len(written) + 1).logits[0]
        return _differences(logits.float(), written, ends)


class OnePassReference:
    """A model as SpecSoT reads a whole text, in one pass without drafts."""

    def __init__(self, base: Decoder) -> None:
        self._base = base

    @torch.inference_mode()
    def compare(
        self, prompt: Sequence[int], written: Sequence[int], ends: Collection[int] | None
    ) -> list[TokenDifference]:
        """As `Reference.compare`."""
        hidden = read_base(self._base, torch.tensor([*prompt, *written], device=self._base.device))
        return _differences(self._base.logits(hidden[len(prompt) - 1 :]).float(), written, ends)


def _differences(
    logits: torch.Tensor, written: Sequence[int], ends: Collection[int] | None
) -> list[TokenDifference]:
    """logits: [written + 1, V], before each token and behind the last."""
    first, second = logits.topk(2).values.unbind(-1)
    choices, gaps = logits.argmax(-1).tolist(), (first - second).tolist()
    wrong = [at for at, token in enumerate(written) if choices[at] != token]
    found = [TokenDifference(at, written[at], choices[at], gaps[at]) for at in wrong]
    if ends is not None and choices[-1] not in ends:
        found.append(TokenDifference(len(written), None, choices[-1], gaps[-1]))
    return found
