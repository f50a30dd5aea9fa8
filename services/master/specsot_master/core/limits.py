"""Bounds of what a client may ask for, and how a plan's tokens are divided between its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from specsot.core.skeleton import MAX_LIST_POINTS, MAX_POINTS, PlanRules, Point
from specsot.errors import InvalidRequest
from specsot.params import MAX_TOKEN_CHARACTERS, Ask, Mode
from specsot_master.core.plans.router import MIN_PLANNED_TOKENS, points_asked, question_of
from specsot_master.core.plans.wording import Language, language_of

# The roles that messages may have.
ROLES = ("system", "user", "assistant", "tool")
# Characters. Bounds each stop string of a request. Untuned.
MAX_STOP_CHARACTERS = 256
# Characters. Bounds the request id that a client may choose. Untuned.
MAX_ID_CHARACTERS = 128

# Tokens. The fewest for which a point is worth a heading: about 12 tokens for the point's line of the plan, 8
# for its heading, and two sentences.
POINT_TOKENS = 64
# Points. The maximum number of points of a plan that aims at the length of a direct answer, unless the
# client asks for more. Chosen by reading answers of Qwen2.5-Coder-1.5B-Instruct: with seven points, most
# of them had a single general sentence.
USUAL_POINTS: Final = 6
# Points. The maximum number of points of any other list, unless the client asks for more: as many branches as
# a request runs at once by default.
MAX_UNASKED_POINTS: Final = 8
# Tokens. The maximum number of tokens of such a plan in English. Given by the aim of the feature.
USUAL_PLAN_TOKENS: Final = 45
# Tokens. What each of the points that the client asks for may take of such a plan in English. Untuned: titles
# of six words have 8 to 11 tokens with their number.
LINE_TOKENS: Final = 12
# Ratio. How many times as many tokens the same number of words has as in English. Chosen by measurement: in
# direct answers of Qwen2.5-Coder-1.5B-Instruct, a word has 1.2 tokens in English, 1.5 in Spanish and 1.9 in
# German. Chinese by reading: with 54 tokens, the last of five titles was cut.
WORD_LENGTHS: Final[Mapping[Language, float]] = {"en": 1.0, "zh": 1.4, "es": 1.25, "de": 1.5}
# Tokens. The fewest and the most that a point of such a plan aims at. Untuned.
MIN_AIM, MAX_AIM = 24, 80
# Tokens. About how many the closing of such a plan has, which is one sentence. Chosen by measurement: of 34
# plans of Qwen2.5-Coder-1.5B-Instruct, 24 have a closing of 9 to 38 tokens; with 0 for the others, it has 15
# on average.
CLOSING_AIM = 15
# Things. The number of things that a direct answer of the usual length names. Chosen by measurement: the
# lists of 41 direct answers of Qwen2.5-Coder-1.5B-Instruct have from 4 to 18 items, 8 in the median.
USUAL_THINGS: Final = 8
# Tokens. The fewest for which a point of a list plan is worth a heading, as POINT_TOKENS is for other plans:
# the prompt of such a point asks for two or three sentences.
LIST_POINT_TOKENS = 75
# Tokens. The fewest for which an answer can be polished: two points, and as many tokens again for the turn
# that rewrites them.
POLISHED_TOKENS = 4 * POINT_TOKENS
# Tokens. The fewest for the text of a branch, about one sentence. Points that would get less are left out.
# Untuned.
MIN_BRANCH_TOKENS = 24
# Fraction of a long branch's limit, or of its aim, from which on the branch ends after a sentence. Given by
# the aim of the feature; untuned.
SOFT_END_FROM: Final = 0.85
# Fraction of a branch's aim that the branch has at most. Given by the aim of the feature.
LONGEST_BRANCH: Final = 1.5
# Tokens. Room for a sentence that started before the soft limit. The longest sentence of 46 branches by
# Qwen2.5-Coder-1.5B, in four languages, has 35 tokens.
SENTENCE_TOKENS: Final = 40
# Tokens. Room for the first sentence of a branch, which is never left out. Chosen by reading: in German and
# Spanish, first sentences of more than 48 tokens were cut.
FIRST_SENTENCE_TOKENS: Final = 96


def soft_limit(limit: int, aim: int | None = None) -> int:
    """Return the number of tokens from which on a branch ends after a sentence, a list or a block. The result
    is at least half the limit, unless the aim gives less.

    A sentence has room between the soft and the hard limit, unless that leaves less than half of the branch:

        limit 400 -> 340 (85 %)    limit 100 -> 60 (a sentence before the end)    limit 50 -> 25 (half)
        limit 400, aim 60 -> 51 (85 % of the aim)

    limit: the maximum number of tokens that the client's limit leaves to the branch, at least 1.
    aim: how many tokens the branch should have, about; None for as many as the model writes.
    """
    soft = max(min(int(SOFT_END_FROM * limit), limit - SENTENCE_TOKENS), limit // 2)
    return soft if aim is None else min(soft, int(SOFT_END_FROM * aim))


def longest_branch(aim: int) -> int:
    """Return the number of tokens at which a branch with a whole sentence ends, without the sentence that it
    has begun. A sentence that was begun before the soft limit has room for SENTENCE_TOKENS tokens.

        aim 80 -> 120    aim 30 -> 65 (25 + 40)

    aim: how many tokens the branch should have, about.
    """
    return max(int(LONGEST_BRANCH * aim), int(SOFT_END_FROM * aim) + SENTENCE_TOKENS)


def hard_limit(limit: int, aim: int | None) -> int:
    """Return the maximum number of tokens that a branch may decode.

        limit 400 -> 400    limit 400, aim 32 -> 96    limit 400, aim 80 -> 120    limit 70, aim 80 -> 70

    limit: the maximum number of tokens that the client's limit leaves to the branch.
    aim: how many tokens the branch should have, about; None for as many as the model writes.
    """
    return limit if aim is None else min(limit, max(longest_branch(aim), FIRST_SENTENCE_TOKENS))


def prompt_characters(ask: Ask) -> int:
    """Return the number of characters of the prompt and all messages; 0 for a prompt in tokens.

    ask: what the client asks for.
    """
    return len(ask.prompt or "") + sum(len(message.content) for message in ask.messages)


def check_sizes(ask: Ask, request_id: str | None, max_positions: int) -> None:
    """Check everything that can be refused without tokenising the prompt: sizes, and the roles of messages.
    The prompt in tokens must be shorter than the context; characters of the prompt and messages may be
    MAX_TOKEN_CHARACTERS per position; stop strings and the id have bounds of their own; the roles of messages
    are those of ROLES.

    Return nothing if the request passes.

    ask: what the client asks for.
    request_id: the id that the client chose, or None.
    max_positions: the model's context, in tokens.

    Raises InvalidRequest that names the first wrong field.
    """
    size = prompt_characters(ask)
    tokens = len(ask.tokens)
    stops = all(len(one) <= MAX_STOP_CHARACTERS for one in ask.stop)
    rules = (
        (tokens < max_positions, "tokens", f"{tokens} tokens cannot fit the context"),
        (size <= MAX_TOKEN_CHARACTERS * max_positions, "prompt", f"{size} characters cannot fit the context"),
        (all(one.role in ROLES for one in ask.messages), "messages", f"roles are {', '.join(ROLES)}"),
        (stops, "stop", f"at most {MAX_STOP_CHARACTERS} characters"),
        (len(request_id or "") <= MAX_ID_CHARACTERS, "request_id", f"at most {MAX_ID_CHARACTERS} characters"),
    )
    for holds, field, rule in rules:
        if not holds:
            raise InvalidRequest(f"{field}: {rule}", field=field)


def check_drafter(ask: Ask, drafters: Sequence[str]) -> None:
    """Raise InvalidRequest if the client named a drafter that the fleet does not have. The message lists
    those it has. A request without a drafter, or with "none", passes. The drafter "none" stands for no
    drafts.

    ask: what the client asks for.
    drafters: the drafters that a client may name.
    """
    known_names = (*drafters, "none")
    if ask.drafter is not None and ask.drafter not in known_names:
        raise InvalidRequest(
            f"drafter {ask.drafter} is not in this fleet, which has {', '.join(known_names)}", field="drafter"
        )


def check_tokens(ask: Ask, vocabulary: int) -> None:
    """Raise InvalidRequest if the request names a token id outside the vocabulary, in its prompt, its biases
    or its stop tokens. The first wrong field is named, in the order logit_bias, tokens, stop_token_ids.

    Return nothing if the request passes; a request that names no token always does.

    ask: what the client asks for.
    vocabulary: the number of token ids that the model has; ids count from 0.
    """
    biased = [token for token, _ in ask.sampling.logit_bias]
    named = {"logit_bias": biased, "tokens": ask.tokens, "stop_token_ids": ask.stop_token_ids}
    for field, tokens in named.items():
        if (last := max(tokens, default=0)) >= vocabulary:
            raise InvalidRequest(
                f"{field} names token {last}, the model's are 0 .. {vocabulary - 1}", field=field
            )


def mode_of(ask: Ask) -> Mode:
    """Return the request's mode. `auto` becomes `direct` if the token limit is too small for two points.

    ask: what the client asks for.
    """
    small = ask.mode == "auto" and ask.limits.new_tokens < MIN_PLANNED_TOKENS
    return "direct" if small else ask.mode


def check_plan(ask: Ask, plans_in_lists: bool = False) -> None:
    """Check that a plan can be written; return nothing if it can, or if none is asked for. Raises
    InvalidRequest in three cases:

    mode sot offers tools to a model that plans in lists, whose points cannot name a tool;
    mode sot has a token limit below POINT_TOKENS, so that not even one point fits;
    polish is set, in any mode, with a token limit below POLISHED_TOKENS.

    ask: what the client asks for.
    plans_in_lists: True if the model plans in a numbered list.
    """
    if ask.tools and plans_in_lists and ask.mode == "sot":
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
    """Return the maximum number of tokens that the plan itself may take: at most half of the request's
    tokens, so that the rest can be written.

    ask: what the client asks for; its limits are used.
    """
    return min(ask.limits.max_skeleton_tokens, max(ask.limits.new_tokens // 2, 1))


def rules_of(
    ask: Ask, listed: bool = False, points: int | None = None, speculates: bool = False
) -> PlanRules:
    """Return what this request's skeleton may contain. A plan has no more points than the token limit can pay
    for, at least two in a list and at least one in markers. A list has as many points as the question asks
    for, at most MAX_LIST_POINTS; if it asks for no number, at most MAX_UNASKED_POINTS, and with `speculates`
    at most USUAL_POINTS. A plan in markers has at most MAX_POINTS. `polish` halves
    the tokens that points may use. In markers the model may answer directly in mode auto only.

    ask: what the client asks for; its limits, mode, tools and question are used.
    listed: True if the model plans in a numbered list. The rules of a list carry no token budget (the limit
        of the sequence bounds the plan), so that few different grammars are compiled.
    points: the maximum number of points of a list that the client's time limit allows, or None for no such
        limit; two are always allowed. If the client asked for a number of points, each may be shorter than
        usual.
    speculates: True if the plan aims at the length of a direct answer, so that it has few points unless the
        client asked for a number.
    """
    tokens = ask.limits.new_tokens // (2 if ask.polish else 1)
    if listed:
        question = question_of(ask)
        asked = points_asked(question)
        room = tokens // (POINT_TOKENS if asked else LIST_POINT_TOKENS)
        usual = USUAL_POINTS if speculates else MAX_UNASKED_POINTS
        list_points = min(room, points or MAX_LIST_POINTS, asked or usual, MAX_LIST_POINTS)
        return PlanRules(direct=False, max_points=max(2, list_points), listed=True)
    return PlanRules(
        direct=ask.mode == "auto",
        tools=ask.tools,
        max_points=max(1, min(MAX_POINTS, tokens // POINT_TOKENS)),
        plan_tokens=plan_limit(ask),
    )


def limited(ask: Ask, max_tokens: int) -> Ask:
    """Return the request with another `max_new_tokens`.

    ask: what the client asks for, which stays unchanged.
    max_tokens: the maximum number of tokens that may be written for the request.
    """
    return replace(ask, limits=replace(ask.limits, max_new_tokens=max_tokens))


def least_of(ask: Ask, budget: int) -> int:
    """Return the share of `min_tokens` that a branch must write, in tokens, rounded up. The share is
    proportional to the branch's budget. The plan and the headings count toward `min_tokens` with their own
    shares.

        min_tokens 100, max_new_tokens 400, budget 90 -> ceil(100 * 90 / 400) = 23

    ask: what the client asks for.
    budget: the maximum number of tokens that the branch may decode.
    """
    return -(-ask.min_tokens * budget // ask.limits.new_tokens)


def length_of_things(usual: int, count: int | None) -> int:
    """Return how many tokens an answer should have that names a number of things: as many for each of them as
    an answer of the usual length has, which names USUAL_THINGS.

        usual 280, 5 things -> 175;   usual 280, 10 things -> 350;   usual 280, None -> 280

    usual: the usual number of tokens of a direct answer.
    count: the number of things that the answer is to name, or None if that is not known; the result is then
        `usual`.
    """
    return usual if count is None else usual * count // USUAL_THINGS


def aim_of(answer_tokens: int, points: int, others: int) -> int:
    """Return how many tokens each point should have so that the answer has a certain length: at least MIN_AIM
    and at most MAX_AIM.

        answer of 320 tokens, 6 points, 110 for the others -> 35

    answer_tokens: number of tokens of the whole answer.
    points: the number of points, at least 1.
    others: number of tokens of the introduction, the headings and the closing.
    """
    return max(MIN_AIM, min((answer_tokens - others) // points, MAX_AIM))


def skeleton_limit(ask: Ask, listed: bool = False, speculates: bool = False) -> int:
    """Return the maximum number of tokens that the skeleton's sequence may decode. If the skeleton may turn
    out to be the answer itself, that is all of the request's tokens. A skeleton in markers is all plan only
    in mode sot, if its grammar is enforced. A speculative plan gets LINE_TOKENS for each point that the
    question asks for, at least USUAL_PLAN_TOKENS, times WORD_LENGTHS of the question's language, and at most
    `plan_limit`.

    ask: what the client asks for; its limits and mode are used.
    listed: True if the model plans in a numbered list, which is never the answer itself.
    speculates: True if the plan aims at the length of a direct answer, so that it is short.
    """
    if speculates:
        question = question_of(ask)
        lines = min(points_asked(question) or 0, rules_of(ask, listed, speculates=True).max_points)
        tokens = max(USUAL_PLAN_TOKENS, LINE_TOKENS * lines) * WORD_LENGTHS[language_of(question)]
        return min(plan_limit(ask), int(tokens))
    plans = listed or (ask.mode == "sot" and ask.constraint)
    return plan_limit(ask) if plans else ask.limits.new_tokens


@dataclass(frozen=True, slots=True)
class BudgetShares:
    """How the tokens of a plan are divided between its headings and its branches.

    points: the points that are written, the first ones of the plan.
    headings: tokens of each point's heading, by point id; a point without an entry has no heading.
    budgets: the maximum number of tokens that each branch may decode, by point id.
    """

    points: tuple[Point, ...]
    headings: Mapping[int, int]
    budgets: Mapping[int, int]


def share_out(
    points: Sequence[Point],
    headings: Mapping[int, int],
    total: int,
    min_text_tokens: int,
    max_branch_tokens: int | None = None,
) -> BudgetShares:
    """Divide tokens between the points of a plan; points for which there are too few tokens are left out.

    Keeps as many first points as get at least `min_text_tokens` tokens of text in addition to their headings,
    but at least one point. If one point is left and its heading leaves less than `min_text_tokens`, the
    heading is dropped, and its tokens go to the text.

    points: the points of the plan, at least one.
    headings: tokens of each point's heading, by point id.
    total: number of tokens for all headings and budgets together; greater than 0.
    min_text_tokens: the minimum number of tokens for the text of a point.
    max_branch_tokens: the maximum number of tokens of one branch, or None for no such bound.
    """
    written_points = tuple(points[: max(_affordable(points, headings, total, min_text_tokens), 1)])
    spent = sum(headings[point.id] for point in written_points)
    # Only one point is left, and its title is too long for the remaining tokens.
    if total - spent < min(min_text_tokens, total):
        return BudgetShares(written_points, {}, split_budget(written_points, total, max_branch_tokens))
    kept_headings = {point.id: headings[point.id] for point in written_points}
    return BudgetShares(
        written_points,
        kept_headings,
        split_budget(written_points, total - spent, max_branch_tokens, min_text_tokens),
    )


def split_budget(
    points: Sequence[Point], total: int, max_share: int | None = None, min_share: int = 1
) -> dict[int, int]:
    """Return the tokens of each branch, by point id. A point that asks for no length, 0 or less, counts as 1.
    Equal remainders are served by ascending point id.

    Tokens are divided in proportion to the wished lengths; tokens left by rounding go to the largest
    remainders. The sum is at most `total`.

        lengths {1: 10, 2: 30}, total 9              -> {1: 2, 2: 7}  (2.25 and 6.75)
        lengths {1: 10, 2: 30}, total 9, min_share 4 -> {1: 4, 2: 5}  (point 1 is raised)

    points: the points that are written, at least one.
    total: number of tokens for all branches together, at least len(points).
    max_share: the maximum number of tokens of one branch, or None for no such bound; tokens beyond it are
        given to no other branch.
    min_share: the minimum number of tokens of one branch; if there are too few tokens for that, an equal part
        is the minimum.
    """
    min_share = min(min_share, total // len(points))
    weights = {point.id: max(point.length, 1) for point in points}
    shares = dict.fromkeys(weights, min_share)
    rest = total
    while low := {id for id, weight in weights.items() if rest * weight < min_share * sum(weights.values())}:
        rest -= min_share * len(low)
        weights = {id: weight for id, weight in weights.items() if id not in low}
    total_weight = sum(weights.values())
    shares |= {id: rest * weight // total_weight for id, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda id: (-(rest * weights[id] % total_weight), id))
    for id in by_remainder[: total - sum(shares.values())]:
        shares[id] += 1
    return shares if max_share is None else {id: min(share, max_share) for id, share in shares.items()}


def _affordable(
    points: Sequence[Point], headings: Mapping[int, int], total: int, min_text_tokens: int
) -> int:
    """Return how many of the first points have room for their headings and their text; 0 if not even the
    first one has. The points are counted in order up to the first for which the tokens do not suffice.

    points: the points of the plan.
    headings: tokens of each point's heading, by point id.
    total: number of tokens for all headings and texts together.
    min_text_tokens: the minimum number of tokens for the text of a point.
    """
    count = 0
    for point in points:
        total -= headings[point.id] + min_text_tokens
        if total < 0:
            break
        count += 1
    return count
