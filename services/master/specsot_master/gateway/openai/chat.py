"""The objects of /v1/chat/completions.

Pure. Refuses to know where their contents come from.
"""

from __future__ import annotations

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

CHAT_PREFIX, CHAT_WHOLE, CHAT_CHUNK = "chatcmpl-", "chat.completion", "chat.completion.chunk"


def chat_chunk(index: int, piece: ChoiceDelta) -> dict[str, Any]:
    """One choice of a streamed chunk."""
    delta: dict[str, Any] = {"role": "assistant", "content": ""} if piece.begins else {}
    if piece.text:
        delta["content"] = piece.text
    chunk = {"index": index, "delta": delta, "logprobs": None, "finish_reason": piece.reason}
    if piece.logprobs is not None:
        chunk["logprobs"] = chat_logprobs(piece.logprobs)
    return chunk | ({"specsot": piece.extra} if piece.extra else {})


def chat_choice(index: int, view: View, telling: ChoiceOptions) -> dict[str, Any]:
    """One choice of a whole answer. Raises SpecsotError where there is none."""
    finished = view.finished
    assert finished is not None
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": finished.text, "refusal": None},
        "logprobs": chat_logprobs(view.logprobs) if telling.logprobs else None,
        "finish_reason": finish_reason(finished),
    }
    return choice | ({"specsot": planning_of(view, telling)} if telling.planning else {})


def chat_logprobs(tokens: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
    told = [
        _chat_candidate(one.chosen) | {"top_logprobs": [_chat_candidate(top) for top in one.top]}
        for one in tokens
    ]
    return {"content": told, "refusal": None}


def _chat_candidate(candidate: Candidate) -> dict[str, Any]:
    raw = candidate.raw
    shown = raw.decode(errors="replace")
    return {"token": shown, "logprob": max(candidate.logprob, MIN_LOGPROB), "bytes": list(raw)}
