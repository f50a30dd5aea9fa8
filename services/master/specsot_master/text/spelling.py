"""The bytes of single tokens, as log-probabilities are told with them.

Refuses to know text around a token. Special tokens are spelled by their names.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from specsot.vocabulary import Speller, speller


class TokenBytes:
    """Call it with a token id; ids that only the model's logits have write nothing."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        spelled = None if token in self._added or self._spell is None else self._spell(name)
        return name.encode() if spelled is None else spelled

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _spell(self) -> Speller | None:
        """Only the decoder is looked at: a whole vocabulary takes long to write out."""
        decoder, model = self._tokenizer.decoder, self._tokenizer.model
        described = None if decoder is None else json.loads(decoder.__getstate__())
        fallback = getattr(model, "byte_fallback", False)
        return speller({"decoder": described, "model": {"byte_fallback": fallback}})
