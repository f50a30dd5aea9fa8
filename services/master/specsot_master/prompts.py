"""Prompt tokens of a request: the shared prefix, the planning turn, one turn per point, plain chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from specsot.core.skeleton import PlanRules, Point
from specsot.errors import ModelError
from specsot.params import Ask, Message
from specsot_master.core.prompts import (
    SAMPLE_POINT,
    Conversation,
    PromptTurn,
    TurnSlot,
    branch_instruction,
    choose_wording,
    find_slot,
    plan_instruction,
    shared_length,
    shared_text,
    turn_from,
)
from specsot_master.text import TemplateRefused, Text


class Prompts:
    """All prompts of one model: by the parts in its directory, or by instructions for any chat model."""

    def __init__(self, directory: str | Path, text: Text) -> None:
        """Raises ModelError when the directory's specsot.json cannot be used."""
        self._text, self._parts = text, read_parts(Path(directory))

    @property
    def taught(self) -> bool:
        """The model was taught to choose between a plan and an answer."""
        return self._parts is not None

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A plain answer's prompt. Raises TemplateRefused."""
        return self._text.encode(render_chat(self._text, tuple(messages)))

    def size(self, text: str) -> int:
        """Tokens of a text of ours in the answer."""
        return len(self._text.encode(text))

    def plan(self, messages: Sequence[Message], rules: PlanRules) -> Conversation:
        """A planned answer's prompts. Raises TemplateRefused."""
        if self._parts is not None:
            return PartsConversation(self._text, self._parts, messages)
        return GenericConversation(self._text, messages, rules)


def messages_of(ask: Ask) -> tuple[Message, ...]:
    """A request's conversation; a bare prompt is one user turn."""
    return ask.messages if ask.prompt is None else (Message("user", ask.prompt),)


class GenericConversation:
    """The turns of one request to a general instruct model."""

    def __init__(self, text: Text, messages: Sequence[Message], rules: PlanRules) -> None:
        """Raises TemplateRefused when the template takes the conversation in no form."""
        self._text, self._messages = text, tuple(messages)
        self._wording = choose_wording(messages[-1].content)
        self._place: TurnSlot | None = find_slot(self._render, text.mark)
        plan = self._place_words(plan_instruction(self._wording, rules))
        probe = self._place_words(branch_instruction(self._wording, SAMPLE_POINT, [SAMPLE_POINT], [], 1))
        cut, end = text.cut(plan, shared_text(plan, probe))
        self._head, self._joint = plan[:cut], plan[cut:end]
        self._known = text.encode(self._head) if self._head else ()
        skeleton, branch = self._tokens(plan), self._tokens(probe)
        self.prefix = skeleton[: shared_length(skeleton, branch, len(self._known))]
        self.skeleton: PromptTurn = turn_from(self.prefix, skeleton, len(self._known))
        self.asked = len(self._tokens(render_chat(text, self._messages)))
        self.behind = len(plan) - (len(self._head) if self._place else 0)

    def branch(
        self, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
    ) -> PromptTurn:
        told = branch_instruction(self._wording, point, points, parents, length)
        return turn_from(self.prefix, self._tokens(self._place_words(told)), len(self._known))

    def _render(self, instruction: str) -> str:
        return render_instructed(self._text, self._messages, instruction)

    def _place_words(self, instruction: str) -> str:
        place = self._place
        return place.fill(self._text.mark(instruction)) if place else self._render(instruction)

    def _tokens(self, rendering: str) -> tuple[int, ...]:
        """The text before the cut is known."""
        cut = len(self._head)
        if self._joint and rendering.startswith(self._joint, cut) and rendering.startswith(self._head):
            return self._known + self._text.encode(rendering[cut:])
        return self._text.encode(rendering)


def render_instructed(text: Text, messages: tuple[Message, ...], instruction: str) -> str:
    """The conversation and then the instruction: a turn of its own, or the end of the last user turn
    for templates that refuse two user turns in a row.
    """
    last = messages[-1]
    joined = Message(last.role, f"{last.content}\n\n{instruction}")
    try:
        return render_chat(text, (*messages, Message("user", instruction)))
    except TemplateRefused:
        return render_chat(text, (*messages[:-1], joined))


def render_chat(text: Text, messages: tuple[Message, ...]) -> str:
    """Plain conversation with the head of the answer; a system turn that the template refuses becomes
    the begin of the first user turn.
    """
    try:
        return text.render(messages)
    except TemplateRefused:
        if len(messages) < 2 or messages[0].role != "system":
            raise
    first = Message(messages[1].role, f"{messages[0].content}\n\n{messages[1].content}")
    return text.render((first, *messages[2:]))


PARTS_FILE = "specsot.json"


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What specsot.json may say. {plan}, {id}, {title}, {length} and {text} are filled in.

    parent_text: how a finished point is quoted after the plan, for a point that builds on it.
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
        _fill_branch(parts, SAMPLE_POINT, [SAMPLE_POINT], [(SAMPLE_POINT, "")], 1)
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
