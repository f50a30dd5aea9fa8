"""What can be said of a plan without a judge: repeated and copied titles, points that overlap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

from specsot_lab.eval.scoring import rouge_l, words_of


def distinct(titles: Sequence[str]) -> int:
    """How many of a plan's titles are no repetition of one before it, whatever their case and punctuation."""
    return len({tuple(words_of(title)) for title in titles})


def copied(titles: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Titles whose words stand in this order in a source: the question, or what the model was told."""
    there = [f" {' '.join(words_of(source))} " for source in sources]
    return [title for title in titles if any(f" {' '.join(words_of(title))} " in source for source in there)]


def overlap(bodies: Sequence[str]) -> float | None:
    """ROUGE-L between the points of an answer, the mean over all pairs. None: there is no pair."""
    pairs = list(combinations(bodies, 2))
    return fmean(rouge_l(one, [other]) for one, other in pairs) if pairs else None
