"""What a model writes around its thoughts, as its chat template shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingStyle:
    """begin, end: around what is thought. behind: what then leads to an answer.
    header: of an answer that calls no tools, whether anything was thought or not.
    """

    begin: str
    end: str
    behind: str
    header: str = ""

    def begun(self, rendering: str) -> bool:
        """Whether a prompt leaves thinking begun."""
        return rendering.rstrip().endswith(self.begin.rstrip())

    def closing(self, thought: str) -> str:
        """From a thought to the answer's header."""
        apart = "\n" if self.begin.endswith("\n") and not thought.endswith("\n") else ""
        return f"{apart}{self.end}{self.behind}"

    def skipped(self, rendering: str) -> str:
        """A prompt that the answer's header follows: templates without a switch leave thinking begun."""
        return f"{rendering.rstrip()}\n\n{self.end}{self.behind}" if self.begun(rendering) else rendering


TAGS = ThinkingStyle("<think>\n", "</think>", "\n\n")  # Qwen, DeepSeek, SmolLM3 and others
CHANNELS = ThinkingStyle(  # Harmony: gpt-oss
    "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
)


def style_of(template: str) -> ThinkingStyle | None:
    """None: nothing in it is about thinking."""
    if "<|channel|>" in template:
        return CHANNELS
    return TAGS if "<think>" in template or TAGS.end in template else None
