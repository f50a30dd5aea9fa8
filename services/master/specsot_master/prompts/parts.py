"""Prompts of a model that was trained to plan: the parts its directory gives in specsot.json.

Refuses to know any other wording. Parts are tokenised one by one, as they were in training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from specsot.errors import ModelError
from specsot.params import Message
from specsot.skeleton import Point
from specsot_master.prompts.generic import render_chat
from specsot_master.prompts.turns import PromptTurn, find_slot
from specsot_master.text import Text

PARTS_FILE = "specsot.json"


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What specsot.json may say. {plan}, {id}, {title}, {length} and {text} are filled in.

    parent_text: how a finished point stands behind the plan of a point that builds on it.
    """

    skeleton_turn: str
    branch_turn: str
    system: str = ""
    plan_line: str = "{id}. {title}\n"
    parent_text: str = "\n{id}. {title}\n{text}\n"
    answer_prefix: str = ""


def read_parts(directory: Path) -> PromptParts | None:
    """The parts of a model directory, None when it has none. Raises ModelError."""
    path = directory / PARTS_FILE
    if not path.is_file():
        return None
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        parts = PromptParts(
            **{field.name: given[field.name] for field in fields(PromptParts) if field.name in given}
        )
        _fill_branch(parts, _PARTS_POINT, [_PARTS_POINT], [(_PARTS_POINT, "")], 1)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path}: {type(error).__name__}: {error}") from error
    return parts


class PartsConversation:
    """The turns of one request to a model with its own parts."""

    def __init__(self, text: Text, parts: PromptParts, messages: Sequence[Message]) -> None:
        """Raises TemplateRefused, and ModelError for a template that these parts cannot use."""
        self._text, self._parts = text, parts
        self._messages = _with_system(parts.system, tuple(messages))
        self._opening = text.render(self._messages, answer=False)
        self.prefix = text.encode(self._opening)
        self._place = find_slot(self._ask, text.mark)
        self._head = text.encode(self._answer(parts.skeleton_turn) + parts.answer_prefix)
        self.skeleton: PromptTurn = self._turn(parts.skeleton_turn)
        asked = len(self._ask(parts.skeleton_turn))
        self.behind = asked - (len(self._opening) if self._place else 0)
        self.asked = len(text.encode(render_chat(text, tuple(messages))))

    def branch(
        self, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
    ) -> PromptTurn:
        return self._turn(_fill_branch(self._parts, point, points, parents, length))

    def _turn(self, words: str) -> PromptTurn:
        """prefix | turn | head of the answer, each tokenised alone."""
        place = self._place
        asked = place.fill(self._text.mark(words)) if place else self._ask(words)
        if not asked.startswith(self._opening):
            raise _misplaced()
        turn = self._text.encode(asked[len(self._opening) :])
        return PromptTurn(self.prefix + turn + self._head, len(self.prefix))

    def _ask(self, words: str) -> str:
        return self._text.render((*self._messages, Message("user", words)), answer=False)

    def _answer(self, words: str) -> str:
        """The head of the answer to a turn, whatever its words. Raises ModelError."""
        asked = self._ask(words)
        answered = self._text.render((*self._messages, Message("user", words)))
        if not (asked.startswith(self._opening) and answered.startswith(asked)):
            raise _misplaced()
        return answered[len(asked) :]


def _misplaced() -> ModelError:
    return ModelError(f"{PARTS_FILE} needs a chat template that renders turns one behind the other")


_PARTS_POINT = Point(id=1, length=1, title="-")


def _fill_branch(
    parts: PromptParts,
    point: Point,
    points: Sequence[Point],
    parents: Sequence[tuple[Point, str]],
    length: int,
) -> str:
    plan = "".join(parts.plan_line.format(id=other.id, title=other.title) for other in points)
    read = "".join(parts.parent_text.format(id=one.id, title=one.title, text=text) for one, text in parents)
    return parts.branch_turn.format(plan=plan + read, id=point.id, title=point.title, length=length)


def _with_system(system: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The model's own system words first, then those of the caller, in one turn."""
    if not system:
        return messages
    if messages[0].role == "system":
        joined = Message("system", f"{system}\n\n{messages[0].content}")
        return (joined, *messages[1:])
    return (Message("system", system), *messages)
