"""Admission by counting KV pages: which request may enter the ring, and which branch may be added.

Each stage has an allocator of its own; this mirror makes sure that it never runs out, so whatever was
opened can be written to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specsot.core.pages import Policy, most_held
from specsot.core.skeleton import MAX_TITLE_BYTES
from specsot.errors import ContextLengthExceeded, InvalidRequest, TooLarge
from specsot.params import MAX_TOKENS, Ask, Window
from specsot_master.core.limits import plan_limit, skeleton_limit
from specsot_master.core.ring.prefix_tree import PrefixMatch
from specsot_master.core.ring.ring_state import RingState

# of a prefix that an answer forks; of one that others may fork
MIN_SHARED_TOKENS = 16
MIN_KEPT_TOKENS = 32


def pages_for(rows: int, page_rows: int) -> int:
    return -(-rows // page_rows)


def own_pages(length: int, shared: int, ring: RingState, policy: Policy | None = None) -> int:
    """Pages of a writing sequence that may grow to `length` tokens, without those it shares with a prefix
    of `shared` tokens. Behind a window what it shares it may come to own in part.
    """
    return capped_by_policy(
        policy, pages_for(length + ring.slots, ring.page_rows) - shared_pages(shared, ring), ring
    )


def capped_by_policy(policy: Policy | None, pages: int, ring: RingState) -> int:
    """So many pages, or as many as a policy leaves of them."""
    most = most_held(policy, ring.rows, ring.page_rows)
    return pages if most is None else min(pages, most)


def shared_pages(shared: int, ring: RingState) -> int:
    """Full pages of a fork at `shared` tokens; a page that is shared in part is copied.

    A drafter shares one row less, because its last one pairs with the token behind it.
    """
    return max(shared - ring.has_drafter, 0) // ring.page_rows


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """Prompt lengths of a planned request, in tokens.

    turn: of a branch's turn alone, without plan and parents' texts.
    answer: of the plain answer that may take the plan's place; 0 where the plan itself may become one.
    """

    prefix: int
    skeleton: int
    turn: int
    answer: int = 0


def grant_answer(prompt: int, ask: Ask, ring: RingState) -> int:
    """Pages of a direct answer. Raises InvalidRequest when it can never fit."""
    length = prompt + ask.limits.new_tokens
    _check_context(prompt, length, ask, ring)
    return _check_memory(own_pages(length, 0, ring, ask.policy), ring)


def grant_plan(sizes: PlanSizes, ask: Ask, ring: RingState) -> int:
    """Pages with which a planned request always gets on, those of its prefix left out: of the skeleton,
    then of the largest branch there can be (the plan, parents' texts and its own share one max_new_tokens;
    the plan's titles stand there in other words).

    Raises InvalidRequest when it can never fit.
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
    """What a request's prompts begin with. needed: every one of its sequences forks all of it.

    grants: from how many of its tokens are shared to the pages of what the request writes.
    window: through which it is computed; then no other request can share it.
    """

    tokens: tuple[int, ...]
    needed: bool
    grants: Callable[[int], int]
    window: Window | None = None


NO_PREFIX = PromptPrefix((), False, lambda _: 0)


def answer_prefix(prompt: tuple[int, ...], ask: Ask, ring: RingState) -> PromptPrefix:
    """Of a direct answer; its last token stays its own, and all where heads keep different rows, or where
    each row of the prompt is asked for. Raises InvalidRequest when it can never fit."""
    grant_answer(len(prompt), ask, ring)
    length = len(prompt) + ask.limits.new_tokens
    alone = ask.pruning or ask.head_aware or ask.prompt_logprobs is not None
    return PromptPrefix(
        () if alone else prompt[:-1],
        False,
        lambda shared: own_pages(length, shared, ring, ask.policy),
        ask.window,
    )


def plan_prefix(prefix: tuple[int, ...], sizes: PlanSizes, ask: Ask, ring: RingState) -> PromptPrefix:
    """Of a planned request. Raises InvalidRequest when it can never fit."""
    grant = grant_plan(sizes, ask, ring)
    return PromptPrefix(prefix, True, lambda _: grant, ask.window)


@dataclass(frozen=True, slots=True)
class AdmissionOption:
    """One way for a request to begin: with what is in the ring, and what is opened for it.

    own: the beginning that is opened, none of it if empty. pages: of that. grant: of what it writes.
    slack: pages that must be free behind it.
    """

    route: PrefixMatch
    own: tuple[int, ...]
    pages: int
    grant: int
    slack: int = 0

    @property
    def shared(self) -> int:
        """Tokens that what it writes is forked from."""
        return len(self.own) or self.route.length


def admission_options(
    beginning: PromptPrefix, route: PrefixMatch, ring: RingState, keeps: bool
) -> list[AdmissionOption]:
    """How a request may enter the ring, the best way first; route: the best that is there.

    A beginning that it needs is opened as far as it is not there. One that only later requests may need
    is opened where that is worth a lap, and where pages are plenty.
    """
    tokens = beginning.tokens
    least = MIN_KEPT_TOKENS if beginning.needed else MIN_SHARED_TOKENS
    known = route.length >= min(least, max(len(tokens), 1))
    routes = [route, PrefixMatch()] if known else [PrefixMatch()]
    if beginning.needed:
        scratch = _opened(beginning, PrefixMatch(), ring)
        tight = scratch.pages + scratch.grant >= ring.pages
        return [scratch] if tight else [_opened(beginning, one, ring) for one in routes]
    found: list[AdmissionOption] = []
    for one in routes:
        if keeps and len(tokens) - one.length >= MIN_KEPT_TOKENS:
            found.append(replace(_opened(beginning, one, ring), slack=ring.pages // 8))
        found.append(AdmissionOption(one, (), 0, beginning.grants(one.length)))
    return found


def _opened(beginning: PromptPrefix, route: PrefixMatch, ring: RingState) -> AdmissionOption:
    """With all of the beginning; nothing is opened where it is all there."""
    length = len(beginning.tokens)
    own = () if route.length == length else beginning.tokens
    pages = pages_for(length, ring.page_rows) - shared_pages(route.length, ring) if own else 0
    return AdmissionOption(
        route, own, capped_by_policy(beginning.window, pages, ring), beginning.grants(length)
    )


def position_limit(ask: Ask, ring: RingState) -> int:
    """Tokens that a sequence of the request may hold; more than the model's context behind a window alone."""
    return ring.max_positions if ask.window is None else MAX_TOKENS


def _check_context(prompt: int, length: int, ask: Ask, ring: RingState) -> None:
    _check_window(ask.window, ring)
    if length > position_limit(ask, ring):
        raise ContextLengthExceeded.of(position_limit(ask, ring), prompt, length - prompt)


def _check_window(window: Window | None, ring: RingState) -> None:
    if window and window.sinks + window.recent >= ring.max_positions:
        raise InvalidRequest(
            f"a window of {window.sinks} sinks and {window.recent} recent tokens does not fit the model's "
            f"{ring.max_positions} positions",
            field="window",
        )


def _check_memory(pages: int, ring: RingState) -> int:
    if pages > ring.pages:
        raise TooLarge(
            f"the request needs {pages} KV pages of {ring.page_rows} rows, the ring has {ring.pages}: "
            "shorten the prompt, ask for fewer tokens, or give the ring more KV memory (--kv-memory)",
            field="max_new_tokens",
        )
    return pages


@dataclass(slots=True)
class _Account:
    grant: int
    used: int = 0

    @property
    def charge(self) -> int:
        return max(self.grant, self.used)


class PageLedger:
    """Pages promised to requests, and kept for prefixes. A request is charged what it uses, but at least
    its base grant.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = self.free = capacity
        self._accounts: dict[str, _Account] = {}

    def keep(self, pages: int) -> None:
        """Set free pages aside for a prefix."""
        self.free -= pages

    def give_kept(self, pages: int) -> None:
        """A prefix is over."""
        self.free += pages

    def admit(self, request: str, grant: int) -> bool:
        """Set `grant` pages aside for a new request, if they are free."""
        if grant > self.free:
            return False
        self._accounts[request] = _Account(grant)
        self.free -= grant
        return True

    def take(self, request: str, pages: int, reserved_only: bool = False) -> bool:
        """Use pages for a sequence: from the base grant, beyond it from the free ones.

        reserved_only: somebody waits for free pages, so only the grant may be used.
        """
        account = self._accounts[request]
        more = self.shortfall(request, pages)
        if more > self.free or (more and reserved_only):
            return False
        self._change(account, account.grant, account.used + pages)
        return True

    def shortfall(self, request: str, pages: int) -> int:
        account = self._accounts[request]
        return max(account.grant, account.used + pages) - account.charge

    def give(self, request: str, pages: int) -> None:
        """A sequence is over. Unknown requests are ignored: they gave everything back when they left."""
        if account := self._accounts.get(request):
            self._change(account, account.grant, account.used - pages)

    def waive(self, request: str) -> None:
        """The request opens no more sequences, so it needs its base grant no longer."""
        if (account := self._accounts.get(request)) and account.grant:
            self._change(account, 0, account.used)

    def remove(self, request: str) -> None:
        if account := self._accounts.pop(request, None):
            self.free += account.charge

    def _change(self, account: _Account, grant: int, used: int) -> None:
        before = account.charge
        account.grant = grant
        account.used = used
        self.free += before - account.charge
