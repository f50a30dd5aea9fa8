"""Methods of writing on one ring at one distance: plain, drafted, branches, both; always the same texts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from specsot.errors import SpecsotError
from specsot_app.bench.core.pairing import Comparison, Sample, order
from specsot_lab.bench.ring_fleet import BranchJob, RingFleet, Written

METHODS = ("plain", "eagle", "sot", "both")
AIM = 0.7  # of branches x tau, where hops are most of a lap
FREE = 0.97  # of plain split decoding, where nothing can be gained


class TextsDiffer(SpecsotError):
    """Two ways to write the same text wrote different ones."""


@dataclass(frozen=True, slots=True)
class RingTask:
    """What is written. tokens: of every branch behind its first, in laps that bring one; drafted: in others.

    expected: what branch n begins with, where that is known beforehand.
    """

    prefix: Sequence[int]
    suffixes: Sequence[Sequence[int]]
    tokens: int
    drafted: int
    expected: Callable[[int, int], Sequence[int]] | None = None

    def job(self, way: str) -> BranchJob:
        drafts, branches = way in ("eagle", "both"), way in ("sot", "both")
        suffixes = self.suffixes if branches else self.suffixes[:1]
        return BranchJob(self.prefix, suffixes, self.drafted if drafts else self.tokens, drafts)


@dataclass(frozen=True, slots=True)
class RingRuns:
    """All ways at one round trip between neighbours, in seconds; the runs of each in order."""

    name: str
    stages: int
    rtt: float
    runs: Mapping[str, tuple[Written, ...]]

    def comparison(self, way: str) -> Comparison:
        """Against plain split decoding: one lap a token. What is not plain must not lose to it."""
        ours, plain = (tuple(map(_sample, self.runs[one])) for one in (way, "plain"))
        return Comparison(f"{self.name} {way}", ours, plain, None if way == "plain" else self.aim(way))

    def aim(self, way: str) -> float:
        """The least speedup that is wanted."""
        far = self.rtt >= 0.1
        return AIM * self.ideal(way) if far else FREE

    def ideal(self, way: str) -> float:
        """Branches x tau: tokens that a lap could bring at most."""
        return len(self.runs[way][0].texts) * self.tau(way)

    def tau(self, way: str) -> float:
        """Tokens a tree brought, bonus included."""
        runs = self.runs[way]
        return sum(run.tokens for run in runs) / max(sum(sum(run.steps) for run in runs), 1)

    def row(self, way: str) -> dict[str, object]:
        """One way as a row of the results."""
        runs, comparison = self.runs[way], self.comparison(way)
        quartiles = comparison.spread
        return {
            "ring": self.name,
            "stages": self.stages,
            "rtt_ms": round(self.rtt * 1000, 3),
            "way": way,
            "branches": len(runs[0].texts),
            "tau": round(self.tau(way), 3),
            "tokens_per_lap": round(_median(run.tokens / max(run.steps) for run in runs), 2),
            "tokens_per_second": round(comparison.rates[0], 2),
            "speedup": round(comparison.ratio, 3),
            "quartiles": [round(value, 3) for value in quartiles],
            "aim": round(self.aim(way), 3),
            "of_branches_x_tau": round(comparison.ratio / self.ideal(way), 3),
            "pairs": len(runs),
            "frames_per_lap": round(_median(len(run.laps) / max(run.steps) for run in runs), 2),
            "rows_per_frame": round(_median(_mean(lap.rows for lap in run.laps) for run in runs), 1),
            "idle_percent": [round(100 * one) for one in _medians(map(_idle, runs))],
            "stage_ms": [round(1000 * one, 2) for one in _medians(map(_stages, runs))],
            "hop_ms": round(1000 * _median(_hop(run) for run in runs), 2),
            "queue_ms": [round(1000 * one, 2) for one in _medians(map(_queues, runs))],
            "wire_bytes_per_token": round(_median(run.carried / run.tokens for run in runs)),
        }


async def go(
    ring: RingFleet, name: str, stages: int, rtt: float, task: RingTask, rounds: int, step: Callable[[], None]
) -> RingRuns:
    """Every way once unmeasured, then round by round, forwards and backwards in turns. Raises Different."""
    runs: dict[str, list[Written]] = {way: [] for way in METHODS}
    for number in range(rounds + 1):
        for way in order(METHODS, number + 1):
            written = await ring.write(task.job(way))
            check(task, way, written)
            if number:
                runs[way].append(written)
            step()
    same([run for ways in runs.values() for run in ways], name)
    return RingRuns(name, stages, rtt, {way: tuple(ones) for way, ones in runs.items()})


def check(task: RingTask, way: str, written: Written) -> None:
    """Raises Different where a branch did not write what is known beforehand."""
    if task.expected is None:
        return
    for branch, text in enumerate(written.texts):
        if tuple(task.expected(branch, len(text))) != text:
            raise TextsDiffer(f"{way}: branch {branch} wrote {text[:8]}..., not what plain decoding writes")


def same(runs: Sequence[Written], name: str) -> None:
    """Raises Different unless every branch wrote the same each time, as far as each went."""
    longest: dict[int, tuple[int, ...]] = {}
    for run in runs:
        for branch, text in enumerate(run.texts):
            known = longest.get(branch, ())
            if any(one != other for one, other in zip(text, known)):
                raise TextsDiffer(f"{name}: branch {branch} wrote different texts")
            longest[branch] = max(text, known, key=len)


def _sample(run: Written) -> Sample:
    return Sample(run.tokens, run.seconds)


def _idle(run: Written) -> list[float]:
    """Of every stage, the part of the time in which it computed nothing."""
    busy = [sum(lap.seconds[stage] for lap in run.laps) for stage in range(len(run.queued))]
    return [max(1 - one / run.seconds, 0.0) for one in busy]


def _stages(run: Written) -> list[float]:
    return [_mean(lap.seconds[stage] for lap in run.laps) for stage in range(len(run.queued))]


def _hop(run: Written) -> float:
    """Mean of a lap's hops, without what frames waited at stages."""
    between = sum(lap.elapsed - sum(lap.seconds) for lap in run.laps) - sum(run.queued)
    return max(between, 0.0) / max(len(run.laps) * len(run.queued), 1)


def _queues(run: Written) -> list[float]:
    return [one / max(len(run.laps), 1) for one in run.queued]


def _medians(lists: Iterable[list[float]]) -> list[float]:
    return [statistics.median(values) for values in zip(*lists)]


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
