"""The objects of /v1/completions.

Pure. Refuses to know where their contents come from.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from typing import Any

from specsot.events import Candidate, TokenLogprobs
from specsot.view import View
from specsot_master.gateway.openai.choices import (
    MIN_LOGPROB,
    ChoiceDelta,
    ChoiceOptions,
    finish_reason,
    planning_of,
)

TEXT_PREFIX, TEXT_WHOLE, TEXT_CHUNK = "cmpl-", "text_completion", "text_completion"


def text_chunk(index: int, piece: ChoiceDelta) -> dict[str, Any]:
    """One choice of a streamed chunk."""
    chunk: dict[str, Any] = {
        "index": index,
        "text": piece.text,
        "logprobs": None,
        "finish_reason": piece.reason,
    }
    if piece.logprobs is not None:
        chunk["logprobs"] = text_logprobs(piece.logprobs, piece.offset)
    return chunk | ({"specsot": piece.extra} if piece.extra else {})


def text_choice(index: int, view: View, telling: ChoiceOptions) -> dict[str, Any]:
    """One choice of a whole answer. Raises SpecsotError where there is none."""
    finished = view.finished
    assert finished is not None
    choice: dict[str, Any] = {
        "index": index,
        "text": finished.text,
        "logprobs": text_logprobs(view.logprobs, 0) if telling.logprobs else None,
        "finish_reason": finish_reason(finished),
    }
    return choice | ({"specsot": planning_of(view, telling)} if telling.planning else {})


def text_logprobs(tokens: tuple[TokenLogprobs, ...], offset: int) -> dict[str, Any]:
    """Four lists, one entry a token. offset: characters of the choice before the first of them."""
    return {
        "tokens": [_shown_token(one.chosen) for one in tokens],
        "token_logprobs": [max(one.chosen.logprob, MIN_LOGPROB) for one in tokens],
        "top_logprobs": [
            {_shown_token(top): max(top.logprob, MIN_LOGPROB) for top in (*one.top, one.chosen)}
            for one in tokens
        ],
        "text_offset": _text_offsets(tokens, offset),
    }


def _text_offsets(tokens: tuple[TokenLogprobs, ...], offset: int) -> list[int]:
    """Where each token begins; one that only goes on with a character begins where that does."""
    read, places = getincrementaldecoder("utf-8")(errors="replace"), list[int]()
    for one in tokens:
        places.append(offset)
        offset += len(read.decode(one.chosen.raw))
    return places


def _shown_token(candidate: Candidate) -> str:
    """A token as text; as OpenAI has it, where it is only a part of a character."""
    try:
        return candidate.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.raw)
