"""One of the library's matchers, moved between the places of one text and its drafts.

Refuses to know vocabularies and forms.

A place is a node of the tree of all continuations that were looked at. The matcher goes from place to
place by rolling back to what both have in common and consuming from there, so a draft tree costs each
node once and what is asked of a place never depends on the way there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llguidance import LLMatcher

from specsot.constraint.matchers import Matchers

T = TypeVar("T")


class MatcherNode:
    """Behind `token`, which follows `behind`; the root has neither.

    over: nothing may follow. way: tokens to the end, for those who look for one (`closing`).
    """

    __slots__ = ("behind", "depth", "over", "token", "walker", "way")

    def __init__(
        self, walker: MatcherCursor, behind: MatcherNode | None = None, token: int = -1, over: bool = False
    ):
        self.walker, self.behind, self.token, self.over = walker, behind, token, over
        self.depth: int = behind.depth + 1 if behind else 0
        self.way: tuple[int, ...] | None = None

    @property
    def tokens(self) -> list[int]:
        """The way here from the root."""
        return _tokens(self, 0)


class MatcherCursor:
    """Used by one thread at a time. Where even a matcher of a new batch fails, the form is too complex."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self._batch, self._matcher = matchers.take()
        self.root = self._here = MatcherNode(self)

    def step(self, place: MatcherNode, token: int) -> MatcherNode | None:
        """The place behind `token`, or None when it is forbidden there or too complex."""
        taken = self._ask(place, lambda matcher: matcher.try_consume_tokens([token]))
        if not taken or self._matcher.is_error():
            return None
        self._here = MatcherNode(self, place, token, over=self._matcher.is_stopped())
        return self._here

    def bits(self, place: MatcherNode) -> bytes:
        """A bit for each token that may follow, the first one lowest; none where it is too complex."""
        bits = self._ask(place, LLMatcher.compute_bitmask)
        return bytes(len(bits)) if self._matcher.is_error() else bits

    def accepts(self, place: MatcherNode) -> bool:
        """Whether the text may end here."""
        return self._ask(place, LLMatcher.is_accepting)

    def _ask(self, place: MatcherNode, question: Callable[[LLMatcher], T]) -> T:
        """The matcher's answer at `place`; where it fails, that of a renewed one."""
        if self._matcher.is_error():
            self._renew()
        self._move(place)
        answer = question(self._matcher)
        if self._matcher.is_error():
            self._renew()
            self._move(place)
            answer = question(self._matcher)
        return answer

    def _renew(self) -> None:
        self._batch, self._matcher = self._matchers.take(worn=self._batch)
        self._here = self.root

    def _move(self, place: MatcherNode) -> None:
        """Roll back to what both places share, and go on from there."""
        shared = _shared(self._here, place)
        if back := self._here.depth - shared.depth:
            self._matcher.rollback(back)
        if ahead := _tokens(place, shared.depth):
            self._matcher.consume_tokens(ahead)
        self._here = place


def _shared(one: MatcherNode, other: MatcherNode) -> MatcherNode:
    """The deepest place that both come through."""
    while one is not other:
        if one.depth >= other.depth:
            assert one.behind is not None, "places of two texts"
            one = one.behind
        else:
            assert other.behind is not None, "places of two texts"
            other = other.behind
    return one


def _tokens(place: MatcherNode, depth: int) -> list[int]:
    """Tokens from behind `depth` to `place`."""
    found: list[int] = []
    while place.depth > depth and place.behind is not None:
        found.append(place.token)
        place = place.behind
    return found[::-1]
