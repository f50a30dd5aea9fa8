"""Prompts of a model that was never trained to plan: instructions through its own chat template.

Refuses to know which model it is. Whole conversations are rendered and tokenised; the prefix is what
their tokens have in common.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsot.params import Message
from specsot.skeleton import PlanRules, Point
from specsot_master.prompts.turns import Turn, shared_length, turn_from
from specsot_master.prompts.wording import choose_wording, tell_to_plan, tell_to_write
from specsot_master.text import TemplateRefused, Text

_PROBE = Point(id=1, length=1, title="-")


class GenericConversation:
    """The turns of one request to a general instruct model."""

    def __init__(self, text: Text, messages: Sequence[Message], rules: PlanRules) -> None:
        """Raises TemplateRefused when the template takes the conversation in no form."""
        self._text, self._messages = text, tuple(messages)
        self._wording = choose_wording(messages[-1].content)
        skeleton = self._tokens(tell_to_plan(self._wording, rules))
        probe = self._tokens(tell_to_write(self._wording, _PROBE, [_PROBE], [], 1))
        self.prefix = skeleton[: shared_length(skeleton, probe)]
        self.skeleton: Turn = turn_from(self.prefix, skeleton)
        self.asked = len(text.encode(render_chat(text, self._messages)))

    def branch(
        self, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
    ) -> Turn:
        told = tell_to_write(self._wording, point, points, parents, length)
        return turn_from(self.prefix, self._tokens(told))

    def _tokens(self, instruction: str) -> tuple[int, ...]:
        return self._text.encode(render_instructed(self._text, self._messages, instruction))


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
