"""How a request's tokens are shared by its plan, the headings and the branches, from what was asked.

Pure. Refuses to know what is said. `max_new_tokens` bounds all of it: the plan with its markers, the headings
of the merged answer, every branch with its end token, or the direct answer that the model chose instead.
"""

from __future__ import annotations

from specsot.errors import InvalidRequest
from specsot.params import Ask, Mode
from specsot.skeleton import MAX_POINTS, PlanRules

# What a point takes before it is worth a heading: about 12 tokens for its line of the plan, 8 for the
# heading, and two sentences.
POINT_TOKENS = 64
MIN_PLANNED_TOKENS = 2 * POINT_TOKENS  # a plan of one point is a direct answer with detours
MIN_BRANCH_TOKENS = 24  # tokens of a branch's text, a sentence; points that would get less are left out


def mode_of(ask: Ask) -> Mode:
    """What is done: `auto` does not ask for a plan where two points cannot be afforded."""
    small = ask.mode == "auto" and ask.limits.max_new_tokens < MIN_PLANNED_TOKENS
    return "direct" if small else ask.mode


def check_plan(ask: Ask) -> None:
    """Raises InvalidRequest for a forced plan that could not have one point."""
    tokens = ask.limits.max_new_tokens
    if ask.mode == "sot" and tokens < POINT_TOKENS:
        raise InvalidRequest(
            f"mode sot needs max_new_tokens of at least {POINT_TOKENS}, got {tokens}: the plan and its "
            "headings count too; modes auto and direct answer within fewer",
            field="max_new_tokens",
        )


def plan_limit(ask: Ask) -> int:
    """Tokens a plan may take: half of all, so that what is planned can be written."""
    return min(ask.limits.max_skeleton_tokens, max(ask.limits.max_new_tokens // 2, 1))


def rules_of(ask: Ask) -> PlanRules:
    """What this request's skeleton may be. A plan never has more points than there are tokens for them."""
    return PlanRules(
        direct=ask.mode == "auto",
        tools=ask.tools,
        max_points=max(1, min(MAX_POINTS, ask.limits.max_new_tokens // POINT_TOKENS)),
        plan_tokens=plan_limit(ask),
    )


def skeleton_limit(ask: Ask) -> int:
    """Tokens a skeleton's sequence may write; where it may become the answer, all there are."""
    return plan_limit(ask) if ask.mode == "sot" and ask.constraint else ask.limits.max_new_tokens
