"""Scores of one answer, 0 to 1, as pure functions of texts.

Exact match and F1 normalise as SQuAD's evaluation does: lower case, no punctuation, no articles, one space.
ROUGE-L is the F1 of the longest common subsequence of words (Lin 2004), without stemming.
Numbers may have a sign, a currency and commas; "1/2" is two numbers. Those of a plan's headings are left out.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-\u2212])?[$€£]?"  # "10-3" has no negative number
    r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\w)\.\d+)"  # "1,2,3" are three
)
_HEADING = re.compile(r"^## \d+\. ", re.MULTILINE)
_WORD = re.compile(r"[^\W_]+")
_AMOUNT = re.compile(r"\$?\b\d[\w,.]*\w|\$?\b\d")
_NAME = re.compile(r"(?<![.!?:\n] )(?<!^)\b[A-Z][\w'-]+(?: [A-Z][\w'-]+)*", re.MULTILINE)
_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+(.+)$", re.MULTILINE)
_ARTICLE = {"a", "an", "the"}
_SMALL = {"of", "and", "or", "to", "in", "for", "with", "on", "by", "at", "from", "is", "are", "be", "that"}


def normalise(text: str) -> str:
    kept = "".join(mark for mark in text.lower() if mark not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def words_of(text: str) -> list[str]:
    """In lower case, cut at everything else."""
    return _WORD.findall(text.lower())


def exact_match(answer: str, references: Sequence[str]) -> float:
    return float(normalise(answer) in {normalise(one) for one in references})


def numbers_in(text: str) -> list[float]:
    found = _NUMBER.findall(_HEADING.sub("", text))
    return [float(re.sub(r"[$€£,]", "", number).replace("\u2212", "-")) for number in found]


def number_of(reference: str) -> float:
    """The one number of a reference, behind GSM8K's "####" where that is. Raises ValueError."""
    found = numbers_in(reference.rpartition("####")[2])
    if len(found) != 1:
        raise ValueError(f"a reference must be a number, not {reference!r}")
    return found[0]


def first_number(answer: str, references: Sequence[str]) -> float:
    """The first number in the answer is one of the references: "Passage [3]." is 3."""
    return float(numbers_in(answer)[:1] in [[number_of(one)] for one in references])


def final_number(answer: str, references: Sequence[str]) -> float:
    """The last number in the answer is the reference, as GSM8K is scored."""
    return float(numbers_in(answer)[-1:] in [[number_of(one)] for one in references])


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Words shared with the nearest reference."""
    return max((_f1(normalise(answer).split(), normalise(one).split()) for one in references), default=0.0)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    words = words_of(answer)
    return max((_subsequence_f1(words, words_of(one)) for one in references), default=0.0)


def coverage(answer: str, dimensions: Sequence[str]) -> float:
    """Share of the dimensions of which every word that says something stands in the answer."""
    there = set(words_of(answer))
    asked = [words for words in ({*words_of(one)} - _ARTICLE - _SMALL for one in dimensions) if words]
    return sum(words <= there for words in asked) / len(asked) if asked else 0.0


def dimensions_of(question: str) -> tuple[str, ...]:
    """What a planning question asks to be respected, as far as its form tells: the items of its lists, and
    the amounts, dates and names in it. A proxy: it says whether they are mentioned, not whether well.
    """
    items = [item.strip() for item in _ITEM.findall(question)]
    rest = _ITEM.sub("", question)
    return tuple(dict.fromkeys((*items, *_NAME.findall(rest), *_AMOUNT.findall(rest))))


def _f1(ours: Sequence[str], theirs: Sequence[str]) -> float:
    return _harmonic(sum((Counter(ours) & Counter(theirs)).values()), len(ours), len(theirs))


def _subsequence_f1(ours: Sequence[str], theirs: Sequence[str]) -> float:
    row = [0] * (len(theirs) + 1)
    for word in ours:
        before = row
        row = [0]
        for place, other in enumerate(theirs):
            row.append(before[place] + 1 if word == other else max(before[place + 1], row[-1]))
    return _harmonic(row[-1], len(ours), len(theirs))


def _harmonic(common: int, ours: int, theirs: int) -> float:
    return 2 * common / (ours + theirs) if common else 0.0
