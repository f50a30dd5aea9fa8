"""What whole requests are measured with: how long prompts and points of a plan are beside each other."""

from __future__ import annotations

from collections.abc import Sequence

# Tokens behind the request's own, to plan and to write one of six points whose titles have five words: what
# general instruct models are told, in English, by the demo model's tokenizer.
PLAN_PROMPT, POINT_PROMPT = 221, 94

# Tokens of each point of a plan that the demo model wrote before it was trained further, none of them cut, as
# branch_finished told behind specsot infer --json --mode sot --drafter none "Outline the topic of Business
# Structures and explain each point.": the only one of 29 plans that had six points.
PLANS = ((34, 22, 18, 14, 22, 12),)


def scaled(lengths: Sequence[int], whole: int) -> tuple[int, ...]:
    """The same shares of so many tokens in all."""
    ends = [round(whole * sum(lengths[: place + 1]) / sum(lengths)) for place in range(len(lengths))]
    return tuple(end - before for before, end in zip((0, *ends), ends))
