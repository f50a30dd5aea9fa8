"""Aspects of a question: words on which its sampled direct answers agree, and how many of them an answer has.

The measure, fixed before anything was measured with it:

* A term is a word of three letters or more, in lower case, its plural folded (Harman 1991): made for
  languages that put spaces between words.
* An aspect is a term that at least two of the sampled answers have and the question has not. A term that is
  an aspect of more than one question in eight is none of any ("the", "important"). So no list of stop words
  is needed, but some 16 questions are.
* Coverage is the share of a question's aspects that an answer has. It rewards breadth; order, truth and style
  it does not see. Aspects come from direct answers, so it leans towards direct ones.
* The control has the plan's own headings over the points of another question of the same category. It must
  lose against the planned answer; where it does not, the measure says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specsot_lab.eval.scoring import words_of

AGREEING = 2  # sampled answers that must have a term
COMMON = 8  # a term that more than one in so many questions have is no aspect
SHORTEST = 3  # letters of a term
DRAWS = 10_000  # of the bootstrap
INSIDE = 0.95  # of its interval

Terms = frozenset[str]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PlannedAnswer:
    """An answer of mode sot: headings and bodies of its points. No points: `text` is a direct answer."""

    text: str
    headings: tuple[str, ...] = ()
    bodies: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Of which each is cut by itself."""
        return tuple(map("{}\n{}".format, self.headings, self.bodies)) or (self.text,)


def singular(word: str) -> str:
    """The S-stemmer of Harman (1991): of its three rules, the first whose ending a word has."""
    if word.endswith("ies"):
        return word if word.endswith(("eies", "aies")) else f"{word[:-3]}y"
    if word.endswith("es"):
        return word if word.endswith(("aes", "ees", "oes")) else word[:-1]
    return word[:-1] if word.endswith("s") and not word.endswith(("us", "ss")) else word


def terms_of(text: str) -> Terms:
    return frozenset(singular(word) for word in words_of(text) if len(word) >= SHORTEST and word.isalpha())


def aspects_of(questions: Mapping[str, str], samples: Mapping[str, Sequence[str]]) -> dict[str, Terms]:
    """Of every question, by its name. samples: the texts of its sampled direct answers."""
    agreed = {name: _agreed(samples[name]) - terms_of(question) for name, question in questions.items()}
    spread = Counter(term for terms in agreed.values() for term in terms)
    common = {term for term, count in spread.items() if count * COMMON > len(questions)}
    return {name: terms - common for name, terms in agreed.items()}


def _agreed(texts: Sequence[str]) -> Terms:
    count = Counter(term for text in texts for term in terms_of(text))
    return frozenset(term for term, times in count.items() if times >= AGREEING)


def coverage(parts: Sequence[str], aspects: Terms) -> float:
    """Share of the aspects, of which there must be some, that an answer has."""
    return len(aspects & terms_of("\n".join(parts))) / len(aspects)


def length_of(parts: Sequence[str]) -> int:
    """In words."""
    return sum(len(part.split()) for part in parts)


def cut(parts: Sequence[str], words: int) -> list[str]:
    """As many words as there may be, shared out evenly: what a short part leaves over is for the others."""
    split, shares, left = [part.split() for part in parts], [0] * len(parts), words
    for before, place in enumerate(sorted(range(len(parts)), key=lambda place: len(split[place]))):
        shares[place] = min(len(split[place]), left // (len(parts) - before))
        left -= shares[place]
    return [" ".join(part[:share]) for part, share in zip(split, shares)]


def shuffled(
    answers: Mapping[str, PlannedAnswer], categories: Mapping[str, str], seed: int = 0
) -> dict[str, PlannedAnswer]:
    """The control, of every answer that has points: under its own headings those of the next one in a random
    ring of its category, from the first again where there are fewer. Answers that are alone in their category
    form a ring together.
    """
    rings: dict[str, list[str]] = {}
    for name in answers:
        if answers[name].bodies:
            rings.setdefault(categories[name], []).append(name)
    alone = [name for ring in rings.values() if len(ring) == 1 for name in ring]
    found: dict[str, PlannedAnswer] = {}
    for ring in (*rings.values(), alone):
        if len(ring) < 2:
            continue
        order = [ring[place] for place in np.random.default_rng(seed).permutation(len(ring))]
        for name, other in zip(order, (*order[1:], *order[:1])):
            found[name] = _under(answers[name], answers[other].bodies)
    return found


def _under(answer: PlannedAnswer, bodies: Sequence[str]) -> PlannedAnswer:
    borrowed = tuple(bodies[place % len(bodies)] for place in range(len(answer.headings)))
    return PlannedAnswer("\n".join(borrowed), answer.headings, borrowed)


def interval_of(values: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0) -> Interval:
    """Of the (weighted) mean over questions, by the percentile bootstrap (Efron 1979)."""
    drawn = np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))
    heavy = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    means = (np.asarray(values) * heavy)[drawn].sum(axis=1) / heavy[drawn].sum(axis=1)
    low, high = np.quantile(means, ((1 - INSIDE) / 2, (1 + INSIDE) / 2))
    return float(low), float(high)


def repetition(text: str, size: int = 4) -> float:
    """Share of a text's n-grams of words that stand in it before (Welleck et al. 2019, seq-rep-4)."""
    words = words_of(text)
    grams = [tuple(words[place : place + size]) for place in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
