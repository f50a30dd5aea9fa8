"""What may be asked, and what a plan may be: its points, its tokens, and their shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specsot.core.skeleton import MAX_LIST_POINTS, MAX_POINTS, PlanRules, Point
from specsot.errors import InvalidRequest
from specsot.params import LONGEST_TOKEN, Ask, Mode
from specsot_master.core.plans.guards import question_of
from specsot_master.core.plans.router import MIN_PLANNED_TOKENS, points_asked

ROLES = ("system", "user", "assistant", "tool")
# Characters of a stop string and of a request id; bounds a request.
MAX_STOP_CHARACTERS = 256
MAX_ID_CHARACTERS = 128

# What a point takes before it is worth a heading: about 12 tokens for its line of the plan, 8 for the
# heading, and two sentences.
POINT_TOKENS = 64
# The same for a point of a list, which asks for two or three sentences.
LIST_POINT_TOKENS = 75
POLISHED_TOKENS = 4 * POINT_TOKENS  # two points, and as much again
# Tokens of a branch's text, a sentence; points that would get less are left out; not measured.
MIN_BRANCH_TOKENS = 24


def prompt_characters(ask: Ask) -> int:
    return len(ask.prompt or "") + sum(len(message.content) for message in ask.messages)


def check_sizes(ask: Ask, id: str | None, max_positions: int) -> None:
    """Raises InvalidRequest for what is too long to even look at, and for roles no template knows."""
    size = prompt_characters(ask)
    tokens = len(ask.tokens)
    stops = all(len(one) <= MAX_STOP_CHARACTERS for one in ask.stop)
    rules = (
        (tokens < max_positions, "tokens", f"{tokens} tokens cannot fit the context"),
        (size <= LONGEST_TOKEN * max_positions, "prompt", f"{size} characters cannot fit the context"),
        (all(one.role in ROLES for one in ask.messages), "messages", f"roles are {', '.join(ROLES)}"),
        (stops, "stop", f"at most {MAX_STOP_CHARACTERS} characters"),
        (len(id or "") <= MAX_ID_CHARACTERS, "request_id", f"at most {MAX_ID_CHARACTERS} characters"),
    )
    for holds, field, rule in rules:
        if not holds:
            raise InvalidRequest(f"{field}: {rule}", field=field)


def check_drafter(ask: Ask, drafters: Sequence[str]) -> None:
    """Raises InvalidRequest, naming whom the fleet has, for one that it has not."""
    here = (*drafters, "none")
    if ask.drafter is not None and ask.drafter not in here:
        raise InvalidRequest(
            f"drafter {ask.drafter} is not in this fleet, which has {', '.join(here)}", field="drafter"
        )


def check_tokens(ask: Ask, vocabulary: int) -> None:
    """Raises InvalidRequest for a token the model does not have."""
    biased = [token for token, _ in ask.sampling.logit_bias]
    named = {"logit_bias": biased, "tokens": ask.tokens, "stop_token_ids": ask.stop_token_ids}
    for field, tokens in named.items():
        if (last := max(tokens, default=0)) >= vocabulary:
            raise InvalidRequest(
                f"{field} names token {last}, the model's are 0 .. {vocabulary - 1}", field=field
            )


def mode_of(ask: Ask) -> Mode:
    """What is done: `auto` does not ask for a plan where two points cannot be afforded."""
    small = ask.mode == "auto" and ask.limits.new_tokens < MIN_PLANNED_TOKENS
    return "direct" if small else ask.mode


def check_plan(ask: Ask, listed: bool = False) -> None:
    """Raises InvalidRequest for a forced plan without room for a point, or for tools' labels."""
    if ask.tools and listed and ask.mode == "sot":
        raise InvalidRequest(
            "tools: this model plans in lists, whose points carry none; leave them out, or choose direct",
            field="tools",
        )
    tokens = ask.limits.new_tokens
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
    return min(ask.limits.max_skeleton_tokens, max(ask.limits.new_tokens // 2, 1))


def rules_of(ask: Ask, listed: bool = False, points: int | None = None) -> PlanRules:
    """What this request's skeleton may be. A plan never has more points than there are tokens for them.

    listed: it is a numbered list; its budget is its sequence's, so that few kinds of rules are compiled.
    points: of a list, for which there is time. So many as are asked for may be shorter.
    """
    tokens = ask.limits.new_tokens // (2 if ask.polish else 1)
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


def limited(ask: Ask, tokens: int) -> Ask:
    return replace(ask, limits=replace(ask.limits, max_new_tokens=tokens))


def least_of(ask: Ask, budget: int) -> int:
    """What of `min_tokens` a branch of this budget must write; plan and headings, which count like it, have
    their share too.
    """
    return -(-ask.min_tokens * budget // ask.limits.new_tokens)


def skeleton_limit(ask: Ask, listed: bool = False) -> int:
    """Tokens a skeleton's sequence may write; where it may become the answer, all there are."""
    plans = listed or (ask.mode == "sot" and ask.constraint)
    return plan_limit(ask) if plans else ask.limits.new_tokens


@dataclass(frozen=True, slots=True)
class BudgetShares:
    """points: those that are written, the plan's first ones. headings: the tokens of each; a point that is
    not named has none. budgets: tokens of each branch.
    """

    points: tuple[Point, ...]
    headings: Mapping[int, int]
    budgets: Mapping[int, int]


def share_out(
    points: Sequence[Point], headings: Mapping[int, int], total: int, least: int, cap: int | None = None
) -> BudgetShares:
    """As many points as get `least` tokens of text beside their headings, at least one.

    headings: tokens of each point's heading. Headings and budgets together are at most `total`, which is > 0.
    """
    kept = tuple(points[: max(_affordable(points, headings, total, least), 1)])
    spent = sum(headings[point.id] for point in kept)
    if total - spent < min(least, total):  # one point, and a title too long for what is left
        return BudgetShares(kept, {}, split_budget(kept, total, cap))
    told = {point.id: headings[point.id] for point in kept}
    return BudgetShares(kept, told, split_budget(kept, total - spent, cap, least))


def split_budget(
    points: Sequence[Point], total: int, cap: int | None = None, least: int = 1
) -> dict[int, int]:
    """Tokens for each point id: pro rata wished length by largest remainders, at least `least` where there
    is as much for everybody, at most `cap`. The sum is at most `total`; it needs total >= len(points).
    """
    least = min(least, total // len(points))
    weights = {point.id: max(point.length, 1) for point in points}
    shares = dict.fromkeys(weights, least)
    rest = total
    while low := {id for id, weight in weights.items() if rest * weight < least * sum(weights.values())}:
        rest -= least * len(low)
        weights = {id: weight for id, weight in weights.items() if id not in low}
    whole = sum(weights.values())
    shares |= {id: rest * weight // whole for id, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda id: (-(rest * weights[id] % whole), id))
    for id in by_remainder[: total - sum(shares.values())]:
        shares[id] += 1
    return shares if cap is None else {id: min(share, cap) for id, share in shares.items()}


def _affordable(points: Sequence[Point], headings: Mapping[int, int], total: int, least: int) -> int:
    """How many of the first points have room for their headings and `least` tokens each."""
    count = 0
    for point in points:
        total -= headings[point.id] + least
        if total < 0:
            break
        count += 1
    return count
