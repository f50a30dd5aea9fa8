"""What small models get wrong in a plan: titles that are no points."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from specsot.core.skeleton import MAX_TITLE_BYTES, MAX_TITLE_WORDS, Point
from specsot.params import Ask

# A title that leaves fewer bytes free was probably cut there; not measured.
_FREE_BYTES = 6
# Words that say nothing in a title, in the languages that we ask in.
_ARTICLES = frozenset(("a", "an", "the", "der", "die", "das", "el", "la", "los", "las"))
# A title that must go on: it ends with such a word.
_OPEN = re.compile(
    r"(?:^|\s)(?:a|an|the|and|or|but|of|as|that|which|is|are|und|oder|der|die|das|ein|eine|von|mit|"
    r"y|o|de|del|la|el|los|las|un|una|que)$"
)
# What stands between things that a question names side by side, in the languages that we ask in.
_BESIDE = frozenset(
    ("and", "or", "vs", "versus", "und", "oder", "gegen", "y", "e", "o", "u", "contra", "和", "与", "或")
)  # fmt: skip
_COMMAS = frozenset(",;，、；")
_FIGURES = re.compile(r"\s*,\s+\d[\d\s.–-]*\w{0,2}$")
_GLUED = re.compile(r"\w,[^\W\d]")  # words behind one another without a space, to be under the bound
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_]+")
_TOKEN = re.compile(rf"{_WORD.pattern}|[,;，、；]")


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
    """Those whose titles can be written about, numbered anew: whole, not said before, and neither the
    question's words nor ours. They need no other.
    """
    ours = [words_of(one) for one in told]
    kept: list[Point] = []
    for point in without_figures(points):
        words = words_of(point.title)
        copied = is_copied(words, question) or any(len(words) > 1 and is_within(words, one) for one in ours)
        again = any(is_said(words, words_of(one.title)) for one in kept)
        if is_title(point.title) and not copied and not again:
            kept.append(replace(point, id=len(kept) + 1))
    return tuple(kept)


def without_figures(points: Sequence[Point]) -> list[Point]:
    """Titles without what figures end them ("Cuts, 2016-2022"), unless only those tell two of them apart."""
    bare = {point.title: _FIGURES.sub("", point.title) for point in points}
    times = Counter(bare.values())
    return [replace(one, title=bare[one.title]) if times[bare[one.title]] == 1 else one for one in points]


def is_title(title: str) -> bool:
    """It has a word to write about, and ended before its bound."""
    short = len(title.split()) < MAX_TITLE_WORDS and len(title.encode()) <= MAX_TITLE_BYTES - _FREE_BYTES
    whole = not _OPEN.search(title) and not _GLUED.search(title)
    return (short and whole) and any(
        len(word) > 1 or ord(word) > 0x3000 for word in words_of(title) if not word.isdigit()
    )


def is_said(title: Sequence[str], before: Sequence[str]) -> bool:
    """It has the words of one before, or two of them at least and no other; or all of that one's and others
    between them, as "Shop at local markets" has behind "Shop at markets".
    """
    these, those = ({_stem(word) for word in words} for words in (title, before))
    if these <= those:
        return these == those or len(these) > 1
    return len(those) > 1 and those <= these and (len(those) > 2 or title[-1] == before[-1])


def is_copied(title: Sequence[str], question: str) -> bool:
    """The question says it word for word, and not beside another thing, with "and" between them: "plant-based
    and animal-based" asks for both, "Alan Turing" is what it is about.
    """
    part = [_stem(word) for word in title]
    asked = [_stem(word) for word in _TOKEN.findall(question.casefold()) if word not in _ARTICLES]
    beside = {*_BESIDE, *_COMMAS} if not _BESIDE.isdisjoint(asked) else set[str]()
    places = [at for at in range(len(asked)) if part and asked[at : at + len(part)] == part]
    ends = [{*asked[max(at - 1, 0) : at], *asked[at + len(part) : at + len(part) + 1]} for at in places]
    return bool(places) and all(beside.isdisjoint(words) for words in ends)


def _stem(word: str) -> str:
    """One and many are the same."""
    return word.removesuffix("s") if len(word) > 3 else word


def is_within(part: Sequence[str], whole: Sequence[str]) -> bool:
    """These words stand there one behind the other."""
    size = len(part)
    return any(tuple(whole[at : at + size]) == tuple(part) for at in range(len(whole) - size + 1))
