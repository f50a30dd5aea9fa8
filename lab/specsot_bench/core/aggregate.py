"""From answers to the rows of a table: rates, waits, what drafts brought, what was held, against plain.

What each column means: docs/bench.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specsot.core.frames import PromptChunk, Segment
from specsot.core.pages import Policy
from specsot.params import Window
from specsot_bench.core.methods import PLAIN, Method, MethodTable


@dataclass(frozen=True, slots=True)
class LapSample:
    """How far an answer was behind one lap; all is counted from its beginning.

    tokens:    written, those of a plan included. grown: those of them that trees brought.
    laps:      of the base, behind prompts. proposed, accepted: drafted tokens; None: nobody tells.
    held:      bytes that the method held at most: KV pages, and what drafts with its own.
    evictions: how often a window gave pages back. evicted: tokens that have left the window.
    """

    seconds: float
    tokens: int
    grown: int
    laps: int
    proposed: int | None = None
    accepted: int | None = None
    held: int = 0
    evictions: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Excerpt:
    """An answer up to a length: its tokens, their seconds, the first one's, and the moment itself."""

    tokens: int
    seconds: float
    first: float
    moment: LapSample
    text: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Tokens a second, from the call on."""
        return self.tokens / self.seconds

    @property
    def per_token(self) -> float:
        """Seconds of a token behind the first: TPOT."""
        return (self.seconds - self.first) / max(self.tokens - 1, 1)

    @property
    def per_lap(self) -> float | None:
        """Tokens that a lap brought; of all branches, where there are several."""
        return self.moment.grown / self.moment.laps if self.moment.laps else None


@dataclass(frozen=True, slots=True)
class Recording:
    """moments: one a lap, in order. text: of the answer itself. planned: it was written in branches."""

    moments: tuple[LapSample, ...]
    text: tuple[int, ...]
    seconds: float
    planned: bool = False
    prompt: tuple[int, ...] = field(default=(), repr=False)

    def up_to(self, tokens: int) -> Excerpt:
        """As it stood when so many tokens were written, which may be a few more; a planned one at its end."""
        first, last = self.moments[0].seconds, self.moments[-1]
        if self.planned:
            return Excerpt(len(self.text), self.seconds, first, last, self.text)
        then = next((one for one in self.moments if one.tokens >= tokens), last)
        return Excerpt(then.tokens, then.seconds, first, then, self.text[: then.tokens])


@dataclass(frozen=True, slots=True)
class Runs:
    """One method at one length: of every round, in order, the reading and the question as a prompt."""

    method: Method
    tokens: int
    readings: tuple[Excerpt, ...]
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.method, self.tokens)


@dataclass(frozen=True, slots=True)
class Perplexities:
    """Perplexities, as the base sees them without a window; None: not measured.

    own: of what was written, behind its prompt. reference: of a given text, read as the method reads.
    """

    own: float | None = None
    reference: float | None = None


def committed_by(segment: Segment) -> int:
    """Tokens of the sequence that are certain when this segment is computed."""
    return segment.start + len(segment.tokens) if isinstance(segment, PromptChunk) else segment.committed


def evicted_by(policy: Policy | None, tokens: int) -> int:
    """How many of so many tokens have left the window, whether or not their page is free already."""
    return max(0, tokens - policy.sinks - policy.recent) if isinstance(policy, Window) else 0


def name_of(method: Method, tokens: int) -> str:
    """Of a row; the same in every run."""
    return f"{method.name}, {tokens} tokens"


def skipped(method: Method, tokens: int, why: str) -> dict[str, object]:
    return {"name": name_of(method, tokens), "method": method.name, "tokens": tokens, "skipped": why}


def unwritten(
    course: MethodTable, broken: Mapping[tuple[str, int], str], missing: Collection[object]
) -> list[dict[str, object]]:
    """Rows of answers that are not there, and of all that would have been read off them.

    broken: why, by method and the length that was asked for. missing: names that have a row already.
    """
    found: list[dict[str, object]] = []
    for method in course.methods:
        for tokens in course.lengths_of(method):
            whys = [why for (name, asked), why in broken.items()
                    if name == method.name and (asked == tokens or not method.planned)]  # fmt: skip
            if whys and name_of(method, tokens) not in missing:
                found.append(skipped(method, tokens, whys[0]))
    return found


def row_of(runs: Runs, plain: Runs, quality: Perplexities) -> dict[str, object]:
    """plain: of the same length; a round's ratio is taken within the round."""
    readings = runs.readings
    method = runs.method
    rates = [one.rate for one in readings]
    ratios = [one.rate / other.rate for one, other in zip(readings, plain.readings)]
    moments = [one.moment for one in readings]
    return {
        "name": runs.name,
        "method": method.name,
        "tokens": runs.tokens,
        "rival": method.rival is not None,
        "exact": method.exact and method.rival is None,
        "runs": len(readings),
        "tokens_per_second": round(statistics.mean(rates), 2),
        "tokens_per_second_sd": round(statistics.stdev(rates), 2) if len(rates) > 1 else None,
        "speedup": round(statistics.median(ratios), 3),
        "speedup_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "ttft_ms": _ms(one.first for one in readings),
        "tpot_ms": _ms(one.per_token for one in readings),
        "ppl": _rounded(quality.own),
        "ppl_reference": _rounded(quality.reference),
        "accept_percent": _percent([(one.accepted, one.proposed) for one in moments]),
        "tokens_per_round": _mean(one.per_lap for one in readings),
        "memory_mib": round(max(one.held for one in moments) / 2**20, 2),
        "evictions": round(statistics.mean(one.evictions for one in moments), 1),
        "evicted_tokens": round(statistics.mean(one.evicted for one in moments), 1),
        "as_plain": sum(_same(one.text, other.text) for one, other in zip(readings, plain.readings)),
    }


def runs_of(answers: Mapping[tuple[str, int], Sequence[Recording]], course: MethodTable) -> list[Runs]:
    """What was measured, by length and then in the methods' order.

    answers: of each round, by method and the length that was asked for. A plan is asked for every length; of
    others only the longest was written, and the shorter ones are read off it.
    """
    found: list[Runs] = []
    for tokens in course.lengths:
        for method in course.methods:
            asked = [length for name, length in answers if name == method.name]
            longest = max((length for length in asked if tokens in course.lengths_of(method)), default=0)
            wanted = tokens if method.planned else longest
            there = answers.get((method.name, wanted), ()) if tokens <= wanted else ()
            if there:
                prompts = tuple(one.prompt for one in there)
                found.append(Runs(method, tokens, tuple(one.up_to(tokens) for one in there), prompts))
    return found


def plain_of(runs: Sequence[Runs], tokens: int) -> Runs:
    return next(one for one in runs if one.method.name == PLAIN and one.tokens == tokens)


def perplexity(texts: Iterable[Sequence[float]]) -> float | None:
    """exp of the mean negative log-likelihood over the tokens of all texts."""
    listed = [loss for text in texts for loss in text]
    return math.exp(statistics.mean(listed)) if listed else None


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    """As far as both go: the last lap of one may have brought more."""
    return all(a == b for a, b in zip(one, other))


def _percent(drafts: Sequence[tuple[int | None, int | None]]) -> float | None:
    """Accepted of proposed; the bonus token is neither."""
    told = [(accepted, proposed) for accepted, proposed in drafts if accepted is not None and proposed]
    if not told:
        return None
    return round(100 * sum(one for one, _ in told) / sum(one or 0 for _, one in told), 1)


def _mean(values: Iterable[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return round(statistics.mean(told), 2) if told else None


def _ms(seconds: Iterable[float]) -> float:
    return round(1000 * statistics.mean(seconds), 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
