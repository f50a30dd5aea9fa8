"""Prompts of a model that was never trained to plan: instructions through its own chat template.

Refuses to know which model it is. The prefix is what the tokens of a conversation's whole renderings have in
common; most of it stands before a control token, where text can be cut, and is tokenised once.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsot.params import Message
from specsot.skeleton import PlanRules, Point
from specsot_master.prompts.turns import (
    PromptTurn,
    TurnSlot,
    find_slot,
    shared_length,
    shared_text,
    turn_from,
)
from specsot_master.prompts.wording import branch_instruction, choose_wording, plan_instruction
from specsot_master.text import TemplateRefused, Text

_SAMPLE_POINT = Point(id=1, length=1, title="-")


class GenericConversation:
    """The turns of one request to a general instruct model."""

    def __init__(self, text: Text, messages: Sequence[Message], rules: PlanRules) -> None:
        """Raises TemplateRefused when the template takes the conversation in no form."""
        self._text, self._messages = text, tuple(messages)
        self._wording = choose_wording(messages[-1].content)
        self._place: TurnSlot | None = find_slot(self._render, text.mark)
        plan = self._place_words(plan_instruction(self._wording, rules))
        probe = self._place_words(branch_instruction(self._wording, _SAMPLE_POINT, [_SAMPLE_POINT], [], 1))
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
        """What stands before the cut is known."""
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
