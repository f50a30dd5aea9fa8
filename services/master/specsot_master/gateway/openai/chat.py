"""The objects of /v1/chat/completions.

Pure. Refuses to know where their contents come from.
"""

from __future__ import annotations

from typing import Any

from specsot.events import Candidate, TokenLogprobs
from specsot.view import View
from specsot_master.gateway.openai.choices import LEAST, Piece, Telling, planning_of, reason_of

PREFIX, WHOLE, CHUNK = "chatcmpl-", "chat.completion", "chat.completion.chunk"


def chunk_of(index: int, piece: Piece) -> dict[str, Any]:
    """One choice of a streamed chunk."""
    delta: dict[str, Any] = {"role": "assistant", "content": ""} if piece.begins else {}
    if piece.text:
        delta["content"] = piece.text
    chunk = {"index": index, "delta": delta, "logprobs": None, "finish_reason": piece.reason}
    if piece.logprobs is not None:
        chunk["logprobs"] = logprobs_of(piece.logprobs)
    return chunk | ({"specsot": piece.extra} if piece.extra else {})


def choice_of(index: int, view: View, telling: Telling) -> dict[str, Any]:
    """One choice of a whole answer. Raises SpecsotError where there is none."""
    finished = view.finished
    assert finished is not None
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": finished.text, "refusal": None},
        "logprobs": logprobs_of(view.logprobs) if telling.logprobs else None,
        "finish_reason": reason_of(finished),
    }
    return choice | ({"specsot": planning_of(view, telling)} if telling.planning else {})


def logprobs_of(tokens: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
    told = [_told(one.chosen) | {"top_logprobs": [_told(top) for top in one.top]} for one in tokens]
    return {"content": told, "refusal": None}


def _told(candidate: Candidate) -> dict[str, Any]:
    raw = candidate.raw
    shown = raw.decode(errors="replace")
    return {"token": shown, "logprob": max(candidate.logprob, LEAST), "bytes": list(raw)}
