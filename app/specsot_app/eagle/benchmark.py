"""Speculation and plain decoding of the same target side by side, on the caller's own prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specsot.kernels import TreeStatistics
from specsot.kernels.statistics import summarize
from specsot_app.bench.core.pairing import Comparison, Sample, turns
from specsot_app.eagle.generation import EagleStats, Prompts

Run = Callable[[Prompts], EagleStats]


@dataclass(frozen=True, slots=True)
class EagleBenchmark:
    """How many times speculation is as fast as plain decoding; below 1 it costs more than it brings.

    comparison: tokens per second of both, a pair a batch. trees: what the drafts came to.
    identical:  sequences of `sequences` that both wrote token for token alike: all, in fp32.
    """

    comparison: Comparison
    trees: TreeStatistics
    identical: int
    sequences: int

    @property
    def ratio(self) -> float:
        """Median over the batches."""
        return self.comparison.ratio

    def __str__(self) -> str:
        low, high = self.comparison.spread
        fast, plain = self.comparison.rates
        depths = " ".join(f"{rate:.2f}" for rate in self.trees.depth_rates)
        return "\n".join(
            (
                f"speculation / plain  {self.ratio:.2f}x (quartiles {low:.2f} .. {high:.2f})",
                f"tokens per second    {fast:.1f} / {plain:.1f}",
                f"accepted per tree    {self.trees.mean_accept_length:.2f}, by depth {depths}",
                f"identical            {self.identical} of {self.sequences} sequences",
            )
        )


def measure(
    batches: Sequence[Prompts], speculate: Run, decode: Run, num_steps: int, warm: int = 1
) -> EagleBenchmark:
    """Run every batch both ways, in the order AB BA AB ...; `warm` runs of each come first, uncounted."""
    for _ in range(warm):
        speculate(batches[0])
        decode(batches[0])
    found: dict[Run, list[EagleStats]] = {speculate: [], decode: []}
    for pair, run in turns((speculate, decode), len(batches)):
        found[run].append(run(batches[pair]))
    ours, plain = found[speculate], found[decode]
    written = [(a.tokens, b.tokens) for x, y in zip(ours, plain) for a, b in zip(x.sequences, y.sequences)]
    comparison = Comparison("speculation", _samples(ours), _samples(plain))
    return EagleBenchmark(comparison, _trees(ours, num_steps), sum(a == b for a, b in written), len(written))


def _samples(runs: Sequence[EagleStats]) -> tuple[Sample, ...]:
    return tuple(Sample(run.new_tokens, run.seconds) for run in runs)


def _trees(runs: Sequence[EagleStats], num_steps: int) -> TreeStatistics:
    lengths = [length for run in runs for one in run.sequences for length in one.accept_lengths]
    return summarize(lengths, sum(run.trees.total_proposed for run in runs), num_steps)
