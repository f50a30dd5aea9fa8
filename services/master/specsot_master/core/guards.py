"""What small models get wrong in a plan: titles that are no points."""

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
