"""How much a request's skeleton may say, from what was asked.

Pure. Refuses to know what is said.
"""

from __future__ import annotations

from specsot.params import Ask
from specsot.skeleton import MAX_POINTS, PlanRules

# Tokens for "[DIRECT]", its newline and "[END]", spelled byte by byte at worst.
MARKER_TOKENS = 24


def rules_of(ask: Ask) -> PlanRules:
    """What this request's skeleton may be. A plan never has more points than there are tokens for them."""
    return PlanRules(
        direct=ask.mode == "auto",
        tools=ask.tools,
        max_points=min(MAX_POINTS, ask.limits.max_new_tokens),
        plan_tokens=ask.limits.max_skeleton_tokens,
    )


def skeleton_limit(ask: Ask) -> int:
    """Tokens a skeleton's sequence may write; where it may become the answer, as many as the answer may."""
    if ask.mode == "sot" and ask.constraint:
        return ask.limits.max_skeleton_tokens
    return max(ask.limits.max_skeleton_tokens, ask.limits.max_new_tokens + MARKER_TOKENS)
