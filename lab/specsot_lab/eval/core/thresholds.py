"""From scores of labelled prompts to a threshold: what it lets through, by category."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

FALSE_PLANS = 0.02  # share of the prompts for one answer that may score as high as the threshold
LEAST_FOUND = 0.1  # share of the prompts for several points that must; fewer are not worth a lap


@dataclass(frozen=True, slots=True)
class Scored:
    """A labelled prompt. planned: whether it asks for several points. rule: what the rules say, None where
    none holds. score: None where the model gave none."""

    category: str
    planned: bool
    rule: bool | None
    score: float | None

    def passes(self, threshold: float | None) -> bool:
        return threshold is not None and self.score is not None and self.score >= threshold

    def decided(self, threshold: float | None) -> bool:
        """As the router does it: by the rules, then by the score."""
        return self.passes(threshold) if self.rule is None else self.rule


def auc(prompts: Sequence[Scored]) -> float:
    """The chance that a prompt for several points scores higher than one for one answer; ties count half."""
    low = sorted(_scores(prompts, planned=False))
    high = _scores(prompts, planned=True)
    if not low or not high:
        return 0.5
    below = [bisect_left(low, score) + sum(one == score for one in low) / 2 for score in high]
    return fmean(below) / len(low)


def threshold_of(prompts: Sequence[Scored]) -> float | None:
    """The lowest that lets through so few prompts for one answer; halfway to the next prompt below, so that
    what was measured stands off from it. None: it would find too few of the others.
    """
    low = sorted(_scores(prompts, planned=False), reverse=True)
    high = _scores(prompts, planned=True)
    allowed = int(FALSE_PLANS * len(low))
    if not high or allowed >= len(low):
        return None
    first_refused = low[allowed]
    above = [score for score in (*low[:allowed], *high) if score > first_refused]
    if not above:
        return None
    threshold = round((first_refused + min(above)) / 2, 2)
    threshold = threshold if threshold > first_refused else min(above)
    return threshold if fmean(score >= threshold for score in high) >= LEAST_FOUND else None


def rows_of(prompts: Sequence[Scored], threshold: float | None) -> list[dict[str, object]]:
    """By category: the share that is planned by the rules alone, by the score alone, and by both in turn."""
    rows: list[dict[str, object]] = []
    for name in dict.fromkeys(one.category for one in prompts):
        mine = [one for one in prompts if one.category == name]
        rows.append(
            {
                "category": name,
                "prompts": len(mine),
                "rules": fmean(one.rule is True for one in mine),
                "undecided": fmean(one.rule is None for one in mine),
                "score": fmean(one.passes(threshold) for one in mine),
                "router": fmean(one.decided(threshold) for one in mine),
            }
        )
    return rows


def _scores(prompts: Sequence[Scored], planned: bool) -> list[float]:
    return [one.score for one in prompts if one.planned is planned and one.score is not None]
