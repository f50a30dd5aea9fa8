"""What a plan may be, by its request's limits: whether there is one, its points, its tokens."""

from __future__ import annotations

from specsot.core.skeleton import MAX_LIST_POINTS, MAX_POINTS, PlanRules
from specsot.errors import InvalidRequest
from specsot.params import Ask, Mode
from specsot_master.core.guards import question_of
from specsot_master.core.router import MIN_PLANNED_TOKENS, points_asked

# What a point takes before it is worth a heading: about 12 tokens for its line of the plan, 8 for the
# heading, and two sentences.
POINT_TOKENS = 64
# The same for a point of a list, which asks for two or three sentences.
LIST_POINT_TOKENS = 128
POLISHED_TOKENS = 4 * POINT_TOKENS  # two points, and as much again
# Tokens of a branch's text, a sentence; points that would get less are left out; not measured.
MIN_BRANCH_TOKENS = 24


def mode_of(ask: Ask) -> Mode:
    """What is done: `auto` does not ask for a plan where two points cannot be afforded."""
    small = ask.mode == "auto" and ask.limits.max_new_tokens < MIN_PLANNED_TOKENS
    return "direct" if small else ask.mode


def check_plan(ask: Ask, listed: bool = False) -> None:
    """Raises InvalidRequest for a forced plan without room for a point, or for tools' labels."""
    if ask.tools and listed and ask.mode == "sot":
        raise InvalidRequest(
            "tools: this model plans in lists, whose points carry none; leave them out, or choose direct",
            field="tools",
        )
    tokens = ask.limits.max_new_tokens
    if ask.polish and tokens < POLISHED_TOKENS:
        raise InvalidRequest(
            f"polish needs max_new_tokens of at least {POLISHED_TOKENS}, got {tokens}: half of what the plan "
            "leaves is kept for the turn that joins the branches",
            field="max_new_tokens",
        )
    if ask.mode == "sot" and tokens < POINT_TOKENS:
        raise InvalidRequest(
            f"mode sot needs max_new_tokens of at least {POINT_TOKENS}, got {tokens}: the plan and its "
            "headings count too; modes auto and direct answer within fewer",
            field="max_new_tokens",
        )


def plan_limit(ask: Ask) -> int:
    """Tokens a plan may take: half of all, so that what is planned can be written."""
    return min(ask.limits.max_skeleton_tokens, max(ask.limits.max_new_tokens // 2, 1))


def rules_of(ask: Ask, listed: bool = False, points: int | None = None) -> PlanRules:
    """What this request's skeleton may be. A plan never has more points than there are tokens for them.

    listed: it is a numbered list; its budget is its sequence's, so that few kinds of rules are compiled.
    points: of a list, for which there is time. So many as are asked for may be shorter.
    """
    tokens = ask.limits.max_new_tokens // (2 if ask.polish else 1)
    if listed:
        asked = points_asked(question_of(ask))
        room = tokens // (POINT_TOKENS if asked else LIST_POINT_TOKENS)
        most = min(room, points or MAX_LIST_POINTS, asked or MAX_LIST_POINTS, MAX_LIST_POINTS)
        return PlanRules(direct=False, max_points=max(2, most), listed=True)
    return PlanRules(
        direct=ask.mode == "auto",
        tools=ask.tools,
        max_points=max(1, min(MAX_POINTS, tokens // POINT_TOKENS)),
        plan_tokens=plan_limit(ask),
    )


def least_of(ask: Ask, budget: int) -> int:
    """What of `min_tokens` a branch of this budget must write; plan and headings, which count like it, have
    their share too.
    """
    return -(-ask.min_tokens * budget // ask.limits.max_new_tokens)


def skeleton_limit(ask: Ask, listed: bool = False) -> int:
    """Tokens a skeleton's sequence may write; where it may become the answer, all there are."""
    plans = listed or (ask.mode == "sot" and ask.constraint)
    return plan_limit(ask) if plans else ask.limits.max_new_tokens
