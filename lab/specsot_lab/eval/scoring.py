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
    """Return the text in lower case, without punctuation and articles, with single spaces, as SQuAD's
    evaluation does.
    """
    letters = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", letters).split())


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case: its runs of letters and digits."""
    return _WORD.findall(text.lower())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1.0 if the answer is one of the references, both normalised; else 0.0."""
    return float(normalise(answer) in {normalise(reference) for reference in references})


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a text in order, without those of a plan's headings: "$1,200 and -3" -> [1200,
    -3].
    """
    found = _NUMBER.findall(_HEADING.sub("", text))
    return [float(re.sub(r"[$€£,]", "", number).replace("\u2212", "-")) for number in found]


def number_of(reference: str) -> float:
    """Return the one number of a reference, after GSM8K's "####" where that is present. Raises ValueError for
    none or several.
    """
    found = numbers_in(reference.rpartition("####")[2])
    if len(found) != 1:
        raise ValueError(f"a reference must be a number, not {reference!r}")
    return found[0]


def first_number(answer: str, references: Sequence[str]) -> float:
    """Return 1.0 if the first number in the answer is one of the references: "Passage [3]." is 3;
    else 0.0.
    """
    return float(numbers_in(answer)[:1] in [[number_of(reference)] for reference in references])


def final_number(answer: str, references: Sequence[str]) -> float:
    """Return 1.0 if the last number in the answer is one of the references, as GSM8K is scored; else 0.0."""
    return float(numbers_in(answer)[-1:] in [[number_of(reference)] for reference in references])


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Return the F1 of the words shared with the nearest reference; 0 without references."""
    return max(
        (_f1(normalise(answer).split(), normalise(reference).split()) for reference in references),
        default=0.0,
    )


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """Return the ROUGE-L of the answer to the nearest reference; 0 without references."""
    words = words_of(answer)
    return max((_subsequence_f1(words, words_of(reference)) for reference in references), default=0.0)


def coverage(answer: str, dimensions: Sequence[str]) -> float:
    """Return the fraction of the dimensions of which the answer has every word that says something; 0 without
    dimensions.
    """
    answer_words = set(words_of(answer))
    dimension_words = [
        words for words in ({*words_of(dimension)} - _ARTICLE - _SMALL for dimension in dimensions) if words
    ]
    return (
        sum(words <= answer_words for words in dimension_words) / len(dimension_words)
        if dimension_words
        else 0.0
    )


def dimensions_of(question: str) -> tuple[str, ...]:
    """Return what a planning question asks to be respected, as far as its form tells: the items of its lists,
    and the amounts, dates and names in it.

    This is a proxy: it says whether they are mentioned, not whether well.
    """
    items = [item.strip() for item in _ITEM.findall(question)]
    other_text = _ITEM.sub("", question)
    return tuple(dict.fromkeys((*items, *_NAME.findall(other_text), *_AMOUNT.findall(other_text))))


def _f1(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Return the F1 of the words that both lists share, repetitions counted."""
    return _harmonic(sum((Counter(ours) & Counter(theirs)).values()), len(ours), len(theirs))


def _subsequence_f1(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Return the F1 of the longest common subsequence of two lists of words."""
    row = [0] * (len(theirs) + 1)
    for word in ours:
        previous = row
        row = [0]
        for index, other in enumerate(theirs):
            row.append(previous[index] + 1 if word == other else max(previous[index + 1], row[-1]))
    return _harmonic(row[-1], len(ours), len(theirs))


def _harmonic(common: int, ours: int, theirs: int) -> float:
    """Return the F1 of `common` elements in lists of `ours` and `theirs`; 0 for none in common."""
    return 2 * common / (ours + theirs) if common else 0.0
