"""Guards of plans: drop titles that are not usable as points, as small models write them."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Final

from specsot.core.skeleton import MAX_TITLE_BYTES, MAX_TITLE_WORDS, Point
from specsot_master.core.plans.wording import Language, language_of

# Bytes. A title that leaves fewer bytes of its limit free was probably cut by the limit. Untuned.
_FREE_BYTES = 6
# Words without meaning in a title, in the languages of the prompts.
_ARTICLES = frozenset(("a", "an", "the", "der", "die", "das", "el", "la", "los", "las"))
# A title cannot end with one of these words, as something must follow it. With some of them it cannot begin.
_JOINTS = (
    "a|an|the|and|or|but|of|as|that|which|is|are|at|to|from|into|than|with|by|its|their|your|"
    "und|oder|der|die|das|des|dem|den|ein|eine|von|mit|für|zu|y|o|de|del|la|el|los|las|un|una|que|para|por|con|en"
)
# The same words as a set.
_JOINED = frozenset(_JOINTS.split("|"))
# Finds a title that ends or begins with a word that cannot stand there.
_OPEN = re.compile(rf"(?:^|\s)(?:{_JOINTS})$|(?i:^(?:and|or|but|which|und|oder|aber|y|o|pero|que)\s)")
# Words between things that a question names side by side, in the languages of the prompts.
_BESIDE = frozenset(
    ("and", "or", "vs", "versus", "und", "oder", "gegen", "y", "e", "o", "u", "contra", *"和与或及")
)  # fmt: skip
# Words that may come between such a word and the next thing: "..., and what is herd immunity?"
_ASKING = frozenset(
    ("what", "which", "who", "is", "are", "was", "were", "discuss", "describe", "explain", "its", "their",
     "welche", "ist", "sind", "qué", "cuál", "cuáles", "es", "son", "su", "sus", *"什么是")
)  # fmt: skip
# Endings of words that inflection adds or removes, in addition to a plural s.
_ENDINGS: Mapping[Language, tuple[str, ...]] = {
    "de": ("ern", "en", "er", "em", "es", "e"),
    "es": ("o", "a", "e"),
}
# Characters that separate things in an enumeration.
_COMMAS = frozenset(",;，、；")
# Words. A comma belongs to an enumeration if the next comma or "and", or the comma before, is at most so far
# away. Untuned.
_ROW = 4
# Points. A plan has at least this number of points, unless the question or the introduction asks for fewer,
# or the question names all of them. Chosen by measurement: of 38 planned answers of
# Qwen2.5-Coder-1.5B-Instruct, the four with three points had 0.45, 0.49, 0.62 and 1.37 times the words of the
# direct answer, and three of these plans were what the guards had left of repeated titles.
MIN_POINTS: Final = 4
# Words, and characters of Han script. If the first words of a title, this number of them, are those of an
# earlier title, the title is a variation of the earlier one; see `begins_alike`. Chosen by reading the titles
# of 38 plans of Qwen2.5-Coder-1.5B-Instruct ("Use a naming game", "Use a naming chart").
ALIKE_WORDS: Final = 2
ALIKE_CHARACTERS: Final = 4
# Figures after a comma at the end of a title, such as years.
_FIGURES = re.compile(r"\s*,\s+\d[\d\s.–-]*\w{0,2}$")
# Words joined by a comma without a space, which some models write to stay below the limit of words.
_GLUED = re.compile(r"\w,[^\W\d]")
# One word; in Han script every character is one.
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+")
# The ending of a possessive, which is no word.
_POSSESSIVE = re.compile(r"['’]s\b")
# One word, or a comma.
_TOKEN = re.compile(rf"{_WORD.pattern}|[,;，、；]")


class Stems:
    """Texts in the form in which they are compared: the question, the instructions, and titles.

    A text becomes a tuple of words without case, accents, endings, punctuation and articles; in Han script
    every character is a word. `question` holds the stems of the question with its commas, `joints` those of
    words that connect, `ours` those of the instructions that asked for the plan. `apart` holds the indexes in
    `question` at which things are set side by side.

        of("The Tall Trees") -> ("tall", "tree")
    """

    def __init__(self, question: str, told: Iterable[str]) -> None:
        """Read the question and the instructions.

        question: the text that the client asks.
        told: the instructions in which the plan was asked for; empty for none.
        """
        self._endings = _ENDINGS.get(language_of(question), ())
        self.question = self._read(_TOKEN, question)
        self.joints = set(map(self._stem, _JOINED))
        self.apart = self._find_apart()
        self.ours = {word for text in told for word in self.of(text)} - self.joints

    def _find_apart(self) -> set[int]:
        """Return the indexes at which the question sets things side by side or asks for a further thing;
        empty if it names one thing. A comma does so within an enumeration only; elsewhere it ends a clause.
        -1 stands for the place before the question's first word: its first part is one of the things if a
        further thing is asked for.
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
            # The beginning of the question counts too: its first part is side by side with the further one.
            apart.add(-1)
        for at, word in enumerate(self.question):
            if word in asking and at - 1 in apart:
                apart.add(at)
        return apart

    def of(self, text: str) -> tuple[str, ...]:
        """Return the words of a text in the compared form; () for a text without words.

        text: a title, or any other text.
        """
        return self._read(_WORD, text)

    def _read(self, pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
        """Return the stems of a text's words, without articles and without the "s" of a possessive.

        pattern: matches one word, or whatever else counts as one.
        text: any text.
        """
        words: list[str] = pattern.findall(_POSSESSIVE.sub("", text.casefold()))
        return tuple(self._stem(word) for word in words if word not in _ARTICLES)

    def _stem(self, word: str) -> str:
        """Return one word without case, accents and one ending. A plural s is removed from words of more than
        three letters, and then one ending of the question's language if more than three letters stay.

        word: a single word, in any case.
        """
        marked = unicodedata.normalize("NFKD", word.casefold())
        bare = "".join(sign for sign in marked if not unicodedata.combining(sign))
        one = bare.removesuffix("s") if len(bare) > 3 else bare
        found = (
            one.removesuffix(end) for end in self._endings if one.endswith(end) and len(one) - len(end) > 3
        )
        return next(found, one)


def plan_of(
    points: Sequence[Point], cut: bool, question: str, tokens: int | None = None, told: Iterable[str] = ()
) -> tuple[Point, ...]:
    """Return the points of a plan that can be written. Return () if fewer than two are left, except for a
    plan in markers that had only one point from the start. Points of a list get equal lengths, at least 1
    token each.

    points: the points that the model has written, in order.
    cut: True if a limit ended the plan; the last title of a list is then incomplete and left out.
    question: the text that the client asks.
    tokens: the tokens for all points of a list, which are divided equally; None if the points have lengths of
        their own.
    told: the instructions in which the plan was asked for; empty for none.
    """
    listed = tokens is not None
    kept = keep_points(points[:-1] if cut and listed else points, question, told, bounded=listed)
    if len(kept) < 2 and (listed or len(kept) < len(points)):
        return ()
    return kept if tokens is None else tuple(replace(one, length=max(tokens // len(kept), 1)) for one in kept)


def keep_points(
    points: Sequence[Point], question: str, told: Iterable[str] = (), bounded: bool = True
) -> tuple[Point, ...]:
    """Return the points whose titles can be written about, with new ids 1, 2, and so on; () if none can.
    Figures at the end of titles are dropped where possible. Needs of dropped points are removed.

    A title must be complete and must not repeat an earlier title (`is_said`), the question or the
    instructions. Titles that begin like an earlier one (`begins_alike`) are left out as long as MIN_POINTS
    others are left; otherwise the first ones of them stay. A thing that the question names side by side with
    another was asked for, so such a title stays. Other titles that consist of the question's words only stay
    if fewer than two points would be left without them.

    points: the points that the model has written, in order.
    question: the text that the client asks.
    told: the instructions in which the plan was asked for; empty for none.
    bounded: True if titles are held to a length, at which some are cut.
    """
    stems = Stems(question, told)
    kept = list[Point]()
    variations = list[Point]()
    for point in without_figures(points):
        title = stems.of(point.title)
        copied = is_copied(title, stems) or is_ours(title, stems)
        again = any(is_said(title, stems.of(one.title)) for one in (*kept, *variations))
        if not is_title(point.title, bounded) or copied or again:
            continue
        alike = any(begins_alike(title, stems.of(one.title), stems) for one in kept)
        (variations if alike else kept).append(point)
    kept = sorted((*kept, *variations[: max(MIN_POINTS - len(kept), 0)]), key=lambda point: point.id)
    said = set(stems.question)
    new = [
        one for one in kept if is_listed(stems.of(one.title), stems) or not set(stems.of(one.title)) <= said
    ]
    return number_anew(new if len(new) > 1 else kept)


def are_listed(points: Sequence[Point], question: str, introduction: str = "") -> bool:
    """Return True if the question names every point side by side with another, and the introduction names
    all of them or none. Return False for no points.

        "What are the pros and cons of electric cars?", points "Pros" and "Cons" -> True
        the same with the introduction "Pros of electric cars:" -> False, as only the pros follow it

    points: the points of a plan.
    question: the text that the client asks.
    introduction: the text before the first point; "" for none.
    """
    stems = Stems(question, ())
    before = set(stems.of(introduction))
    titles = [stems.of(point.title) for point in points]
    introduced = {set(title) <= before for title in titles}
    return len(introduced) == 1 and all(is_listed(title, stems) for title in titles)


def number_anew(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points with ids 1, 2, and so on; () for no points. Needs refer to the new ids; needs of
    dropped points are removed.

        ids 2, 5 (needs 1 and 2) -> ids 1, 2 (needs 1)

    points: points with ascending ids, some of which may be missing.
    """
    ids = {point.id: id for id, point in enumerate(points, 1)}
    return tuple(
        replace(one, id=ids[one.id], needs=tuple(ids[need] for need in one.needs if need in ids))
        for one in points
    )


def without_figures(points: Sequence[Point]) -> list[Point]:
    """Return the points without figures at the end of titles ("Cuts, 2016-2022" -> "Cuts"), unless only the
    figures distinguish two titles. Figures follow a comma. If two titles would become the same, both keep
    theirs.

    points: the points that the model has written, in order.
    """
    bare = {point.title: _FIGURES.sub("", point.title) for point in points}
    times = Counter(bare.values())
    return [replace(one, title=bare[one.title]) if times[bare[one.title]] == 1 else one for one in points]


def is_title(title: str, bounded: bool = True) -> bool:
    """Return True if the title has a word to write about, is not cut at its limit, and does not repeat one
    word. A title that is bounded must have fewer than MAX_TITLE_WORDS words, and leave _FREE_BYTES bytes of
    its limit. It must not end or begin with a word that something has to follow or precede, have words joined
    by a comma, or have more than twice as many words as different ones. Numbers, connecting words and single
    letters alone are no title.

    title: the title as the model has written it.
    bounded: True if titles are held to a length, at which some are cut.
    """
    words: list[str] = _WORD.findall(title.casefold())
    short = len(title.split()) < MAX_TITLE_WORDS and len(title.encode()) <= MAX_TITLE_BYTES - _FREE_BYTES
    short = short or not bounded
    whole = not _OPEN.search(title) and not _GLUED.search(title) and 2 * len(set(words)) >= len(words)
    said = (word for word in words if not (word.isdigit() or word in _JOINED))
    return short and whole and any(len(word) > 1 or ord(word) > 0x3000 for word in said)


def is_said(title: Sequence[str], before: Sequence[str]) -> bool:
    """Return True if the title repeats an earlier one.

    The title repeats it if it has the same words, or at least two words and all of them from the earlier one.
    It also does so if it adds words within an earlier one: "Shop at local markets" repeats "Shop at markets".
    If the earlier title has exactly two words, both titles must end with the same word. If it has one word,
    the title must begin with that word: "Cost of repairs" repeats "Cost", but "Solar energy" not "Energy".

    title: the stems of the title; see `Stems`.
    before: the stems of the earlier title.
    """
    these = set(title)
    those = set(before)
    if these <= those:
        return these == those or len(these) > 1
    if not those or not those <= these:
        return False
    return title[0] == before[0] if len(those) == 1 else len(those) > 2 or title[-1] == before[-1]


def begins_alike(title: Sequence[str], before: Sequence[str], stems: Stems) -> bool:
    """Return True if two titles begin with the same ALIKE_WORDS words, or, in Han script, with the same
    ALIKE_CHARACTERS characters. Words of the question and words that connect (`Stems.joints`) do not count.

    Return False unless both titles have at least one word more than that, and also if the next word of
    `title` is a number, which tells things of one name apart.

        "Use a naming game" begins like "Use a naming chart"; "Solar energy storage" not like "Solar energy",
        which ends after two words; "Apollo mission 11" not like "Apollo mission 13"

    title: the stems of the title; see `Stems`.
    before: the stems of the earlier title.
    stems: the stems of the question.
    """
    known = {*stems.question, *stems.joints}
    own, others = ([word for word in words if word not in known] for words in (title, before))
    size = ALIKE_CHARACTERS if any(word > "\u3400" for word in own) else ALIKE_WORDS
    comparable = min(len(own), len(others)) > size and not own[size].isdigit()
    return comparable and own[:size] == others[:size]


def is_ours(title: Sequence[str], stems: Stems) -> bool:
    """Return True if the title consists of words of the instructions in any order, or of words of the
    question and at least two words of the instructions that the question lacks. Numbers and words that
    connect (`Stems.joints`) do not count. Return False for a title without words of the instructions.

    title: the stems of the title.
    stems: the stems of the question and of the instructions.
    """
    said = {word for word in title if not word.isdigit()}
    asked = set(stems.question)
    ours = said & stems.ours
    rest = said - stems.ours - stems.joints
    return bool(ours) and (not rest or (rest <= asked and len(ours - asked) > 1))


def is_copied(title: Sequence[str], stems: Stems) -> bool:
    """Return True if the title is copied word for word from the question, and is not one of the things that
    the question lists. For example "Alan Turing" is only what the question is about.

    title: the stems of the title.
    stems: the stems of the question.
    """
    return bool(places_of(title, stems)) and not is_listed(title, stems)


def is_listed(title: Sequence[str], stems: Stems) -> bool:
    """Return True if the question names the title word for word side by side with another thing, as
    "plant-based and animal-based" and "what is rain, and what is hail?" do.

    title: the stems of the title.
    stems: the stems of the question, with the indexes at which things are set side by side.
    """
    return any(stems.apart & {at - 1, at + len(title)} for at in places_of(title, stems))


def places_of(title: Sequence[str], stems: Stems) -> list[int]:
    """Return the indexes in the question at which the title occurs word for word, ascending; empty if it does
    not occur, or has no words.

    title: the stems of the title.
    stems: the stems of the question.
    """
    asked = stems.question
    size = len(title)
    return [at for at in range(len(asked)) if title and asked[at : at + size] == tuple(title)]
