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

# English articles as whole words, which SQuAD's evaluation drops.
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# A number with its sign and currency.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-\u2212])?[$€£]?"  # "10-3" has no negative number
    r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\w)\.\d+)"  # "1,2,3" are three
)
# The number of a plan's heading, which is not part of an answer.
_HEADING = re.compile(r"^## \d+\. ", re.MULTILINE)
# A run of letters and digits.
_WORD = re.compile(r"[^\W_]+")
# An amount, a date or a time: "$1,200", "10.5", "8am".
_AMOUNT = re.compile(r"\$?\b\d[\w,.]*\w|\$?\b\d")
# A name: capitalised words that do not begin a sentence or a line.
_NAME = re.compile(r"(?<![.!?:\n] )(?<!^)\b[A-Z][\w'-]+(?: [A-Z][\w'-]+)*", re.MULTILINE)
# An item of a list, without its bullet or number.
_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+(.+)$", re.MULTILINE)
# Articles, which say nothing of a dimension.
_ARTICLE_WORDS = {"a", "an", "the"}
# Small words that say nothing of a dimension.
_FUNCTION_WORDS = {
    "of",
    "and",
    "or",
    "to",
    "in",
    "for",
    "with",
    "on",
    "by",
    "at",
    "from",
    "is",
    "are",
    "be",
    "that",
}


def normalise(text: str) -> str:
    """Return the text in lower case, without punctuation and English articles, with single spaces, as SQuAD's
    evaluation does.

    text: An answer or a reference.
    """
    letters = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", letters).split())


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case and in order: its runs of letters and digits. Return an empty
    list for a text without any.

    text: Any text.
    """
    return _WORD.findall(text.lower())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1.0 if the answer equals one of the references after `normalise`; else, and without references,
    0.0.

    answer: The text of the answer.
    references: The right answers.
    """
    return float(normalise(answer) in {normalise(reference) for reference in references})


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a text in order, without those of a plan's headings: "$1,200 and -3" -> [1200,
    -3]. Return an empty list for a text without numbers.

    text: An answer or a reference.
    """
    numbers = _NUMBER.findall(_HEADING.sub("", text))
    return [float(re.sub(r"[$€£,]", "", number).replace("\u2212", "-")) for number in numbers]


def number_of(reference: str) -> float:
    """Return the only number of a reference; if the reference contains GSM8K's "####", only what follows is
    read.

    reference: One right answer.
    Raises ValueError if there is no number, or more than one.

    The error names the whole reference. The numbers of a plan's headings are not read.
    """
    numbers = numbers_in(reference.rpartition("####")[2])
    if len(numbers) != 1:
        raise ValueError(f"a reference must be a number, not {reference!r}")
    return numbers[0]


def first_number(answer: str, references: Sequence[str]) -> float:
    """Return 1.0 if the first number in the answer is one of the references, as in "Passage [3]." for 3; else
    0.0.

    answer: The text of the answer.
    references: The right answers, each with one number. A reference without one raises ValueError.
    """
    return float(numbers_in(answer)[:1] in [[number_of(reference)] for reference in references])


def final_number(answer: str, references: Sequence[str]) -> float:
    """Return 1.0 if the last number in the answer is one of the references, as GSM8K is scored; else 0.0.

    answer: The text of the answer.
    references: The right answers, each with one number. A reference without one raises ValueError.
    """
    return float(numbers_in(answer)[-1:] in [[number_of(reference)] for reference in references])


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Return the highest F1 of words that the answer shares with one of the references, 0 to 1; 0.0 without
    references.

    answer: The text of the answer.
    references: The right answers.
    """
    return max(
        (_f1(normalise(answer).split(), normalise(reference).split()) for reference in references),
        default=0.0,
    )


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """Return the highest ROUGE-L of the answer with one of the references, 0 to 1; 0.0 without references.

    answer: The text of the answer.
    references: The right answers.
    """
    words = words_of(answer)
    return max((_subsequence_f1(words, words_of(reference)) for reference in references), default=0.0)


def coverage(answer: str, dimensions: Sequence[str]) -> float:
    """Return the fraction of the dimensions that the answer mentions: those of which it has every word,
    articles and small function words aside. Return 0.0 if no dimension has other words.

    answer: The text of the answer.
    dimensions: Phrases that a good plan speaks of, such as a date or a name.

    A dimension that consists of such small words alone is left out. The order of the words does not matter.
    """
    answer_words = set(words_of(answer))
    dimension_words = [
        words
        for words in ({*words_of(dimension)} - _ARTICLE_WORDS - _FUNCTION_WORDS for dimension in dimensions)
        if words
    ]
    return (
        sum(words <= answer_words for words in dimension_words) / len(dimension_words)
        if dimension_words
        else 0.0
    )


def dimensions_of(question: str) -> tuple[str, ...]:
    """Return what a planning question asks to be respected, as far as its form shows: the items of its lists,
    then the names, then the amounts and dates in its other lines; each once. Return an empty tuple if the
    question has none of them.

    These phrases are a proxy. They show whether something is mentioned, not whether it is planned well.

    question: The words of the question.

    Names are capitalised words that do not begin a sentence or a line; amounts begin with a digit or with
    "$". The order is that of the question within each kind.
    """
    items = [item.strip() for item in _ITEM.findall(question)]
    other_text = _ITEM.sub("", question)
    return tuple(dict.fromkeys((*items, *_NAME.findall(other_text), *_AMOUNT.findall(other_text))))


def _f1(answer_words: Sequence[str], reference_words: Sequence[str]) -> float:
    """Return the F1 of the words that two texts share, where a repeated word counts as often as both have it;
    0.0 if none is shared.

    answer_words: The words of the answer.
    reference_words: The words of one reference.
    """
    return _harmonic(
        sum((Counter(answer_words) & Counter(reference_words)).values()),
        len(answer_words),
        len(reference_words),
    )


def _subsequence_f1(answer_words: Sequence[str], reference_words: Sequence[str]) -> float:
    """Return the F1 of the longest common subsequence of two lists of words; 0.0 if none is shared.

    answer_words: The words of the answer.
    reference_words: The words of one reference.

    The result is 0.0 also if one of the lists is empty. Words need not be next to each other, only in the
    same order.
    """
    row = [0] * (len(reference_words) + 1)
    for word in answer_words:
        previous = row
        row = [0]
        for index, other in enumerate(reference_words):
            row.append(previous[index] + 1 if word == other else max(previous[index + 1], row[-1]))
    return _harmonic(row[-1], len(answer_words), len(reference_words))


def _harmonic(num_common: int, num_answer_words: int, num_reference_words: int) -> float:
    """Return the F1, which is the harmonic mean of precision and recall; 0.0 if nothing is in common.

    num_common: Number of words in common.
    num_answer_words: Number of words of the answer.
    num_reference_words: Number of words of the reference.
    """
    return 2 * num_common / (num_answer_words + num_reference_words) if num_common else 0.0
