"""Which tokens may follow, so that what is written has the form the caller asked for.

Refuses to know text, logits, sequences, and what schemas and regexes mean; the library does.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from specsot.constraint.choices import Choices
from specsot.constraint.closing import FARTHEST, closing_of
from specsot.constraint.compiling import COMPILER, compile_form
from specsot.constraint.matchers import Matchers
from specsot.constraint.walker import MatcherCursor, MatcherNode
from specsot.forms import Form
from specsot.vocabulary import Vocabulary

Mask = NDArray[np.bool_]

_JSON = ("json_object", "json_schema")
_MOST_FORCED = 64  # tokens that may follow where all of them spell one text


class AnswerAutomaton:
    """One form over the tokens of one vocabulary. Different texts may be walked by different threads.

    ends: tokens that end an answer; they may follow where the form is complete.
    led:  the answer is led to its end when its budget gets small, which takes looking ahead.
    Raises InvalidRequest when the library cannot make sense of the form.
    """

    def __init__(
        self, vocabulary: Vocabulary, form: Form, ends: tuple[int, ...] = (), led: bool = True
    ) -> None:
        self.vocabulary, self.form = vocabulary, form
        self._matchers = Matchers(functools.partial(compile_form, vocabulary, form), COMPILER)
        self._ends = np.array([end for end in ends if end < len(vocabulary)], dtype=np.int64)
        self._writes = _writing(vocabulary)
        self._choices = Choices(vocabulary, form.texts) if led and form.kind == "choice" else None
        self._closing = closing_of(vocabulary) if led and form.kind in _JSON else None

    def start(self) -> MatcherNode:
        """Before the first token of a text."""
        return MatcherCursor(self._matchers).root

    def finished(self, place: MatcherNode) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return place.over

    def advance(self, place: MatcherNode, token: int) -> MatcherNode | None:
        """The place behind `token`, or None when the form forbids it. Budgets are not looked at."""
        if place.over or not 0 <= token < len(self._writes) or not self._writes[token]:
            return None
        ahead = place.walker.step(place, token)
        if ahead is not None and not len(self._ends):
            ahead.over = ahead.over or self._full(ahead)
        return ahead

    def mask(self, place: MatcherNode, remaining: int) -> Mask:
        """[V] which tokens may follow; read-only. All False when finished, and where the form got too
        complex to go on.

        remaining: tokens the answer may still have, this one included. When they become few, JSON is led
        to its end where a way there is known, and a choice to one that fits.
        """
        allowed, ends = self._allowed(place), self._may_end(place)
        if self._choices:
            written = b"".join(self.vocabulary.bytes[token] or b"" for token in place.tokens)
            fitting = self._choices.fit(allowed, written, remaining)
            allowed = fitting if ends or fitting.any() else allowed
        if self._closing and remaining <= FARTHEST and (ends or allowed.any()):
            allowed = self._closing.lead(place, allowed, remaining, len(self._ends) > 0)
        if ends:
            allowed[self._ends] = True
        allowed.flags.writeable = False
        return allowed

    def forced(self, place: MatcherNode) -> tuple[int, ...]:
        """A token for the bytes about which the form leaves no choice from here; () when it does.

        The longest there is; the model may spell the same bytes in another way.
        """
        allowed = np.flatnonzero(self._allowed(place))
        if len(allowed) > _MOST_FORCED or self._may_end(place):
            return ()
        texts = {self.vocabulary.bytes[token] or b"": token for token in allowed[::-1].tolist()}
        longest = max(texts, key=len, default=b"")
        return (texts[longest],) if texts and all(map(longest.startswith, texts)) else ()

    def way(self, place: MatcherNode) -> tuple[int, ...] | None:
        """Tokens with which JSON can be ended from here; None where no way is known."""
        return self._closing.find(place) if self._closing else None

    def _allowed(self, place: MatcherNode) -> Mask:
        """What the form alone allows, ends left out."""
        if place.over:
            return np.zeros(len(self._writes), dtype=np.bool_)
        bits = np.frombuffer(place.walker.bits(place), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=len(self._writes), bitorder="little").view(np.bool_)
        return allowed & self._writes

    def _may_end(self, place: MatcherNode) -> bool:
        return len(self._ends) > 0 and not place.over and place.walker.accepts(place)

    def _full(self, place: MatcherNode) -> bool:
        """Complete, and nothing may follow: the library does not always see it at once."""
        return place.walker.accepts(place) and not self._allowed(place).any()


@functools.lru_cache(maxsize=4)
def _writing(vocabulary: Vocabulary) -> Mask:
    """[V] which tokens are text."""
    return np.array([bool(text) for text in vocabulary.bytes], dtype=np.bool_)
