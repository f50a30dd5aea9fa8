"""The skeleton language as values: its rules, its points, and the parser of finished text.

Refuses to know tokens (specsot.constraint walks bytes) and prompts.

    output := "[DIRECT]" NL text "[END]"  |  "[PLAN]" NL line{1..16} "[END]"
    line   := ID "." "<" LEN ">" "<" TOOL ">" "[" DEPS "]" TITLE NL
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_POINTS = 16
MAX_TITLE_BYTES = 80


@dataclass(frozen=True, slots=True)
class Point:
    """One line of a plan. `length` is a wish in tokens; `tool` a label; `needs` smaller ids."""

    id: int
    length: int
    title: str
    tool: str | None = None
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanRules:
    """What a skeleton may be, as it travels to the last stage and the drafter.

    direct: whether "[DIRECT]" may be chosen.
    tools:  names that may stand in TOOL besides None.
    plan_tokens: a plan must be complete within this many tokens.
    """

    direct: bool = True
    tools: tuple[str, ...] = ()
    max_points: int = MAX_POINTS
    plan_tokens: int = 512
