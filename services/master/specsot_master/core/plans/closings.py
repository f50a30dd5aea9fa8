"""Which closings are shown: a closing concludes, and neither lists the points nor repeats the introduction.

The closing is written at the same time as the points, from their titles alone, so that a small model likes to
list them: "By setting goals, taking breaks and staying organized, you can ...". Such a closing says nothing
that the headings do not say, and an answer is better without it. So a closing is shown only when it is
complete, and if `ClosingRule.allows` it. The rule reads the closing's own text, the titles, the question and
the introduction, which depend on tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from specsot_master.core.plans.guards import Stems
from specsot_master.core.plans.openings import opening_of, speaks_of_itself
from specsot_master.core.plans.repetition import ngrams_of
from specsot_master.core.plans.sentences import ends_sentence
from specsot_master.core.plans.wording import DEFAULT_SENTENCES, language_of

# Fraction of the titles. A closing that names more than one title, and at least this fraction of all, counts
# as a list of the points. Chosen by reading: of 30 closings, those that named two of five or three of seven
# titles said something else as well.
LISTED_TITLES: Final = 0.5
# Words with which no closing begins. Chosen by measurement: asked for a final piece of advice,
# Qwen2.5-Coder-1.5B-Instruct begins more closings with "Always" than with any other word, whatever the
# question is. The others begin a series, which a closing ends.
STOCK_WORDS: Final = ("Always", "First", "Zuerst", "Primero", "首先")
# A closing that has one of these announces or quotes something: "The last sentence is: ...".
_ANNOUNCING: Final = (":", "：", '"', "“", "„", "«")


@dataclass(frozen=True, slots=True)
class ClosingRule:
    """Decides whether a closing is shown.

    question: the text that the client asks; "" if it is not given as text.
    introduction: the text before the first point; "" for none.
    titles: the titles of the points.
    """

    question: str = ""
    introduction: str = ""
    titles: tuple[str, ...] = ()

    def allows(self, text: str) -> bool:
        """Return True if a closing may be shown: it ends with a whole sentence, has no colon and no
        quotation, does not speak of itself or of its heading, names at most one title or fewer than
        LISTED_TITLES of all titles, and does not repeat the introduction (`repetition`), except for what the
        introduction has from the question.

            titles "Set goals", "Take breaks": "Start with goals." -> True, it names one
            "Set goals and take breaks." -> False, it names two of two
            "The last sentence is: Rest." -> False, it has a colon

        text: the whole text of the closing.
        """
        if not ends_sentence(text) or any(mark in text for mark in _ANNOUNCING):
            return False
        if speaks_of_itself(opening_of(text, whole=True) or ""):
            return False
        stems = Stems(self.question, ())
        words = stems.of(text)
        heading = stems.of(DEFAULT_SENTENCES[language_of(self.question)].conclusion)
        if set(heading) <= set(words):
            return False
        named = self.num_named(words, stems)
        lists = named > 1 and named >= LISTED_TITLES * len(self.titles)
        said = ngrams_of(stems.of(self.introduction)) - ngrams_of(stems.of(self.question))
        return not lists and not ngrams_of(words) & said

    def num_named(self, words: Sequence[str], stems: Stems) -> int:
        """Return how many titles a text names. A title is named if at least half of its own words occur:
        those that neither the question nor another title has, and that do not only connect. A title without
        words of its own is never named.
        words: the stems of the text.
        stems: the stems of the question.
        """
        titles = [set(stems.of(title)) for title in self.titles]
        known = set(words)
        own = [
            title - set(stems.question) - stems.joints - set().union(*titles[:at], *titles[at + 1 :])
            for at, title in enumerate(titles)
        ]
        return sum(bool(some) and 2 * len(some & known) >= len(some) for some in own)
