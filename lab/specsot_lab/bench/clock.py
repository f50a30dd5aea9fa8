"""The clock of all measurements: the phases of steps, and a call in a row of calls, on a CPU or a GPU.

Rows that take long to measure are shown as they come, each kept with all before it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specsot.core.frames import PromptChunk
from specsot_bench.eagle.generation import Step, StepLoop
from specsot_bench.results import Row, Stopwatch, named, write_results

Call = Callable[[], object]

# Measurements, of which the median counts.
TURNS = 7  # measurements, of which the median is told


@dataclass(slots=True)
class StepClock:
    """Times of steps.

    seconds: wall seconds by phase. tokens: that all steps wrote. fed: seconds of steps with prompts in them.
        first: tokens that such steps wrote. rows: rows of each step. each: seconds of each step.
    """

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    tokens: int = 0
    fed: float = 0.0
    first: int = 0
    rows: list[int] = field(default_factory=list[int])
    each: list[float] = field(default_factory=list[float])

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return len(self.rows)

    @property
    def whole(self) -> float:
        """Return the seconds of all phases together."""
        return sum(self.seconds.values())

    @property
    def spread(self) -> tuple[float, float]:
        """Return the seconds between which nine of ten steps lie."""
        twentieths = statistics.quantiles(self.each, n=20)
        return twentieths[0], twentieths[-1]

    def turn(self, loop: StepLoop) -> Step:
        """Run one step of a loop, timed, and return it."""
        watch = Stopwatch()
        step = loop.turn(self._at)
        seconds = watch.seconds
        tokens = sum(len(one.tokens) for one in step.result.outcomes)
        self.rows.append(step.result.rows)
        self.each.append(seconds)
        self.tokens += tokens
        if any(isinstance(one, PromptChunk) for one in step.frame.segments):
            self.fed += seconds
            self.first += tokens
        return step

    @contextmanager
    def _at(self, phase: str) -> Generator[None]:
        """Time a phase; what is spent in a phase within this one counts for that alone."""
        watch = Stopwatch()
        before = self.whole
        yield
        within = self.whole - before
        self.seconds[phase] = self.seconds.get(phase, 0.0) + watch.seconds - within


def each_of(call: Call, calls: int) -> list[float]:
    """Return the seconds of each of so many calls, which return when their work is done."""
    seconds: list[float] = []
    for _ in range(calls):
        watch = Stopwatch()
        call()
        seconds.append(watch.seconds)
    return seconds


def typical(call: Call, calls: int = 10) -> float:
    """Return the median seconds of a call, measured TURNS times in rows of `calls` calls."""
    call()
    return statistics.median(seconds_of(call, calls) for _ in range(TURNS))


def seconds_of(call: Call, calls: int) -> float:
    """Return the mean seconds of a call in a row of calls; a GPU is waited for before the first and after the
    last.
    """
    _wait()
    watch = Stopwatch()
    for _ in range(calls):
        call()
    _wait()
    return watch.seconds / calls


def captured(call: Call, calls: int = 1) -> Call:
    """Return a function that launches so many calls as one CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    kept = graph, call  # what a graph reads lives no longer than the call that it was captured from
    return lambda: kept[0].replay()


def _wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class RowLog:
    """Prints rows as they come, and writes all of them after each.

    bench: name of the benchmark. settings: of the run. output: the JSON file; None: only print. named: keys
        that a row's name is made of; where they are equal, the number of the repetition follows.
    """

    def __init__(self, bench: str, settings: Row, output: Path | None, *named: str) -> None:
        self._bench = bench
        self._settings = settings
        self._output = output
        self._named = named
        self._watch = Stopwatch()
        self._seen = Counter[tuple[object, ...]]()
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Add a row: print it, and write all rows so far."""
        key = tuple(row.get(name) for name in self._named)
        self._seen[key] += 1
        turn = {"turn": self._seen[key]} if self._seen[key] > 1 else {}
        self.rows += named([{**row, **turn}], *self._named, "turn")
        said = "  ".join(f"{name} {value}" for name, value in {**row, **turn}.items())
        print(f"{self._watch.seconds:.0f} s  {said}", flush=True)
        if self._output:
            write_results(self._output, self._bench, self._settings, self.rows)
