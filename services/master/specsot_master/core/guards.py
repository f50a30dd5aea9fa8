"""What small models get wrong in a plan, and in a branch: titles that are no points, and loops.

A branch ends where it repeats a sentence of its own. Other branches are not looked at: which of two has
written a sentence first depends on the machines, and a text must not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from specsot.core.skeleton import MAX_TITLE_BYTES, MAX_TITLE_WORDS, Point
from specsot.params import Ask

# A title that leaves fewer bytes free was probably cut there; not measured.
_FREE_BYTES = 6
# Words that say nothing in a title, in the languages that we ask in.
_ARTICLES = frozenset(("a", "an", "the", "der", "die", "das", "el", "la", "los", "las"))
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_]+")


def words_of(text: str) -> tuple[str, ...]:
    """What is compared: words without case, punctuation and articles; of Han script every character."""
    words: list[str] = _WORD.findall(text.casefold())
    return tuple(word for word in words if word not in _ARTICLES)


# Letters and digits of a sentence from which on its like is a loop, and not a turn of speech; not measured.
_LEAST_SENTENCE = 24
_ENDED = re.compile(r"[.!?…][\"')\]*”’]*\s|[。！？]")
_SIGN = re.compile(r"[\W_]+")


class SentenceWatch:
    """Feed it a branch's text; what comes out never holds a sentence twice, nor what follows the second one.

    A sentence that begins like one before is held back until it differs, so pieces of any size give the same
    text. Lines that end in no full stop, as of code, tables and verses, are no sentences.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._sentence = ""  # the one that is being written
        self._out = 0  # characters of it that are out
        self.repeats = False

    def feed(self, text: str) -> str:
        """The text that is now safe to show. Empty for ever once a sentence came again."""
        shown: list[str] = []
        for character in text:
            if self.repeats:
                break
            self._sentence += character
            if _ENDED.search(self._sentence, max(len(self._sentence) - 6, 0)) or character == "\n":
                shown.append(self._end())
        return "".join(shown) + ("" if self.repeats or self._may_repeat() else self._take())

    def flush(self) -> str:
        """What was held back, when no more text comes; the beginning of a loop is left out, too."""
        self.repeats = self.repeats or (
            len(_letters(self._sentence)) >= _LEAST_SENTENCE and self._may_repeat()
        )
        return "" if self.repeats else self._take()

    def _end(self) -> str:
        letters = _letters(self._sentence)
        self.repeats = letters in self._said
        if self.repeats:
            return ""
        if len(letters) >= _LEAST_SENTENCE and _ENDED.search(self._sentence):
            self._said.add(letters)
        rest = self._take()
        self._sentence, self._out = "", 0
        return rest

    def _may_repeat(self) -> bool:
        letters = _letters(self._sentence)
        return self._out == 0 and any(one.startswith(letters) for one in self._said)

    def _take(self) -> str:
        text, self._out = self._sentence[self._out :], len(self._sentence)
        return text


def _letters(sentence: str) -> str:
    """What is compared of a sentence."""
    return _SIGN.sub("", sentence.casefold())


def question_of(ask: Ask) -> str:
    """The last thing that was said."""
    return ask.messages[-1].content if ask.prompt is None else ask.prompt


def plan_of(
    points: Sequence[Point], cut: bool, question: str, told: Iterable[str], tokens: int
) -> tuple[Point, ...]:
    """Those of a list that can be written, all as long; none where fewer than two are left.

    cut: a limit ended the list, and its last title.
    """
    kept = keep_points(points[:-1] if cut else points, question, told)
    return tuple(replace(one, length=max(tokens // len(kept), 1)) for one in kept) if len(kept) > 1 else ()


def keep_points(points: Sequence[Point], question: str, told: Iterable[str]) -> tuple[Point, ...]:
    """Those whose titles can be written about, numbered anew: not empty, cut at their bound, said before, or
    taken from the question or from what the model was told. They need no other.
    """
    asked, ours = words_of(question), [words_of(one) for one in told]
    kept: dict[tuple[str, ...], Point] = {}
    for point in points:
        words = words_of(point.title)
        copied = is_copied(words, asked) or any(len(words) > 1 and is_within(words, one) for one in ours)
        said = tuple(sorted(set(words)))
        if is_title(point.title) and not copied and said not in kept:
            kept[said] = replace(point, id=len(kept) + 1)
    return tuple(kept.values())


def is_title(title: str) -> bool:
    """It has a word to write about, and ended before its bound."""
    short = len(title.split()) < MAX_TITLE_WORDS and len(title.encode()) <= MAX_TITLE_BYTES - _FREE_BYTES
    return short and any(
        len(word) > 1 or ord(word) > 0x3000 for word in words_of(title) if not word.isdigit()
    )


def is_copied(title: Sequence[str], question: Sequence[str]) -> bool:
    """It is three words of the question or most of it, word for word; one or two may well be a point."""
    return (len(title) > 2 or 2 * len(title) > len(question)) and is_within(title, question)


def is_within(part: Sequence[str], whole: Sequence[str]) -> bool:
    """These words stand there one behind the other."""
    size = len(part)
    return any(tuple(whole[at : at + size]) == tuple(part) for at in range(len(whole) - size + 1))
