"""Turns of a planned request, and the words in which a model that was not taught to plan is asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specsot.core.skeleton import Point

SAMPLE_POINT = Point(id=1, length=1, title="-")  # stands for any, to see what is around one

# What a template might change, or look for, in words that it should leave alone.
_SLOT_PROBE = (
    "Words <a> & \"b\" 'c' \\n {d} {{ e }} {% f %} \u4f60\n\n  <think> </think> <tool_call> [INST] #1\n- ok."
)


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """A whole prompt in tokens, of which the first `shared` are also the prefix's first ones."""

    tokens: tuple[int, ...]
    shared: int

    @property
    def suffix(self) -> tuple[int, ...]:
        return self.tokens[self.shared :]


class Conversation(Protocol):
    """The planned turns of one request.

    asked: tokens of a direct answer's prompt to the same messages.
    answer: that prompt, where a plan that is no good is followed by a plain answer.
    told: what the model is told for a plan in a list, without the question; None for other plans.
    behind: characters that are tokenised for each branch, beside its own words.
    """

    prefix: tuple[int, ...]
    skeleton: PromptTurn
    answer: PromptTurn
    told: tuple[str, ...] | None
    asked: int
    behind: int

    def branch(
        self, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
    ) -> PromptTurn:
        """The turn that writes `point` in about `length` tokens; `parents` are what it builds on."""
        ...

    def polish(self, text: str) -> PromptTurn:
        """The turn that writes the merged text anew."""
        ...


def shared_length(left: Sequence[int], right: Sequence[int], known: int = 0) -> int:
    """How many first tokens are the same. known: so many are, that much is certain."""
    end = min(len(left), len(right))
    for place in range(known, end):
        if left[place] != right[place]:
            return place
    return end


def turn_from(prefix: Sequence[int], tokens: tuple[int, ...], known: int = 0) -> PromptTurn:
    """A turn that shares what it can with the prefix, but keeps a token of its own to answer from."""
    return PromptTurn(tokens, min(shared_length(prefix, tokens, known), len(tokens) - 1))


@dataclass(frozen=True, slots=True)
class TurnSlot:
    """Where in a rendering the words of its last turn stand, so that others can be put there: before, words,
    after.
    """

    before: str
    after: str

    def fill(self, words: str) -> str:
        return self.before + words + self.after


def find_slot(render: Callable[[str], str], mark: Callable[[str], str]) -> TurnSlot | None:
    """mark: words as they stand in a rendering. None where they stand there twice, or in other words."""
    odd, plain = mark(_SLOT_PROBE), "Write."
    before, found, after = render(_SLOT_PROBE).partition(odd)
    place = TurnSlot(before, after)
    return place if found and odd not in after and render(plain) == place.fill(plain) else None


def shared_text(left: str, right: str) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:  # a slice is compared at memory's speed, a character at Python's
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class Wording:
    """What is asked for behind a question, as people ask, in one language: a list, a point of it, and the
    points' texts as one. most: how long the list is; exactly: where the question asks for that number.
    endings: of the language's words, of which one comes and goes, beside the s of many.
    """

    plan: str
    most: str
    exactly: str
    branch: str
    polish: str
    endings: tuple[str, ...] = ()

    def ask_for_list(self, count: int, exact: bool) -> str:
        """A list of so many points at most, or of as many as the question asks for."""
        return self.plan.format(points=(self.exactly if exact else self.most).format(count=count))


ENGLISH = Wording(
    "Answer with a short numbered list of {points}, each 2 to 6 words.",
    "at most {count} points",
    "{count} points",
    'Tell me about "{title}" in two or three sentences.',
    "Write one clear answer from these notes, without headings and without saying anything twice:\n\n{text}",
)
CHINESE = Wording(
    "请用简短的编号列表回答，{points}，每点不超过 12 个字。",
    "最多 {count} 点",
    "{count} 点",
    "请用两三句话介绍“{title}”。",
    "请把下面的笔记写成一篇连贯的回答，不要标题，不要重复：\n\n{text}",
)
GERMAN = Wording(
    "Antworte mit einer kurzen nummerierten Liste von {points} mit je 2 bis 6 Wörtern.",
    "höchstens {count} Punkten",
    "{count} Punkten",
    "Erzähle mir in zwei oder drei Sätzen von „{title}“.",
    "Schreibe aus diesen Notizen eine Antwort am Stück, ohne Überschriften und Wiederholungen:\n\n{text}",
    ("ern", "en", "er", "em", "es", "e"),
)
SPANISH = Wording(
    "Responde con una lista numerada breve de {points}, de 2 a 6 palabras cada uno.",
    "{count} puntos como máximo",
    "{count} puntos",
    "Háblame de «{title}» en dos o tres frases.",
    "Escribe con estas notas una respuesta coherente, sin títulos ni repeticiones:\n\n{text}",
    ("o", "a", "e"),
)

# Words that a question can hardly do without, none of which is a word of the other languages.
_GERMAN = re.compile(
    r"\b(?:der|das|und|ist|sind|ein|eine|einen|wie|welche|warum|wozu|ich|mir|für|über|mit|nicht|bitte|gib|nenne)\b"
)
_SPANISH = re.compile(
    r"[¿¡ñ]|\b(?:el|los|las|una|qué|cómo|cuáles|cuál|por|para|con|del|sobre|dame|explica|explícame|son|es|mi)\b"
)
_ENGLISH = re.compile(
    r"\b(?:the|of|is|are|what|which|how|why|to|and|for|my|me|you|your|with|give|tell|explain|write|list)\b"
)
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_KANA = re.compile(r"[\u3040-\u30ff]")
_LETTER = re.compile(r"[^\W\d_]")


def choose_wording(question: str) -> Wording:
    """Chinese for a question that is mostly Han script (kana makes it Japanese); German or Spanish for one
    with more of their words than English ones; English otherwise.
    """
    letters = len(_LETTER.findall(question))
    if letters and len(_HAN.findall(question)) * 3 > letters and not _KANA.search(question):
        return CHINESE
    text = question.lower()
    known = {GERMAN: len(_GERMAN.findall(text)), SPANISH: len(_SPANISH.findall(text))}
    likeliest = max(known, key=lambda wording: known[wording])
    return likeliest if known[likeliest] > len(_ENGLISH.findall(text)) else ENGLISH


def behind(question: str, words: str) -> str:
    """The question and what we ask behind it: in its last line where that is a sentence of one line, else in
    a paragraph of its own, lest it be taken for a part of a text that the question brings along.
    """
    sentence = question.rstrip().endswith((".", "?", "!", "。", "？", "！")) and "\n" not in question.strip()
    return question.rstrip() + (" " if sentence else "\n\n") + words
