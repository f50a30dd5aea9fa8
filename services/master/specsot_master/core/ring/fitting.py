"""Whether a ring can hold a request: on arrival, in every later ring, and branch by branch."""

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
    """Return the common beginning of the request's prompts and the pages that the request needs. For a
    planned request every sequence needs it; for a direct answer it may be left out.

    ask: what the client asks for.
    prompt: the request's prompts in tokens.
    ring: sizes and limits of the ring.

    Raises InvalidRequest if the prompt is empty, or if the ring can never hold the request; TooLarge and
    ContextLengthExceeded are such errors.
    """
    if prompt.conversation is not None and prompt.sizes is not None:
        return plan_prefix(prompt.conversation.prefix, prompt.sizes, ask, ring)
    if not prompt.answer:
        raise InvalidRequest("the prompt has no tokens", field="prompt")
    return answer_prefix(prompt.answer, ask, ring)


def fits(request: RequestState, ring: RingState) -> bool:
    """Return True if the ring can hold the request with everything that it has written; False if it is too
    large or the ring cannot serve it at all. The request is not changed.

    request: a request that may have sequences from an earlier ring.
    ring: sizes and limits of the ring, which need not run.
    """
    try:
        _measure(request, ring)
    except InvalidRequest:
        return False
    return True


def refit(request: RequestState, ring: RingState) -> None:
    """Measure a request for the ring that it is to enter: set its `beginning`, and clear its `misfit`.

    request: a request that may have sequences from an earlier ring.
    ring: sizes and limits of the ring.

    Raises TooLarge if only a larger ring could hold the request, or another InvalidRequest.
    """
    request.beginning = _measure(request, ring)
    request.misfit = None


def _measure(request: RequestState, ring: RingState) -> PromptPrefix:
    """Return the beginning of the request's prompts as `prefix_of` does, after checking that the ring can
    also hold every sequence that the request has opened in an earlier ring. A sequence counts with its
    prompt, its limit of tokens and the pages of the prefix that it forks.

    request: a request that may have sequences from an earlier ring.
    ring: sizes and limits of the ring.

    Raises InvalidRequest if the ring cannot hold the request, and TooLarge, which is one, if it cannot hold
    one of its sequences.
    """
    beginning = prefix_of(request.ask, request.prompt, ring)
    for sequence in request.sequences.values():
        turn = request.turn(sequence.ordinal)
        threaded = request.prompt.tags is not None and sequence.ordinal > 0
        forked = turn.shared if threaded else len(beginning.tokens) if beginning.needed else 0
        held = capped_by_policy(beginning.window, pages_for(forked, ring.page_rows), ring)
        _check(request, turn, sequence.log.opening.limit, min(forked, turn.shared), held, ring)
    return beginning


def check_branch_fits(request: RequestState, turn: PromptTurn, budget: int, ring: RingState) -> None:
    """Raise TooLarge if the branch, together with its prefix, can never fit into the ring.

    Return nothing if it can.

    request: the request that opens the branch.
    turn: the prompt of the branch.
    budget: the maximum number of tokens that the branch may decode.
    ring: sizes and limits of the ring.
    """
    held = sum(node.pages for node in request.lineage)
    _check(request, turn, budget, request.shares(turn), held, ring)


def _check(
    request: RequestState, turn: PromptTurn, limit: int, num_shared: int, prefix_pages: int, ring: RingState
) -> None:
    """Check that one sequence can fit into the ring; return nothing if it can. It fits if its prompt and
    limit do not exceed the position limit, and its pages with those of its prefixes do not exceed all pages
    of the ring.

    request: the request of the sequence; its KV policy is used.
    turn: the prompt of the sequence.
    limit: the maximum number of tokens that the sequence may decode.
    num_shared: number of tokens of its prompt that it forks.
    prefix_pages: number of KV pages of the prefixes that it forks.
    ring: sizes and limits of the ring.

    Raises TooLarge if it never can.
    """
    length = len(turn.tokens) + limit
    pages = own_pages(length, num_shared, ring, request.ask.policy) + prefix_pages
    max_positions = position_limit(request.ask, ring)
    if length > max_positions or pages > ring.pages:
        raise TooLarge(
            f"a branch of this plan needs {length} positions in {pages} KV pages; the model has "
            f"{max_positions}, the ring {ring.pages} pages",
            field="max_new_tokens",
        )
