"""Whether a ring can hold a request: when it comes, in every ring that follows, branch by branch."""

from __future__ import annotations

from specsot.errors import InvalidRequest, TooLarge
from specsot.params import Ask
from specsot_master.core.plans.prompts import PromptTurn
from specsot_master.core.request import EncodedPrompt, RequestState
from specsot_master.core.ring.admission import (
    PromptPrefix,
    answer_prefix,
    capped_by_policy,
    own_pages,
    pages_for,
    plan_prefix,
    position_limit,
)
from specsot_master.core.ring.ring_state import RingState


def prefix_of(ask: Ask, prompt: EncodedPrompt, ring: RingState) -> PromptPrefix:
    """What its prompts begin with, and the pages they ask for. Raises InvalidRequest."""
    if prompt.conversation is not None and prompt.sizes is not None:
        return plan_prefix(prompt.conversation.prefix, prompt.sizes, ask, ring)
    if not prompt.answer:
        raise InvalidRequest("the prompt has no tokens", field="prompt")
    return answer_prefix(prompt.answer, ask, ring)


def fits(request: RequestState, ring: RingState) -> bool:
    try:
        _measure(request, ring)
    except InvalidRequest:
        return False
    return True


def refit(request: RequestState, ring: RingState) -> None:
    """For a request that enters a ring. Raises InvalidRequest, TooLarge where a larger ring may take it."""
    request.beginning = _measure(request, ring)
    request.misfit = None


def _measure(request: RequestState, ring: RingState) -> PromptPrefix:
    """As `prefix_of`, for one that has met another ring, with all that it is writing."""
    beginning = prefix_of(request.ask, request.prompt, ring)
    for sequence in request.sequences.values():
        turn = request.turn(sequence.ordinal)
        threaded = request.prompt.tags is not None and sequence.ordinal > 0
        forked = turn.shared if threaded else len(beginning.tokens) if beginning.needed else 0
        held = capped_by_policy(beginning.window, pages_for(forked, ring.page_rows), ring)
        _check(request, turn, sequence.log.opening.limit, min(forked, turn.shared), held, ring)
    return beginning


def check_branch_fits(request: RequestState, turn: PromptTurn, budget: int, ring: RingState) -> None:
    """Raises TooLarge when a branch, with the plan before it, can never fit."""
    held = sum(node.pages for node in request.lineage)
    _check(request, turn, budget, request.shares(turn), held, ring)


def _check(
    request: RequestState, turn: PromptTurn, limit: int, shared: int, held: int, ring: RingState
) -> None:
    """One sequence. held: pages of what it forks."""
    length = len(turn.tokens) + limit
    pages = own_pages(length, shared, ring, request.ask.policy) + held
    most = position_limit(request.ask, ring)
    if length > most or pages > ring.pages:
        raise TooLarge(
            f"a branch of this plan needs {length} positions in {pages} KV pages; the model has "
            f"{most}, the ring {ring.pages} pages",
            field="max_new_tokens",
        )
