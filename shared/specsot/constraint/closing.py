"""A short way from inside a JSON text to its end: strings closed, nothing begun that may be left out.

Refuses to know schemas; the walker says what they allow. Not the shortest way there is, and not always
found: a pattern or many required properties may need more tokens than are looked ahead.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from specsot.constraint.walker import MatcherCursor, MatcherNode
from specsot.vocabulary import Vocabulary

FARTHEST = 128  # tokens of a budget from which on the end is thought of
_WATCHED = 48  # tokens to spare from which on nothing is begun that cannot be ended
_SPARE = 8  # tokens to spare from which on there is only the way to the end
_TRIED = 16  # tokens at a place that begin something and are looked behind

# What brings a JSON text nearer to its end comes first.
_ORDER = b'}]":,0123456789[{-'
_BEGINNING = frozenset(b'{[",')

Mask = NDArray[np.bool_]


@functools.lru_cache(maxsize=4)
def closing_of(vocabulary: Vocabulary) -> Closing:
    """The one of this vocabulary, shared by all forms."""
    return Closing(vocabulary)


class Closing:
    """Ways to the end, over the tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = vocabulary.bytes
        ids = {text: token for token, text in reversed(list(enumerate(texts))) if text}
        self._order = _ids(ids, _ORDER)
        self._string = _ids(ids, b'":')
        self._sizes = np.array([len(text or b"") for text in texts], dtype=np.int32)
        self._begin = np.array([not _BEGINNING.isdisjoint(text or b"") for text in texts], dtype=np.bool_)
        self._quote = np.array([b'"' in (text or b"") for text in texts], dtype=np.bool_)

    def lead(self, place: MatcherNode, allowed: Mask, remaining: int, may_stop: bool) -> Mask:
        """Of the allowed tokens those behind which the end can be reached in time, as far as is known.

        may_stop: there are tokens that end a text which may go on.
        """
        way = self.find(place)
        if way is None or remaining > len(way) + _WATCHED or not (way or may_stop):
            return allowed
        if remaining > len(way) + _SPARE:
            return self._without_the_endless(place, allowed, remaining)
        only = np.zeros_like(allowed)
        only[list(way[:1])] = True
        return only

    def _without_the_endless(self, place: MatcherNode, allowed: Mask, remaining: int) -> Mask:
        """Without the tokens that begin more than can be ended; within a string that takes a quote."""
        begin = self._quote if self._in_string(place.walker.bits(place)) else self._begin
        fitting = allowed & ~begin
        for token in np.flatnonzero(allowed & begin)[:_TRIED].tolist():
            ahead = place.walker.step(place, token)
            way = None if ahead is None else self.find(ahead)
            fitting[token] = way is not None and len(way) < remaining
        return fitting

    def find(self, place: MatcherNode) -> tuple[int, ...] | None:
        """Tokens from `place` to where the text may end; None where no such way was found."""
        if place.behind and place.behind.way and place.behind.way[0] == place.token:
            place.way = place.behind.way[1:]
        if place.way is None:
            place.way = self._search(place) or ()
        return place.way if place.way or place.walker.accepts(place) else None

    def _search(self, place: MatcherNode) -> tuple[int, ...] | None:
        way: list[int] = []
        walker, here = place.walker, place
        while not (here.over or walker.accepts(here)):
            token = self._next(walker, here) if len(way) < FARTHEST else None
            ahead = None if token is None else walker.step(here, token)
            if token is None or ahead is None:
                return None
            way.append(token)
            here = ahead
        return tuple(way)

    def _next(self, walker: MatcherCursor, place: MatcherNode) -> int | None:
        """What JSON ends with, if it may follow; else the longest token, which ends what is spelled out."""
        bits = walker.bits(place)
        if self._in_string(bits):
            return self._string[0]
        for token in self._order:
            if _may(bits, token):
                return token
        raw = np.frombuffer(bits, dtype=np.uint8)
        ids = np.flatnonzero(np.unpackbits(raw, count=len(self._sizes), bitorder="little"))
        return int(ids[self._sizes[ids].argmax()]) if len(ids) else None

    def _in_string(self, bits: bytes) -> bool:
        """Only there both a quote and a colon may follow."""
        return len(self._string) == 2 and all(_may(bits, token) for token in self._string)


def _ids(ids: dict[bytes, int], singles: bytes) -> list[int]:
    """Tokens of one byte each, as far as there are any."""
    return [ids[text] for text in (bytes([byte]) for byte in singles) if text in ids]


def _may(bits: bytes, token: int) -> int:
    return bits[token >> 3] >> (token & 7) & 1
