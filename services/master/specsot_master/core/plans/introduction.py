"""The introduction of a planned answer: the first sentences of the direct answer to the same question.

A planned answer begins with a part of the direct answer, which is decoded while the plan is written. Which
part that is depends on the direct answer's own tokens only, never on when the plan is ready, so that the text
is the same with any drafter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from specsot_master.core.plans import router_words

MAX_INTRODUCTION_TOKENS: Final = (
    60  # Tokens. Bounds the introduction. Given by the aim of the feature; untuned.
)

# The beginnings of paragraphs that are no prose: a heading, an item of a list, code, a table or a quotation.
_MARKUP = re.compile(r"#|>|\||```|~~~|[-*+•] |\d{1,3}(?:[.)] |[、．])")
# The beginning of an item of a list, which is one kind of such markup.
_ITEM = re.compile(r"[-*+•] |\d{1,3}(?:[.)] |[、．])")
# What may still become such a beginning.
_MAYBE_MARKUP = re.compile(r"(?:`{1,2}|~{1,2}|[-*+•]|\d{1,3}[.)]?)\Z")
# The end of a sentence. Not an abbreviation before a word in small letters, as in "e.g. this".
_SENTENCE_END = re.compile(r"[.!?…][\"')\]*”’»]*(?=\s+[^\sa-zäöüáéíóúñ])|[。！？][”’」』]*")
# The end of a sentence at the end of a paragraph.
_WHOLE_END = re.compile(r"[.!?…。！？:：][\"')\]*”’»」』]*\Z")
# A colon at the end of a sentence, which announces what follows.
_COLON_END = re.compile(r"[:：][\"')\]*”’»」』]*\Z")
# The beginning of a sentence that announces a list.
_ANNOUNCING = re.compile(router_words.ANNOUNCING, re.IGNORECASE)
# The beginning of a sentence that speaks of the model.
_OF_THE_MODEL = re.compile(router_words.OF_THE_MODEL, re.IGNORECASE)
# A number of things, such as "10 tips" or "five healthy breakfasts". A span of time is none, and neither is
# the end of a word, such as "ten" in "die wichtigsten Tipps".
_COUNTED = re.compile(
    rf"(?<!the )(?<!\d)(?<![a-zäöüß]){router_words.COUNT}"
    rf"(?:\s*[个种条点项]|\s+(?!{router_words.UNIT}s?\b)(?=[^\W\d]))",
    re.IGNORECASE,
)
# Things. A smaller number counts what the question is about ("two protocols"), and not the points. Untuned.
_FEWEST_COUNTED = 3


@dataclass(frozen=True, slots=True)
class Introduction:
    """What is known of a planned answer's introduction after some tokens of the direct answer.

    visible: how many first characters of the direct answer may be shown already.
    complete: True once the introduction is known: the first `visible` characters.
    usable: False if the direct answer has no introduction, so that it is not replaced by a planned one.
    """

    visible: int = 0
    complete: bool = False
    usable: bool = True


# Of a direct answer that no planned answer replaces.
NO_INTRODUCTION: Final = Introduction(complete=True, usable=False)


def find_introduction(
    text: str, tokens: int, ended: bool = False, one_sentence: bool = False
) -> Introduction:
    r"""Return the introduction of a direct answer, as far as its first tokens tell.

    The introduction is the first paragraph, at most its whole sentences within MAX_INTRODUCTION_TOKENS. It is
    cut before the first sentence that announces a list or a number of things. The first sentence is shown
    token by token, so an announcement that is the first sentence remains; later sentences are held back until
    it is known that they announce nothing.

    The result is NO_INTRODUCTION if the answer begins with a list, a heading, code or a table, if its first
    sentence is too long or speaks of the model ("As an AI"), or if its first line is no sentence. The one
    exception is a list with `one_sentence`.

        "TCP and UDP are protocols. Here are the"  -> 26 characters are visible, not complete
        "TCP and UDP are protocols. Here are the differences:\n\n1." -> the same, and complete

    text: the text of the first tokens; "" before the first one.
    tokens: how many tokens the direct answer has so far; from MAX_INTRODUCTION_TOKENS on, the introduction is
        complete.
    ended: True if the direct answer has no further tokens.
    one_sentence: True if the question asks for several things: the introduction is then the first sentence
        alone. If the answer begins with the first item of a list, the introduction is empty, and a planned
        answer may still replace the direct one.

            "Sleep well. Keep a diary." with one_sentence -> 11 characters, complete
            "1. Sleep well" with one_sentence -> 0 characters, complete and usable
    """
    start = len(text) - len(text.lstrip())
    line, broken, _ = text[start:].partition("\n")
    full = tokens >= MAX_INTRODUCTION_TOKENS
    if one_sentence and _ITEM.match(line):
        return Introduction(complete=True)
    if _MARKUP.match(line) or _OF_THE_MODEL.match(line):
        return NO_INTRODUCTION
    if not broken and (not line or _MAYBE_MARKUP.match(line)):
        return NO_INTRODUCTION if ended or full else Introduction()
    sentences = _sentences_of(line, closed=bool(broken) or ended)
    if not sentences:
        return _read_first(line, start, over=bool(broken) or ended or full)
    if one_sentence:
        return Introduction(start + sentences[0][1], complete=True)
    for place, (begin, end) in enumerate(sentences):
        if place and announces(line[begin:end]):
            return Introduction(start + len(line[:begin].rstrip()), complete=True)
    return Introduction(start + sentences[-1][1], complete=bool(broken) or full or ended)


def _read_first(line: str, start: int, over: bool) -> Introduction:
    """Return what is known while not even the first sentence is whole: it is visible as it grows. Return
    NO_INTRODUCTION if it cannot become whole any more.

    line: the first paragraph so far, without white space before it.
    start: the position in the answer at which the paragraph begins, in characters.
    over: True if the sentence cannot become whole any more: the paragraph or the answer has ended, or it is
        too long.
    """
    return NO_INTRODUCTION if over else Introduction(start + len(line.rstrip()))


def _sentences_of(line: str, closed: bool) -> list[tuple[int, int]]:
    """Return the whole sentences of a paragraph as (first character, character after the last one); [] if
    none is whole. The end of the paragraph counts only if it is the end of a sentence, or a colon.

    line: the paragraph so far, without white space before it.
    closed: True if the paragraph is complete, so that its end may end a sentence.
    """
    found: list[tuple[int, int]] = []
    begin = 0
    for match in _SENTENCE_END.finditer(line):
        found.append((begin, match.end()))
        begin = match.end() + len(line[match.end() :]) - len(line[match.end() :].lstrip())
    rest = line[begin:].rstrip()
    if closed and rest and _WHOLE_END.search(rest):
        found.append((begin, begin + len(rest)))
    return found


def announces(sentence: str) -> bool:
    """Return True if the sentence announces a list, or a number of things: "Here are 10 tips:".

    sentence: the text of one sentence.
    """
    return bool(_COLON_END.search(sentence) or _ANNOUNCING.match(sentence))


def announced_count(introduction: str) -> int | None:
    """Return how many points the introduction promises: "Here are five healthy breakfasts:" -> 5. Return None
    if it does not end with a colon, names no number, or one below _FEWEST_COUNTED. The number may be written
    in figures or as a word; a span of time is none.

    introduction: the text before the first point; "" for none.
    """
    found = _COUNTED.search(introduction) if _COLON_END.search(introduction.rstrip()) else None
    if found is None:
        return None
    count = found["count"].lower()
    number = int(count) if count.isdecimal() else router_words.NUMBERS[count]
    return number if number >= _FEWEST_COUNTED else None
