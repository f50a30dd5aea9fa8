"""Turns answers into the rows of a table: rates, latencies, gains of drafts, memory, each against the
baseline.

docs/lab.md defines each column.
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

    seconds: Seconds since the request was sent.
    tokens: Tokens written, those of a plan included.
    grown: Number of the tokens that were written by steps with trees; prompts are excluded.
    steps: Number of steps of the base after the prompts.
    proposed: Drafted tokens; None if unknown.
    accepted: Accepted drafts; None if unknown.
    held: Maximum bytes that the method held so far: KV pages, and the drafter with its own.
    evictions: Number of times that a window returned pages.
    evicted: Number of tokens that have left the window.
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

    tokens: Number of its tokens.
    seconds: Seconds from the request to the last of these tokens.
    first: Seconds from the request to the first token.
    sample: State of the answer after the step that wrote the last of these tokens.
    token_ids: Token ids of the excerpt.
    """

    tokens: int
    seconds: float
    first: float
    sample: StepSample
    token_ids: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Return the number of tokens a second, from the request on."""
        return self.tokens / self.seconds

    @property
    def per_token(self) -> float:
        """Return the mean seconds of a token after the first (TPOT). For a single token, the seconds after it
        are returned.
        """
        return (self.seconds - self.first) / max(self.tokens - 1, 1)

    @property
    def per_step(self) -> float | None:
        """Return the tokens of a step, of all branches together; None without steps."""
        return self.sample.grown / self.sample.steps if self.sample.steps else None


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole answer.

    samples: One sample for each step, in order.
    token_ids: Token ids of the answer.
    seconds: Duration of the request.
    planned: True if the answer was written in branches.
    prompt: Token ids of the prompt.
    """

    samples: tuple[StepSample, ...]
    token_ids: tuple[int, ...]
    seconds: float
    planned: bool = False
    prompt: tuple[int, ...] = field(default=(), repr=False)

    def up_to(self, tokens: int) -> Excerpt:
        """Return the answer as it was when at least so many tokens were written; a planned or shorter answer
        is returned at its end.

        With steps that end at 1, 3, 6 tokens, up_to(4) is the state at 6 tokens.

        Raises IndexError if there are no samples.

        tokens: Number of tokens.
        """
        first, last = self.samples[0].seconds, self.samples[-1]
        if self.planned:
            return Excerpt(len(self.token_ids), self.seconds, first, last, self.token_ids)
        sample = next((sample for sample in self.samples if sample.tokens >= tokens), last)
        return Excerpt(sample.tokens, sample.seconds, first, sample, self.token_ids[: sample.tokens])


@dataclass(frozen=True, slots=True)
class Runs:
    """One method at one length.

    method: The method.
    tokens: Number of tokens of the answers.
    excerpts: One excerpt for each round.
    prompts: Token ids of the prompt of each round.
    """

    method: Method
    tokens: int
    excerpts: tuple[Excerpt, ...]
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the table's row."""
        return name_of(self.method, self.tokens)


@dataclass(frozen=True, slots=True)
class Perplexities:
    """Perplexities under the base without a window; None if not measured.

    own: Perplexity of the text that the method wrote, after its prompt.
    reference: Perplexity of a given text, read under the method's window.
    """

    own: float | None = None
    reference: float | None = None


def committed_by(segment: Segment) -> int:
    """Return how many of a sequence's tokens are certain when a segment is computed: those before a tree, or
    a prompt chunk and all before it.

    segment: A tree or a prompt chunk of the frame.
    """
    return segment.start + len(segment.tokens) if isinstance(segment, PromptChunk) else segment.committed


def evicted_by(policy: Policy | None, num_tokens: int) -> int:
    """Return how many tokens of a sequence have left its window, whether or not their page is free already; 0
    for a policy that is no window.

    policy: The sequence's KV policy; None: every position is kept.
    num_tokens: Number of tokens of the sequence.
    """
    return max(0, num_tokens - policy.sinks - policy.recent) if isinstance(policy, Window) else 0


def name_of(method: Method, tokens: int) -> str:
    """Return the name of a row, the same in every run: "tree V1 D=5 B=2, 500 tokens".

    method: The method.
    tokens: Number of tokens of each answer.
    """
    return f"{method.name}, {tokens} tokens"


def skipped(method: Method, tokens: int, reason: str) -> dict[str, object]:
    """Return the row of a method that was not measured.

    The row has the keys "name", "method", "tokens" and "skipped".

    method: The method.
    tokens: Number of tokens of each answer.
    reason: Why it was not measured, in words.
    """
    return {"name": name_of(method, tokens), "method": method.name, "tokens": tokens, "skipped": reason}


def unwritten(
    table: MethodTable, failures: Mapping[tuple[str, int], str], existing_names: Collection[object]
) -> list[dict[str, object]]:
    """Return rows for answers that do not exist, and for the shorter lengths that would have been read off
    them.

    A planned method has a row only for the length that failed; any other method has one for each of its
    lengths. If it failed at several lengths, the first reason is used.

    table: Methods and lengths.
    failures: Reasons why there is no answer, by the method's name and the requested length.
    existing_names: Names of rows that exist already; they get no second row.
    """
    rows: list[dict[str, object]] = []
    for method in table.methods:
        for tokens in table.lengths_of(method):
            reasons = [reason for (name, requested), reason in failures.items()
                    if name == method.name and (requested == tokens or not method.planned)]  # fmt: skip
            if reasons and name_of(method, tokens) not in existing_names:
                rows.append(skipped(method, tokens, reasons[0]))
    return rows


def row_of(runs: Runs, baseline: Runs, quality: Perplexities) -> dict[str, object]:
    """Return a row of the table, by the names of its figures. Figures that were not measured are None, and so
    is the standard deviation of a single run.

    Rates are tokens per second, and `speedup` is the median of the ratios to the baseline in the same round.
    "as_plain" is the number of rounds whose tokens equal the baseline's.

    runs: The runs of the method at one length, at least one.
    baseline: The baseline's runs at the same length; a ratio is taken within its round.
    quality: Perplexities of the method.
    """
    excerpts = runs.excerpts
    method = runs.method
    rates = [excerpt.rate for excerpt in excerpts]
    ratios = [
        excerpt.rate / baseline_excerpt.rate for excerpt, baseline_excerpt in zip(excerpts, baseline.excerpts)
    ]
    samples = [excerpt.sample for excerpt in excerpts]
    return {
        "name": runs.name,
        "method": method.name,
        "tokens": runs.tokens,
        "rival": method.rival is not None,
        "exact": method.exact and method.rival is None,
        "runs": len(excerpts),
        "tokens_per_second": round(statistics.mean(rates), 2),
        "tokens_per_second_sd": round(statistics.stdev(rates), 2) if len(rates) > 1 else None,
        "speedup": round(statistics.median(ratios), 3),
        "speedup_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "ttft_ms": _ms(excerpt.first for excerpt in excerpts),
        "tpot_ms": _ms(excerpt.per_token for excerpt in excerpts),
        "ppl": _rounded(quality.own),
        "ppl_reference": _rounded(quality.reference),
        "accept_percent": _percent([(excerpt.accepted, excerpt.proposed) for excerpt in samples]),
        "tokens_per_round": _mean(excerpt.per_step for excerpt in excerpts),
        "memory_mib": round(max(excerpt.held for excerpt in samples) / 2**20, 2),
        "evictions": round(statistics.mean(excerpt.evictions for excerpt in samples), 1),
        "evicted_tokens": round(statistics.mean(excerpt.evicted for excerpt in samples), 1),
        "as_plain": sum(
            _same(excerpt.token_ids, baseline_excerpt.token_ids)
            for excerpt, baseline_excerpt in zip(excerpts, baseline.excerpts)
        ),
    }


def runs_of(answers: Mapping[tuple[str, int], Sequence[Recording]], table: MethodTable) -> list[Runs]:
    """Return the measured runs, by length and then in the methods' order; methods without answers are left
    out.

    A length that is longer than what was written is left out as well.

    answers: Answers by the method's name and requested length, one for each round. Plans were written for
        every length; of other methods only the longest was written, and the shorter ones are its prefixes.
    table: Methods and lengths.
    """
    measured: list[Runs] = []
    for tokens in table.lengths:
        for method in table.methods:
            requested = [length for name, length in answers if name == method.name]
            longest = max((length for length in requested if tokens in table.lengths_of(method)), default=0)
            written_length = tokens if method.planned else longest
            recordings = answers.get((method.name, written_length), ()) if tokens <= written_length else ()
            if recordings:
                prompts = tuple(recording.prompt for recording in recordings)
                measured.append(
                    Runs(method, tokens, tuple(recording.up_to(tokens) for recording in recordings), prompts)
                )
    return measured


def baseline_of(runs: Sequence[Runs], tokens: int) -> Runs:
    """Return the baseline's runs at one length.

    The baseline is the method called PLAIN.

    runs: Runs of all methods.
    tokens: The length.
    Raises StopIteration if the baseline was not measured at this length.
    """
    return next(measured for measured in runs if measured.method.name == PLAIN and measured.tokens == tokens)


def perplexity(losses_of_texts: Iterable[Sequence[float]]) -> float | None:
    """Return exp of the mean negative log-likelihood over the tokens of all texts; None without tokens.

    Every token counts alike, whatever the length of its text.

    losses_of_texts: Losses (nats) of the tokens of each text.
    """
    all_losses = [loss for losses in losses_of_texts for loss in losses]
    return math.exp(statistics.mean(all_losses)) if all_losses else None


def _same(first: Sequence[int], second: Sequence[int]) -> bool:
    """Return whether two answers are equal as far as both go; the last step of one may have written more.

    first, second: Token ids of the answers.
    """
    return all(a == b for a, b in zip(first, second))


def _percent(drafts: Sequence[tuple[int | None, int | None]]) -> float | None:
    """Return accepted drafts as a percentage of proposed drafts; the bonus token counts as neither. None if
    nothing was proposed or it is unknown.

    Answers that proposed nothing, or whose numbers are unknown, are left out. The result has one decimal.

    drafts: Numbers of accepted and of proposed drafts of each answer; None if unknown.
    """
    known = [(accepted, proposed) for accepted, proposed in drafts if accepted is not None and proposed]
    if not known:
        return None
    return round(
        100 * sum(accepted for accepted, _ in known) / sum(proposed or 0 for _, proposed in known), 1
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values, rounded to two digits; None if none is known.

    values: Numbers; None is an unknown value.
    """
    known = [value for value in values if value is not None]
    return round(statistics.mean(known), 2) if known else None


def _ms(seconds: Iterable[float]) -> float:
    """Return the mean of durations in milliseconds, rounded to three digits.

    seconds: Durations in seconds, at least one.
    """
    return round(1000 * statistics.mean(seconds), 3)


def _rounded(value: float | None) -> float | None:
    """Return a value rounded to three digits; None stays None.

    value: The value.
    """
    return None if value is None else round(value, 3)
