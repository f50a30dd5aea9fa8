"""A judge that compares two answers: what it is asked, in both orders, and what its replies mean."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Protocol

from specsot.errors import InvalidRequest, Unavailable
from specsot.params import Message
from specsot_lab.eval.records import Record

SYSTEM = """\
You are an impartial judge. You see one or more questions of a user, and how two assistants, A and B, answered
them. Compare how helpful, relevant, correct, deep and detailed their answers are, over all questions. Neither
the order in which the assistants are shown nor the length of their answers may influence you. Give your
reasons in a few sentences. Then write your verdict on a line of its own: [[A]] if A is better, [[B]] if B is
better, [[tie]] if they are equally good."""
_VERDICT = re.compile(r"\[\[(.*?)\]\]")


class Judge(Protocol):
    """name: what its records are found by."""

    name: str

    async def reply(self, messages: Sequence[Message]) -> str:
        """Raises Unavailable, InvalidRequest where no question can succeed."""
        ...

    async def close(self) -> None: ...


def messages_of(questions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> tuple[Message, Message]:
    """All that was asked, then all that each of them answered, in order."""
    parts = (("Question", questions), ("Answer of A", a), ("Answer of B", b))
    shown = [f"[{name} {n}]\n{text}" for name, texts in parts for n, text in enumerate(texts, 1)]
    return Message("system", SYSTEM), Message("user", "\n\n".join(shown))


def verdict_in(reply: str) -> str | None:
    """A, B or tie; None where there is no verdict, one that is none of these, or more than one."""
    found = set(_VERDICT.findall(reply))
    return found.pop() if len(found) == 1 and found <= {"A", "B", "tie"} else None


def winner_of(direct_first: str | None, sot_first: str | None) -> str | None:
    """direct, sot or tie. Two orders that disagree are a tie; where a verdict is missing, None."""
    if direct_first is None or sot_first is None:
        return None
    first = {"A": "direct", "B": "sot"}.get(direct_first, "tie")
    second = {"A": "sot", "B": "direct"}.get(sot_first, "tie")
    return first if first == second else "tie"


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


SECONDS = 120.0  # of one try
RETRIES = 3
MOST_SHOWN = 200  # characters of what went wrong


class JudgeEndpoint:
    """The model `name` at an OpenAI-compatible `url`, such as http://127.0.0.1:8000/v1. The openai package
    (specsot-lab[judge]) retries lost connections, 408, 409, 429 and 5xx. http: a client; else its own.
    """

    def __init__(self, url: str, name: str, key: str, http: Any = None) -> None:
        import openai

        self.name, self._lost = name, (openai.OpenAIError, ValueError)  # ValueError: JSON that is none
        self._never = openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=key or "none", timeout=SECONDS, max_retries=RETRIES, http_client=http
        )

    async def reply(self, messages: Sequence[Message]) -> str:
        """Its words, a refusal's too. Raises Unavailable, InvalidRequest where no question can succeed."""
        asked: Any = [{"role": one.role, "content": one.content} for one in messages]
        try:
            told = await self._client.chat.completions.create(model=self.name, messages=asked, temperature=0)
        except self._never as error:
            raise InvalidRequest(f"the judge: {_brief(error)}", field="judge") from None
        except self._lost as error:
            raise Unavailable(_brief(error)) from None
        return _words_of(told)

    async def close(self) -> None:
        await self._client.close()


def _brief(error: Exception) -> str:
    """One line; whoever stands in an endpoint's place may say a whole page."""
    return " ".join(str(error).split())[:MOST_SHOWN]


def _words_of(told: Any) -> str:
    """openai checks nothing of what it hands on; another server's page comes as a text."""
    try:
        message = told.choices[0].message
        words = message.content or message.refusal
    except (AttributeError, IndexError, TypeError):
        words = None
    if not isinstance(words, str):
        raise Unavailable("the endpoint's reply is no chat completion with a text")
    return words
