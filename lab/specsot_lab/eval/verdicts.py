"""What a judge says of two answers to one prompt: asked in both orders, kept word for word.

Refuses to know files, scores, and how the judge is reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from specsot.errors import Unavailable
from specsot_lab.eval.folder import Record
from specsot_lab.eval.judging import Judge, messages_of, verdict_in, winner_of


async def judge_pair(judge: Judge, direct: Record, sot: Record) -> Record:
    """Of the turns that both have. winner None: at least one order brought no verdict."""
    first, second = ([turn["text"] for turn in one["turns"]] for one in (direct, sot))
    questions = direct["questions"][: len(first)]
    orders = await asyncio.gather(
        _ask(judge, "direct", questions, first, second), _ask(judge, "sot", questions, second, first)
    )
    about = {name: direct[name] for name in ("task", "category", "id", "questions")}
    winner = winner_of(*(order["verdict"] for order in orders))
    return about | {"judge": judge.name, "winner": winner, "orders": list(orders)}


def has_failed(verdict: Record) -> bool:
    """The judge could not be asked, which may be better the next time."""
    return any("error" in order for order in verdict["orders"])


async def _ask(
    judge: Judge, a: str, questions: Sequence[str], first: Sequence[str], second: Sequence[str]
) -> dict[str, Any]:
    """a: whose answers are shown as those of A."""
    messages = messages_of(questions, first, second)
    order: dict[str, Any] = {"a": a, "prompt": messages[1].content, "reply": None, "verdict": None}
    try:
        reply = await judge.reply(messages)
    except Unavailable as error:
        return order | {"error": str(error)}
    return order | {"reply": reply, "verdict": verdict_in(reply)}
