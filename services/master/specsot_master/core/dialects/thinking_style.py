"""The markers that a model writes around its thoughts, as its chat template shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingStyle:
    r"""The markers that a model writes around a thought.

    begin: the text before a thought, such as "<think>\n".
    end: the text after a thought, such as "</think>".
    separator: the text after `end` that leads to the answer; "" for none.
    header: the text before an answer without tool calls, with or without a thought; "" if the style has none.
    """

    begin: str
    end: str
    separator: str
    header: str = ""

    def opens_thought(self, rendering: str) -> bool:
        """Return True if a rendered prompt ends with the beginning of a thought; white space at its end is
        ignored.

        rendering: the prompt as the chat template renders it.
        """
        return rendering.rstrip().endswith(self.begin.rstrip())

    def closing(self, thought: str) -> str:
        """Return the text that leads from the end of a thought to the answer's header.

        thought: the thought as the model has written it, without markers.
        """
        apart = "\n" if self.begin.endswith("\n") and not thought.endswith("\n") else ""
        return f"{apart}{self.end}{self.separator}"

    def skipped(self, rendering: str) -> str:
        r"""Return the rendered prompt without an open thought, so that the answer's header can follow it. A
        thought that a template without a switch has opened is closed at once; a prompt without one is
        returned unchanged.

            "...<think>\n" -> "...<think>\n\n</think>\n\n"

        rendering: the prompt as the chat template renders it.
        """
        return (
            f"{rendering.rstrip()}\n\n{self.end}{self.separator}"
            if self.opens_thought(rendering)
            else rendering
        )


TAGS = ThinkingStyle("<think>\n", "</think>", "\n\n")  # Qwen, DeepSeek, SmolLM3 and others
CHANNELS = ThinkingStyle(  # Harmony: gpt-oss
    "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
)


def style_of(template: str) -> ThinkingStyle | None:
    """Return the style of a chat template, or None if the template has no markers of thoughts. Harmony's
    channels (CHANNELS) come before tags (TAGS), of which one is enough.

    template: the source of the template.
    """
    if "<|channel|>" in template:
        return CHANNELS
    return TAGS if "<think>" in template or TAGS.end in template else None
