"""What a judge is asked about two answers, what its reply says, and what two replies say together.

Pure. Refuses to know who the judge is and how it is reached.

Pairwise and in both orders, since judges favour a place (Zheng et al. 2023, arXiv:2306.05685, section 3.3).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from specsot.params import Message

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
