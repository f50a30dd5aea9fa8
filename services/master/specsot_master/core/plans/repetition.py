"""Detects sentences that repeat an earlier part of the answer: they share several words in a row with it.

Branches are decoded without seeing one another, so that several may end with the same sentence ("For example,
if you both enjoy hiking, you could plan a trip"). Sentences are compared by the stems of their words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from specsot_master.core.plans.guards import Stems

# Words, and characters of Han script, in a row. A sentence that shares so many with an earlier part of the
# answer repeats that part. Words chosen by reading answers. Characters chosen by measurement: 12 Chinese
# answers of Qwen2.5-Coder-1.5B-Instruct share 3.0 % of their 4-grams of words with 10, and keep 96 % of their
# text; with 8, it was 2.5 % and 91 %, and 60 % of the points had a single sentence instead of 47 %.
REPEATED_WORDS: Final = 5
REPEATED_CHARACTERS: Final = 10


class RepetitionFilter:
    """The n-grams of an answer so far, by which it tells whether a sentence repeats a part of it.

    question "How do I sleep well?", add("Rest in a dark and quiet room."):
        repeats("Work in a dark and quiet room.") -> True, by "in dark and quiet room" (articles do not count)
        repeats("A quiet room helps.") -> False
    """

    def __init__(self, question: str) -> None:
        """Start with an empty answer.

        question: the text that the client asks, which tells the language; "" if it is not given as text.
        """
        self._stems = Stems(question, ())
        self._ngrams = set[tuple[str, ...]]()

    def add(self, text: str) -> None:
        """Add a part of the answer, with which later sentences are compared.

        text: any text; "" adds nothing.
        """
        self._ngrams |= ngrams_of(self._stems.of(text))

    def repeats(self, text: str) -> bool:
        """Return True if the text shares REPEATED_WORDS words in a row with what was added, or
        REPEATED_CHARACTERS characters of which at least one is of Han script.

        text: a sentence, or several.
        """
        return bool(ngrams_of(self._stems.of(text)) & self._ngrams)


def ngrams_of(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Return the n-grams by which texts are compared: REPEATED_WORDS words in a row without Han script, and
    REPEATED_CHARACTERS in a row with Han script, of which each character is a word. Return an empty set if
    there are fewer words.

    words: the stems of the text.
    """
    found = set[tuple[str, ...]]()
    for size, han in ((REPEATED_WORDS, False), (REPEATED_CHARACTERS, True)):
        ngrams = (tuple(words[at : at + size]) for at in range(len(words) - size + 1))
        found.update(ngram for ngram in ngrams if any(map(_is_han, ngram)) == han)
    return found


def _is_han(word: str) -> bool:
    """Return True if a word begins with a character of Han script, or with one that Unicode places later.

    word: a word, not empty.
    """
    return word > "\u3400"
