"""Turns answers into the rows of a table: rates, latencies, gains of drafts, memory, each against the
baseline.

docs/bench.md defines each column.
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
class StepSample:
    """The state of an answer after one step, counted from the answer's beginning.

    seconds: since the request.
    tokens: tokens written, those of a plan included.
    grown: how many of them were written by steps with trees (prompts excluded).
    steps: steps of the base after the prompts.
    proposed: drafted tokens; None if unknown.
    accepted: accepted drafts; None if unknown.
    held: most bytes that the method held: KV pages, and the drafter with its own.
    evictions: how often a window returned pages.
    evicted: tokens that have left the window.
    """

    seconds: float
    tokens: int
    grown: int
    steps: int
    proposed: int | None = None
    accepted: int | None = None
    held: int = 0
    evictions: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Excerpt:
    """An answer up to a length.

    tokens: number of its tokens.
    seconds: when the last of them was written.
    first: when the first one was written.
    moment: the state of the answer then.
    text: the token ids.
    """

    tokens: int
    seconds: float
    first: float
    moment: StepSample
    text: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Return tokens a second, from the request on."""
        return self.tokens / self.seconds

    @property
    def per_token(self) -> float:
        """Return the seconds of a token after the first (TPOT)."""
        return (self.seconds - self.first) / max(self.tokens - 1, 1)

    @property
    def per_step(self) -> float | None:
        """Return the tokens of a step, of all branches together; None without steps."""
        return self.moment.grown / self.moment.steps if self.moment.steps else None


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole answer.

    moments: one sample a step, in order.
    text: token ids of the answer.
    seconds: duration of the request.
    planned: whether the answer was written in branches.
    prompt: token ids of the prompt.
    """

    moments: tuple[StepSample, ...]
    text: tuple[int, ...]
    seconds: float
    planned: bool = False
    prompt: tuple[int, ...] = field(default=(), repr=False)

    def up_to(self, tokens: int) -> Excerpt:
        """Return the answer when at least so many tokens were written; a planned answer at its end.

        With steps that end at 1, 3, 6 tokens, up_to(4) is the state at 6 tokens.
        """
        first, last = self.moments[0].seconds, self.moments[-1]
        if self.planned:
            return Excerpt(len(self.text), self.seconds, first, last, self.text)
        then = next((one for one in self.moments if one.tokens >= tokens), last)
        return Excerpt(then.tokens, then.seconds, first, then, self.text[: then.tokens])


@dataclass(frozen=True, slots=True)
class Runs:
    """One method at one length.

    method: the method.
    tokens: the length.
    readings: one excerpt a round.
    prompts: one prompt a round.
    """

    method: Method
    tokens: int
    readings: tuple[Excerpt, ...]
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the table's row."""
        return name_of(self.method, self.tokens)


@dataclass(frozen=True, slots=True)
class Perplexities:
    """Perplexities under the base without a window; None if not measured.

    own: of what was written, after its prompt.
    reference: of a given text, read under the method's window.
    """

    own: float | None = None
    reference: float | None = None


def committed_by(segment: Segment) -> int:
    """Return the sequence's tokens that are certain when this segment is computed."""
    return segment.start + len(segment.tokens) if isinstance(segment, PromptChunk) else segment.committed


def evicted_by(policy: Policy | None, tokens: int) -> int:
    """Return how many of so many tokens have left the window, whether or not their page is free already."""
    return max(0, tokens - policy.sinks - policy.recent) if isinstance(policy, Window) else 0


def name_of(method: Method, tokens: int) -> str:
    """Return the name of a row, the same in every run."""
    return f"{method.name}, {tokens} tokens"


def skipped(method: Method, tokens: int, why: str) -> dict[str, object]:
    """Return the row of a method that was not measured."""
    return {"name": name_of(method, tokens), "method": method.name, "tokens": tokens, "skipped": why}


def unwritten(
    course: MethodTable, broken: Mapping[tuple[str, int], str], missing: Collection[object]
) -> list[dict[str, object]]:
    """Return rows for answers that do not exist, and for the shorter lengths that would have been read off
    them.

    broken: why, by method and requested length. missing: names that have a row already.
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
    """Return a row of the table. plain: the baseline at the same length; a ratio is taken within
    its round.
    """
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
        "tokens_per_round": _mean(one.per_step for one in readings),
        "memory_mib": round(max(one.held for one in moments) / 2**20, 2),
        "evictions": round(statistics.mean(one.evictions for one in moments), 1),
        "evicted_tokens": round(statistics.mean(one.evicted for one in moments), 1),
        "as_plain": sum(_same(one.text, other.text) for one, other in zip(readings, plain.readings)),
    }


def runs_of(answers: Mapping[tuple[str, int], Sequence[Recording]], course: MethodTable) -> list[Runs]:
    """Return what was measured, by length and then in the methods' order.

    answers: one a round, by method and requested length. Plans were written for every length; of other
        methods only the longest was written, and the shorter ones are its prefixes.
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


def baseline_of(runs: Sequence[Runs], tokens: int) -> Runs:
    """Return the baseline at this length."""
    return next(one for one in runs if one.method.name == PLAIN and one.tokens == tokens)


def perplexity(texts: Iterable[Sequence[float]]) -> float | None:
    """Return exp of the mean negative log-likelihood over the tokens of all texts; None without tokens."""
    listed = [loss for text in texts for loss in text]
    return math.exp(statistics.mean(listed)) if listed else None


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether both answers are equal as far as both go; the last step of one may have written more."""
    return all(a == b for a, b in zip(one, other))


def _percent(drafts: Sequence[tuple[int | None, int | None]]) -> float | None:
    """Return accepted drafts as a percentage of proposed drafts; the bonus token counts as neither."""
    told = [(accepted, proposed) for accepted, proposed in drafts if accepted is not None and proposed]
    if not told:
        return None
    return round(100 * sum(one for one, _ in told) / sum(one or 0 for _, one in told), 1)


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values, or None."""
    told = [value for value in values if value is not None]
    return round(statistics.mean(told), 2) if told else None


def _ms(seconds: Iterable[float]) -> float:
    """Return the mean in milliseconds."""
    return round(1000 * statistics.mean(seconds), 3)


def _rounded(value: float | None) -> float | None:
    """Return the value rounded to three digits, or None."""
    return None if value is None else round(value, 3)
