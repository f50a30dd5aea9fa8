"""Admission by KV pages: which request may enter the ring, and which branch may be added.

Every stage has its own page allocator. This mirror guarantees that no allocator ever runs out, so that every
sequence that was opened can be decoded to its limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from specsot.core.cost_curve import CostCurve
from specsot.core.pages import Policy, max_held_pages
from specsot.core.skeleton import MAX_TITLE_BYTES
from specsot.errors import ContextLengthExceeded, InvalidRequest, TooLarge
from specsot.members import Curve
from specsot.params import MAX_TOKENS, Ask, Window
from specsot_master.core.limits import plan_limit, skeleton_limit
from specsot_master.core.ring.prefix_tree import PrefixMatch
from specsot_master.core.ring.ring_state import RingState

# Tokens. A sequence that could compute its whole prompt itself forks a cached prefix only if they share at
# least this many. Untuned.
MIN_SHARED_TOKENS = 16
# Tokens. A prefix that no sequence has to wait for is opened only if it adds at least this many, and more
# where a step takes about as long for many tokens as for one (`min_prefix_tokens`). A beginning that all
# sequences of a request wait for forks a cached prefix only if they share at least this many. Untuned.
MIN_PREFIX_TOKENS = 32


def min_prefix_tokens(ring: RingState) -> int:
    """Return how many tokens a prefix must add to be worth a step of its own, which the first token of the
    request waits for. At least MIN_PREFIX_TOKENS, and otherwise at most `ring.rows`.

    Computing the tokens again for a later request must take at least as long as that further step. So a step
    of so many tokens must take at least twice as long as a step of one token. By the recorded curves of three
    GPUs these are 224 to 288 tokens.

        step of 1 token 1.2 ms, of 256 tokens 2.2 ms, of 512 tokens 3.0 ms -> 320 tokens (2.4 ms)

    ring: sizes and limits of the ring. MIN_PREFIX_TOKENS is returned if a stage computes on a CPU, and
        without a measured curve. Most CPUs compute no more tokens in that time, and where other work
        disturbed the measurement, computing a few hundred tokens again would take seconds.
    """
    return _min_prefix_tokens(ring.curve, ring.rows) if ring.on_gpus else MIN_PREFIX_TOKENS


@lru_cache(maxsize=8)
def _min_prefix_tokens(curve: Curve, most: int) -> int:
    """Return the result of `min_prefix_tokens`: a multiple of MIN_PREFIX_TOKENS, or `most`.

    curve: (tokens, seconds) of a step. MIN_PREFIX_TOKENS is returned for an empty curve.
    most: the result if no smaller number of tokens is worth a step; MIN_PREFIX_TOKENS if that is larger.
    """
    step = CostCurve(curve)
    sizes = range(MIN_PREFIX_TOKENS, most, MIN_PREFIX_TOKENS)
    worth = (tokens for tokens in sizes if step.at(tokens) >= 2 * step.at(1))
    return next(worth, max(most, MIN_PREFIX_TOKENS))


def pages_for(num_slots: int, slots_per_page: int) -> int:
    """Return the pages that so many KV slots take: the quotient rounded up; 0 for no slots.

    num_slots: KV slots, one per token.
    slots_per_page: KV slots of one page.
    """
    return -(-num_slots // slots_per_page)


def own_pages(length: int, shared: int, ring: RingState, policy: Policy | None = None) -> int:
    """Return the pages that a decoding sequence needs for itself, without those that it shares with its
    prefix.

    With page_rows 64, ring.slots 10, no drafter: length 250, shared 100 -> ceil(260 / 64) - 100 // 64 = 5 - 1
    = 4. The second page of the prefix is shared only in part, so it is copied.

    length: the maximum number of tokens that the sequence may have, prompt included.
    shared: number of tokens that the sequence forks from its prefix; 0 if it forks none.
    policy: the sequence's KV policy (window or pruning), which bounds the pages it ever holds; None for no
        such bound. Shared pages do not lower that bound, because under a window the sequence may come to own
        copies of them.
    ring: sizes and limits of the ring.
    """
    return capped_by_policy(
        policy, pages_for(length + ring.slots, ring.page_rows) - shared_pages(shared, ring), ring
    )


def capped_by_policy(policy: Policy | None, pages: int, ring: RingState) -> int:
    """Return `pages`, or the maximum number of pages that a sequence with this policy ever holds if that is
    less.

    policy: the sequence's KV policy (window or pruning); None holds every page.
    pages: number of pages that the sequence would need without a policy.
    ring: sizes and limits of the ring.
    """
    max_pages = max_held_pages(policy, ring.rows, ring.page_rows)
    return pages if max_pages is None else min(pages, max_pages)


def shared_pages(num_shared: int, ring: RingState) -> int:
    """Return the full pages that a fork shares with its prefix. A page that is shared only in part is copied.

    With a drafter, one row less counts as shared. The stages do share all rows; but the drafter pairs the
    feature of each token with the token after it, so its last row of the prefix depends on the first token of
    the fork, and its own table shares one row less. The ledger uses the smaller number for all members.

        page_rows 64: shared 128 -> 2 pages, with a drafter (128 - 1) // 64 = 1 page

    num_shared: number of tokens that the sequence forks from its prefix; 0 if it forks nothing.
    ring: sizes and limits of the ring.
    """
    return max(num_shared - ring.has_drafter, 0) // ring.page_rows


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """Prompt lengths of a planned request, in tokens.

    prefix: number of tokens that all prompts of the request begin with.
    skeleton: number of tokens of the skeleton's prompt.
    turn: number of tokens of a branch's turn alone, without the plan and the texts of the points it needs.
    answer: number of tokens of the prompt of the direct answer that may follow an unusable plan; 0 if the
        skeleton's sequence itself may become the answer.
    speculates: True if the skeleton and the direct answer are decoded at the same time.
    """

    prefix: int
    skeleton: int
    turn: int
    answer: int = 0
    speculates: bool = False


def grant_answer(prompt_length: int, ask: Ask, ring: RingState) -> int:
    """Return the KV pages that a direct answer needs at most. The answer may take the prompt and all of
    `max_new_tokens`.

    prompt_length: number of tokens of the prompt.
    ask: what the client asks for; its limits and KV policy are used.
    ring: sizes and limits of the ring.

    Raises InvalidRequest if the ring can never hold the answer: ContextLengthExceeded if it exceeds the
    model's context, TooLarge if the ring has too few pages, and InvalidRequest itself if the window does not
    fit the model.
    """
    length = prompt_length + ask.limits.new_tokens
    _check_context(prompt_length, length, ask, ring)
    return _check_memory(own_pages(length, 0, ring, ask.policy), ring)


def grant_plan(sizes: PlanSizes, ask: Ask, ring: RingState) -> int:
    """Return the base grant of a planned request, without the pages of its prefix: the pages with which the
    request can always continue. The grant is bounded by the model's positions and by all pages of the ring.

    The grant is the larger of two: the pages of the first sequence (the skeleton, or the direct answer that
    follows an unusable plan), and those of the largest possible branch. The plan, the texts of the points
    that a branch needs, and the branch itself share one `max_new_tokens`; the titles of the plan appear in
    the branch's prompt a second time.

    sizes: lengths of the request's prompts, in tokens.
    ask: what the client asks for; its limits and KV policy are used.
    ring: sizes and limits of the ring.

    Raises InvalidRequest if the ring can never hold the request: ContextLengthExceeded if a prompt with its
    tokens exceeds the model's context, TooLarge if the ring has too few pages for the skeleton, and
    InvalidRequest itself if the window does not fit the model.
    """
    skeleton = max(sizes.skeleton + skeleton_limit(ask), sizes.answer + ask.limits.new_tokens)
    branch = sizes.prefix + sizes.turn + ask.limits.new_tokens
    _check_context(sizes.skeleton, max(skeleton, branch), ask, ring)
    prefix = capped_by_policy(ask.policy, pages_for(sizes.prefix, ring.page_rows), ring)
    first = _check_memory(prefix + own_pages(skeleton, sizes.prefix, ring, ask.policy), ring)
    plan = plan_limit(ask) + MAX_TITLE_BYTES
    largest = min(branch + plan, position_limit(ask, ring))
    return max(first, min(prefix + own_pages(largest, sizes.prefix, ring, ask.policy), ring.pages)) - prefix


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The common beginning of a request's prompts, and what the request needs in addition.

    tokens: the common beginning; empty if nothing is shared.
    needed: True if every sequence of the request forks the whole beginning.
    grants: returns, for the number of its tokens that are forked, the pages of what the request decodes.
    plan: number of KV pages of a speculative plan, without which the request can be admitted too; 0 without
        such a plan.
    window: the attention window under which the beginning is computed; None for all tokens. A windowed
        beginning is not shared with other requests.
    """

    tokens: tuple[int, ...]
    needed: bool
    grants: Callable[[int], int]
    window: Window | None = None
    plan: int = 0


# For a request whose sequences share nothing and need no pages.
NO_PREFIX = PromptPrefix((), False, lambda _: 0)


def answer_prefix(prompt_tokens: tuple[int, ...], ask: Ask, ring: RingState) -> PromptPrefix:
    """Return the beginning of a direct answer: its prompt without the last token, which the answer's own
    sequence must compute. The beginning is empty (nothing is shared) if KV rows are pruned or kept per head,
    or if the client wants logprobs of the prompt. The beginning is not needed: the request may enter without
    forking it. Its `grants` shrinks with the number of forked tokens.

    prompt_tokens: all token ids of the prompt, at least one.
    ask: what the client asks for.
    ring: sizes and limits of the ring.

    Raises InvalidRequest if the ring can never hold the request. Raises what `grant_answer` raises.
    """
    grant_answer(len(prompt_tokens), ask, ring)
    length = len(prompt_tokens) + ask.limits.new_tokens
    alone = ask.pruning or ask.head_aware or ask.prompt_logprobs is not None
    return PromptPrefix(
        () if alone else prompt_tokens[:-1],
        False,
        lambda shared: own_pages(length, shared, ring, ask.policy),
        ask.window,
    )


def plan_prefix(prefix_tokens: tuple[int, ...], sizes: PlanSizes, ask: Ask, ring: RingState) -> PromptPrefix:
    """Return the beginning of a planned request, which every one of its sequences forks.

    prefix_tokens: the token ids that all prompts of the request begin with.
    sizes: lengths of the request's prompts, in tokens; a speculative plan's pages are 0 unless it speculates.
    ask: what the client asks for.
    ring: sizes and limits of the ring.

    Raises InvalidRequest if the ring can never hold the request.
    """
    grant = grant_plan(sizes, ask, ring)
    skeleton = sizes.skeleton + skeleton_limit(ask, listed=True, speculates=True)
    plan = own_pages(skeleton, sizes.prefix, ring, ask.policy) if sizes.speculates else 0
    return PromptPrefix(prefix_tokens, True, lambda _: grant, ask.window, plan)


@dataclass(frozen=True, slots=True)
class AdmissionOption:
    """One way for a request to enter the ring: what it forks, and how many KV pages it takes.

    route: the cached prefix that is forked; its node is None to fork none.
    own: the beginning that is opened as a new prefix; empty to open none.
    pages: number of KV pages of that new prefix; 0 to open none.
    grant: number of KV pages of what the request decodes.
    slack: number of KV pages that must stay free after the request has entered; 0 for none.
    plan: number of KV pages of a speculative plan, in addition to the grant; 0 without such a plan.
    """

    route: PrefixMatch
    own: tuple[int, ...]
    pages: int
    grant: int
    slack: int = 0
    plan: int = 0

    @property
    def shared(self) -> int:
        """Number of tokens that the request's decoding sequences fork; 0 if they fork nothing."""
        return len(self.own) or self.route.length


def admission_options(
    prompt_prefix: PromptPrefix, route: PrefixMatch, ring: RingState, may_keep: bool, later: bool = False
) -> list[AdmissionOption]:
    """Return the ways in which a request may enter the ring, the best first; at least one. A cached prefix is
    forked only if it shares at least MIN_PREFIX_TOKENS (MIN_SHARED_TOKENS if the beginning is not needed
    yet), or all of a shorter beginning. For each way with a cached prefix there is one without it, later in
    the list.

    A beginning that the request needs is opened as far as the prefix cache lacks it; with `later`, it is not
    opened if the cache lacks less than `min_prefix_tokens`. If such a beginning and the request together
    need all pages of the ring or more, the beginning is always opened, and no cached prefix is forked, as its
    pages would have to stay. A beginning that
    only later requests may use is opened if it adds at least `min_prefix_tokens`, and only while an eighth of
    the ring's pages stays free.

    prompt_prefix: the common beginning of the request's prompts, and what the request needs in addition.
    route: the longest cached prefix of the request's prompt; its node is None if no prefix matches.
    ring: sizes and limits of the ring.
    may_keep: True if prefixes may be kept for later requests.
    later: True if the request begins with a single sequence, which may compute a short beginning itself: a
        prefix is computed one step before the first token.
    """
    tokens = prompt_prefix.tokens
    needed_now = prompt_prefix.needed and not later
    min_shared = MIN_PREFIX_TOKENS if needed_now else MIN_SHARED_TOKENS
    known = route.length >= min(min_shared, max(len(tokens), 1))
    routes = [route, PrefixMatch()] if known else [PrefixMatch()]
    if prompt_prefix.needed:
        unforked = _opened(prompt_prefix, PrefixMatch(), ring)
        tight = unforked.pages + unforked.grant >= ring.pages
        enter = _begun if later else _opened
        return [unforked] if tight else [enter(prompt_prefix, one, ring) for one in routes]
    found: list[AdmissionOption] = []
    for one in routes:
        if may_keep and len(tokens) - one.length >= min_prefix_tokens(ring):
            found.append(replace(_opened(prompt_prefix, one, ring), slack=ring.pages // 8))
        found.append(AdmissionOption(one, (), 0, prompt_prefix.grants(one.length)))
    return found


def _opened(prompt_prefix: PromptPrefix, route: PrefixMatch, ring: RingState) -> AdmissionOption:
    """Return the option in which the whole beginning is in the ring: nothing is opened if the cache already
    has all of it. A window bounds the pages of the new beginning.

    prompt_prefix: the common beginning of the request's prompts.
    route: the cached prefix that is forked; its node is None to fork nothing.
    ring: sizes and limits of the ring.
    """
    length = len(prompt_prefix.tokens)
    new_prefix = () if route.length == length else prompt_prefix.tokens
    pages = pages_for(length, ring.page_rows) - shared_pages(route.length, ring) if new_prefix else 0
    pages = capped_by_policy(prompt_prefix.window, pages, ring)
    return AdmissionOption(route, new_prefix, pages, prompt_prefix.grants(length), plan=prompt_prefix.plan)


def _begun(prompt_prefix: PromptPrefix, route: PrefixMatch, ring: RingState) -> AdmissionOption:
    """Return the option of a request with a speculative plan and without a KV policy, which begins with a
    single sequence. If the cache lacks less than `min_prefix_tokens` of its beginning, nothing is opened: the
    first sequence and the plan compute these tokens themselves, so that neither waits for a step of the
    beginning. The lacking pages are granted to both.

        page_rows 16, beginning of 40 tokens, 24 of them cached, grant 20, plan 3
        -> lacking ceil(40 / 16) - 24 // 16 = 3 - 1 = 2 pages: grant 20 + 2, plan 3 + 2

    prompt_prefix: the common beginning of the request's prompts.
    route: the cached prefix that is forked; its node is None to fork nothing.
    ring: sizes and limits of the ring.
    """
    length = len(prompt_prefix.tokens)
    if not 0 < length - route.length < min_prefix_tokens(ring):
        return _opened(prompt_prefix, route, ring)
    lacking = pages_for(length, ring.page_rows) - shared_pages(route.length, ring)
    grant = prompt_prefix.grants(route.length) + lacking
    return AdmissionOption(route, (), 0, grant, plan=prompt_prefix.plan + lacking)


def position_limit(ask: Ask, ring: RingState) -> int:
    """Return the maximum number of tokens that a sequence of this request may hold: the model's context, or
    MAX_TOKENS for a sequence with a window.

    ask: what the client asks for; only its window matters.
    ring: sizes and limits of the ring.
    """
    return ring.max_positions if ask.window is None else MAX_TOKENS


def _check_context(prompt_length: int, length: int, ask: Ask, ring: RingState) -> None:
    """Check that a sequence fits the model; return nothing if it does. A length equal to the limit fits.

    prompt_length: number of tokens of the prompt, for the error's message.
    length: the maximum number of tokens that the sequence may have, prompt included.
    ask: what the client asks for; only its window matters.
    ring: sizes and limits of the ring.

    Raises InvalidRequest if the window does not fit the model, and ContextLengthExceeded if the sequence may
    exceed the position limit.
    """
    _check_window(ask.window, ring)
    if length > position_limit(ask, ring):
        raise ContextLengthExceeded.of(position_limit(ask, ring), prompt_length, length - prompt_length)


def _check_window(window: Window | None, ring: RingState) -> None:
    """Raise InvalidRequest if the window's sinks and recent tokens do not fit the model's positions. None
    always fits.

    window: the attention window that the client asks for, or None.
    ring: sizes and limits of the ring.
    """
    if window and window.sinks + window.recent >= ring.max_positions:
        raise InvalidRequest(
            f"a window of {window.sinks} sinks and {window.recent} recent tokens does not fit the model's "
            f"{ring.max_positions} positions",
            field="window",
        )


def _check_memory(pages: int, ring: RingState) -> int:
    """Return `pages` unchanged if the whole ring has at least so many. A request that needs exactly all pages
    passes.

    pages: number of KV pages that the request needs at most.
    ring: sizes and limits of the ring.

    Raises TooLarge if the ring has fewer.
    """
    if pages > ring.pages:
        raise TooLarge(
            f"the request needs {pages} KV pages of {ring.page_rows} rows, the ring has {ring.pages}: "
            "shorten the prompt, ask for fewer tokens, or give the ring more KV memory (--kv-memory)",
            field="max_new_tokens",
        )
    return pages


@dataclass(slots=True)
class _RequestPages:
    """The KV pages that one request is charged.

    grant: its base grant, reserved even while unused.
    used: number of pages that its sequences use; 0 at first.
    """

    grant: int
    used: int = 0

    @property
    def charge(self) -> int:
        """Pages that the request is charged: what it uses, but at least its base grant."""
        return max(self.grant, self.used)


class PageLedger:
    """Accounts for the KV pages of a ring that are promised to requests and to prefixes. A request is charged
    what it uses, but at least its base grant.

        capacity 10: admit(r, 4)  -> free 6
        use_pages(r, 3)           -> free 6, within the grant
        use_pages(r, 3)           -> free 4, as 6 pages are used
        return_pages(r, 3)        -> free 6, charged the grant again
        drop_grant(r)             -> free 7, charged the 3 used pages
    """

    def __init__(self, capacity: int) -> None:
        """Create a ledger in which all pages are free.

        capacity: number of KV pages of the ring. The attribute `free` holds the number of pages that are not
            promised.
        """
        self.free = capacity
        self._pages_of_requests: dict[str, _RequestPages] = {}

    def reserve_prefix_pages(self, pages: int) -> None:
        """Set free pages aside for a prefix. The caller has checked that so many are free.

        pages: number of KV pages of the prefix.
        """
        self.free -= pages

    def free_prefix_pages(self, pages: int) -> None:
        """Make the pages of a prefix free again, because the prefix was removed.

        pages: number of KV pages that were set aside for the prefix.
        """
        self.free += pages

    def admit(self, request_id: str, grant: int) -> bool:
        """Reserve a new request's base grant. Return False, and change nothing, if not enough pages are free.
        A grant of 0 is always admitted.

        request_id: the id of the request.
        grant: the KV pages that stay reserved for it, even while unused.
        """
        if grant > self.free:
            return False
        self._pages_of_requests[request_id] = _RequestPages(grant)
        self.free -= grant
        return True

    def use_pages(self, request_id: str, pages: int) -> bool:
        """Charge a request for the pages of a further sequence, first from its base grant and beyond it from
        the free pages. Return False, and change nothing, if not enough pages are available.

        request_id: the id of an admitted request.
        pages: number of KV pages of the sequence.

        Raises KeyError for a request that was not admitted.
        """
        account = self._pages_of_requests[request_id]
        more = self.shortfall(request_id, pages)
        if more > self.free:
            return False
        self._change(account, account.grant, account.used + pages)
        return True

    def shortfall(self, request_id: str, pages: int) -> int:
        """Return how many free pages a request needs to use more pages than now; 0 if its base grant
        suffices.

        request_id: the id of an admitted request.
        pages: number of KV pages that it would use in addition.

        Raises KeyError for a request that was not admitted.
        """
        account = self._pages_of_requests[request_id]
        return max(account.grant, account.used + pages) - account.charge

    def return_pages(self, request_id: str, pages: int) -> None:
        """Return the pages of a sequence that is over, so that they are free again unless the request's base
        grant still covers them. An unknown request is ignored: it returned everything when it was removed.

        request_id: the id of the request.
        pages: number of KV pages that `use_pages` charged for the sequence.
        """
        if account := self._pages_of_requests.get(request_id):
            self._change(account, account.grant, account.used - pages)

    def drop_grant(self, request_id: str) -> None:
        """Drop the base grant of a request that will open no further sequence: from now on it is charged what
        it uses. An unknown request is ignored.

        request_id: the id of the request.
        """
        if (account := self._pages_of_requests.get(request_id)) and account.grant:
            self._change(account, 0, account.used)

    def remove(self, request_id: str) -> None:
        """Free all pages of a request that is over. An unknown request is ignored.

        request_id: the id of the request.
        """
        if account := self._pages_of_requests.pop(request_id, None):
            self.free += account.charge

    def _change(self, account: _RequestPages, grant: int, used: int) -> None:
        """Set the grant and the used pages of a request, and update the free pages by the difference.

        account: the pages of the request.
        grant: its new base grant.
        used: its new number of used pages.
        """
        before = account.charge
        account.grant = grant
        account.used = used
        self.free += before - account.charge
