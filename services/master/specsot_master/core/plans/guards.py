"""Guards of plans, of every dialect: drops titles that are no points, as small models write them."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from specsot.core.skeleton import MAX_TITLE_BYTES, MAX_TITLE_WORDS, Point
from specsot.params import Ask
from specsot_master.core.plans.wording import Language, language_of

# A title that leaves fewer bytes free was probably cut there; not measured.
_FREE_BYTES = 6
# Words that say nothing in a title, in the languages that we ask in.
_ARTICLES = frozenset(("a", "an", "the", "der", "die", "das", "el", "la", "los", "las"))
# Behind these a title must go on, and some of them go on with one before it.
_JOINTS = (
    "a|an|the|and|or|but|of|as|that|which|is|are|at|to|from|into|than|with|by|its|their|your|"
    "und|oder|der|die|das|ein|eine|von|mit|für|zu|y|o|de|del|la|el|los|las|un|una|que|para|por|con|en"
)
_JOINED = frozenset(_JOINTS.split("|"))
_OPEN = re.compile(rf"(?:^|\s)(?:{_JOINTS})$|(?i:^(?:and|or|but|which|und|oder|aber|y|o|pero|que)\s)")
# What stands between things that a question names side by side, in the languages that we ask in.
_BESIDE = frozenset(
    ("and", "or", "vs", "versus", "und", "oder", "gegen", "y", "e", "o", "u", "contra", *"和与或及")
)  # fmt: skip
# Behind these may stand that the next thing is asked for, too: "..., and what is herd immunity?"
_ASKING = frozenset(
    ("what", "which", "who", "is", "are", "was", "were", "discuss", "describe", "explain", "its", "their",
     "welche", "ist", "sind", "qué", "cuál", "cuáles", "es", "son", "su", "sus", *"什么是")
)  # fmt: skip
# Endings of words that inflection adds or removes, in addition to a plural s.
_ENDINGS: Mapping[Language, tuple[str, ...]] = {
    "de": ("ern", "en", "er", "em", "es", "e"),
    "es": ("o", "a", "e"),
}
_COMMAS = frozenset(",;，、；")
_ROW = 4  # words from a comma in a row to the next one or to an "and", or back to another comma; not measured
_FIGURES = re.compile(r"\s*,\s+\d[\d\s.–-]*\w{0,2}$")
_GLUED = re.compile(r"\w,[^\W\d]")  # words behind one another without a space, to be under the bound
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+")
_TOKEN = re.compile(rf"{_WORD.pattern}|[,;，、；]")


class Stems:
    """Texts as what is compared: words without case, accents, endings, punctuation and articles; of Han
    script every character.
    """

    def __init__(self, question: str, told: Iterable[str]) -> None:
        """told: our words, in which a plan was asked for."""
        self._endings = _ENDINGS.get(language_of(question), ())
        self.question = self._read(_TOKEN, question)
        self.joints = set(map(self._stem, _JOINED))
        self.apart = self._find_apart()
        self.ours = {word for text in told for word in self.of(text)} - self.joints

    def _find_apart(self) -> set[int]:
        """Where the question sets things side by side, or asks for another one; a comma does so in a row, and
        else ends a clause.
        """
        words, asking = (set(map(self._stem, some)) for some in (_BESIDE, _ASKING))
        places = [at for at, word in enumerate(self.question) if word in words or word in _COMMAS]
        near = {
            at
            for at, other in permutations(places, 2)
            if 1 < other - at <= _ROW or (self.question[other] in _COMMAS and 0 < at - other <= _ROW)
        }
        apart = {at for at in places if self.question[at] in words or at in near}
        if any(word in asking and at - 1 in apart for at, word in enumerate(self.question)):
            apart.add(-1)  # what its first part asks for stands beside what the other one does
        for at, word in enumerate(self.question):
            if word in asking and at - 1 in apart:
                apart.add(at)
        return apart

    def of(self, text: str) -> tuple[str, ...]:
        return self._read(_WORD, text)

    def _read(self, pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
        words: list[str] = pattern.findall(text.casefold())
        return tuple(self._stem(word) for word in words if word not in _ARTICLES)

    def _stem(self, word: str) -> str:
        marked = unicodedata.normalize("NFKD", word.casefold())
        bare = "".join(sign for sign in marked if not unicodedata.combining(sign))
        one = bare.removesuffix("s") if len(bare) > 3 else bare
        found = (
            one.removesuffix(end) for end in self._endings if one.endswith(end) and len(one) - len(end) > 3
        )
        return next(found, one)


def question_of(ask: Ask) -> str:
    return ask.prompt if ask.prompt is not None else ask.messages[-1].content if ask.messages else ""


def plan_of(
    points: Sequence[Point], cut: bool, question: str, tokens: int | None = None, told: Iterable[str] = ()
) -> tuple[Point, ...]:
    """Those of a plan that can be written; none where fewer than two are left, unless it had only one.

    cut: a limit ended a list, and its last title. tokens: for all points of a list, which become equally
    long; None: they have lengths.
    """
    listed = tokens is not None
    kept = keep_points(points[:-1] if cut and listed else points, question, told, bounded=listed)
    if len(kept) < 2 and (listed or len(kept) < len(points)):
        return ()
    return kept if tokens is None else tuple(replace(one, length=max(tokens // len(kept), 1)) for one in kept)


def keep_points(
    points: Sequence[Point], question: str, told: Iterable[str] = (), bounded: bool = True
) -> tuple[Point, ...]:
    """Those whose titles can be written about, numbered anew: whole, not said before, and neither the
    question's words nor ours. What the question names beside another thing was asked for, and stays; other
    titles of its words stay where fewer than two would.

    bounded: titles are held to a length, at which some are cut.
    """
    stems, kept = Stems(question, told), list[Point]()
    for point in without_figures(points):
        title = stems.of(point.title)
        copied = is_copied(title, stems) or is_ours(title, stems)
        again = any(is_said(title, stems.of(one.title)) for one in kept)
        if is_title(point.title, bounded) and not copied and not again:
            kept.append(point)
    said = set(stems.question)
    new = [
        one for one in kept if is_listed(stems.of(one.title), stems) or not set(stems.of(one.title)) <= said
    ]
    return number_anew(new if len(new) > 1 else kept)


def number_anew(points: Sequence[Point]) -> tuple[Point, ...]:
    """1, 2, ...; what they need of others is forgotten."""
    ids = {point.id: id for id, point in enumerate(points, 1)}
    return tuple(
        replace(one, id=ids[one.id], needs=tuple(ids[need] for need in one.needs if need in ids))
        for one in points
    )


def without_figures(points: Sequence[Point]) -> list[Point]:
    """Titles without what figures end them ("Cuts, 2016-2022"), unless only those tell two of them apart."""
    bare = {point.title: _FIGURES.sub("", point.title) for point in points}
    times = Counter(bare.values())
    return [replace(one, title=bare[one.title]) if times[bare[one.title]] == 1 else one for one in points]


def is_title(title: str, bounded: bool = True) -> bool:
    """It has a word to write about, ended before its bound, and is not one word again and again."""
    words: list[str] = _WORD.findall(title.casefold())
    short = len(title.split()) < MAX_TITLE_WORDS and len(title.encode()) <= MAX_TITLE_BYTES - _FREE_BYTES
    short = short or not bounded
    whole = not _OPEN.search(title) and not _GLUED.search(title) and 2 * len(set(words)) >= len(words)
    said = (word for word in words if not (word.isdigit() or word in _JOINED))
    return short and whole and any(len(word) > 1 or ord(word) > 0x3000 for word in said)


def is_said(title: Sequence[str], before: Sequence[str]) -> bool:
    """It has the words of one before, or two of them at least and no other; or all of that one's and others
    between them, as "Shop at local markets" has behind "Shop at markets".
    """
    these = set(title)
    those = set(before)
    if these <= those:
        return these == those or len(these) > 1
    return len(those) > 1 and those <= these and (len(those) > 2 or title[-1] == before[-1])


def is_ours(title: Sequence[str], stems: Stems) -> bool:
    """It is made of the words in which we asked, in any order and form; or of some and the question's."""
    said = {word for word in title if not word.isdigit()}
    asked = set(stems.question)
    ours = said & stems.ours
    rest = said - stems.ours - stems.joints
    return bool(ours) and (not rest or (rest <= asked and len(ours - asked) > 1))


def is_copied(title: Sequence[str], stems: Stems) -> bool:
    """The question says it word for word, and does not list it: "Alan Turing" is what it is about."""
    return bool(places_of(title, stems)) and not is_listed(title, stems)


def is_listed(title: Sequence[str], stems: Stems) -> bool:
    """The question says it word for word beside another thing: "plant-based and animal-based" asks for both,
    and "what is rain, and what is hail?", too.
    """
    return any(stems.apart & {at - 1, at + len(title)} for at in places_of(title, stems))


def places_of(title: Sequence[str], stems: Stems) -> list[int]:
    """Where the question says it word for word."""
    asked = stems.question
    size = len(title)
    return [at for at in range(len(asked)) if title and asked[at : at + size] == tuple(title)]
