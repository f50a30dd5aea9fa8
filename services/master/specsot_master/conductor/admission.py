"""Which request may enter the ring, and which branch may be added, by counting KV pages.

Pure. The ring's own allocator hands pages out; this mirror only makes sure that it never runs dry,
so whatever was opened can be written to its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from specsot.errors import InvalidRequest
from specsot.params import Ask
from specsot.skeleton import MAX_TITLE_BYTES
from specsot_master.conductor.ring import RingState
from specsot_master.plan import skeleton_limit


def pages_for(rows: int, page_rows: int) -> int:
    """How many pages hold `rows` rows."""
    return -(-rows // page_rows)


def own_pages(length: int, shared: int, ring: RingState) -> int:
    """Pages of a writing sequence that may grow to `length` tokens, without the full ones it shares with
    a prefix of `shared` tokens (a page that is shared in part is copied).
    """
    return pages_for(length + ring.slots, ring.page_rows) - shared // ring.page_rows


@dataclass(frozen=True, slots=True)
class Sizes:
    """Prompt lengths of a planned request, in tokens.

    turn: of a branch's turn alone, without plan and parents' texts.
    """

    prefix: int
    skeleton: int
    turn: int


def grant_answer(prompt: int, ask: Ask, ring: RingState) -> int:
    """Pages of a direct answer. Raises InvalidRequest when it can never fit."""
    length = prompt + ask.limits.max_new_tokens
    _check_context(prompt, length, ask, ring)
    return _check_memory(own_pages(length, 0, ring), ring)


def grant_plan(sizes: Sizes, ask: Ask, ring: RingState) -> int:
    """Pages with which a planned request always gets on: prefix and skeleton, then prefix and the largest
    branch there can be (parents' texts and its own share one max_new_tokens).

    Raises InvalidRequest when it can never fit.
    """
    skeleton = sizes.skeleton + skeleton_limit(ask)
    branch = sizes.prefix + sizes.turn + ask.limits.max_new_tokens
    _check_context(sizes.skeleton, max(skeleton, branch), ask, ring)
    prefix = pages_for(sizes.prefix, ring.page_rows)
    first = _check_memory(prefix + own_pages(skeleton, sizes.prefix, ring), ring)
    plan = ask.limits.max_skeleton_tokens + MAX_TITLE_BYTES
    largest = min(branch + plan, ring.max_positions)
    return max(first, min(prefix + own_pages(largest, sizes.prefix, ring), ring.pages))


def _check_context(prompt: int, length: int, ask: Ask, ring: RingState) -> None:
    if length > ring.max_positions:
        raise InvalidRequest(
            f"a prompt of {prompt} tokens with max_new_tokens {ask.limits.max_new_tokens} (and "
            f"max_skeleton_tokens {ask.limits.max_skeleton_tokens}) needs {length} positions, the model has "
            f"{ring.max_positions}",
            field="max_new_tokens",
        )


def _check_memory(pages: int, ring: RingState) -> int:
    if pages > ring.pages:
        raise InvalidRequest(
            f"the request needs {pages} KV pages of {ring.page_rows} rows, the ring has {ring.pages}",
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
    """Pages promised to requests. A request is charged what it uses, but at least its base grant."""

    def __init__(self, capacity: int) -> None:
        self.capacity = self.free = capacity
        self._accounts: dict[str, _Account] = {}

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
        more = max(account.grant, account.used + pages) - account.charge
        if more > self.free or (more and reserved_only):
            return False
        self._change(account, account.grant, account.used + pages)
        return True

    def give(self, request: str, pages: int) -> None:
        """A sequence is over. Unknown requests are ignored: they gave everything back when they left."""
        if account := self._accounts.get(request):
            self._change(account, account.grant, account.used - pages)

    def waive(self, request: str) -> None:
        """The request opens no more sequences, so it needs its base grant no longer."""
        if account := self._accounts.get(request):
            self._change(account, 0, account.used)

    def leave(self, request: str) -> None:
        """The request is over, with everything it had."""
        if account := self._accounts.pop(request, None):
            self.free += account.charge

    def _change(self, account: _Account, grant: int, used: int) -> None:
        before = account.charge
        account.grant, account.used = grant, used
        self.free += before - account.charge
