"""From a request to prompt tokens: the shared prefix, the plan turn, a turn per point, plain chat.

Refuses to know sequences, budgets and the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specsot.params import Ask, Message
from specsot.skeleton import PlanRules
from specsot_master.prompts.generic import GenericConversation, render_chat
from specsot_master.prompts.parts import PartsConversation, read_parts
from specsot_master.prompts.turns import Conversation, PromptTurn
from specsot_master.text import Text

__all__ = ["Conversation", "Prompts", "PromptTurn", "messages_of"]


class Prompts:
    """All prompts of one model: by the parts in its directory, or by instructions for any chat model."""

    def __init__(self, directory: str | Path, text: Text) -> None:
        """Raises ModelError when the directory's specsot.json cannot be used."""
        self._text, self._parts = text, read_parts(Path(directory))

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
