"""The clock of all measurements. It times the phases of steps, and calls in a row, on a CPU or a GPU.

Rows that take long to measure are printed as soon as they are measured, and written to the file together with
all rows before.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from specsot.core.frames import PromptChunk
from specsot_bench.eagle.generation import Step, StepLoop
from specsot_bench.results import Row, Stopwatch, named, write_results

# A function that is measured; what it returns is ignored.
Call = Callable[[], object]

# Measurements. The median of this many is the result. Untuned.
TURNS: Final = 7


@dataclass(slots=True)
class StepClock:
    """Measured times of steps.

    seconds: Wall-clock seconds by phase, of all steps together.
    tokens: Number of tokens that all steps wrote.
    prompt_seconds: Wall-clock seconds of the steps that computed prompt rows.
    prompt_step_tokens: Number of tokens that these steps wrote.
    step_rows: Number of rows of each step.
    step_seconds: Wall-clock seconds of each step.
    """

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    tokens: int = 0
    prompt_seconds: float = 0.0
    prompt_step_tokens: int = 0
    step_rows: list[int] = field(default_factory=list[int])
    step_seconds: list[float] = field(default_factory=list[float])

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return len(self.step_rows)

    @property
    def total_seconds(self) -> float:
        """Return the seconds of all phases together; 0 before the first step."""
        return sum(self.seconds.values())

    @property
    def ninety_percent_range(self) -> tuple[float, float]:
        """Return the shortest and the longest step time, in seconds, after the twentieth part of the steps at
        either end has been left out. There must be at least two steps.
        """
        twentieths = statistics.quantiles(self.step_seconds, n=20)
        return twentieths[0], twentieths[-1]

    def time_step(self, loop: StepLoop) -> Step:
        """Run one step of a loop, record its times, and return it.

        loop: The loop to advance; a sequence must be left in it.

        A step that computes prompt rows and trees counts as one with prompt rows.
        """
        watch = Stopwatch()
        step = loop.turn(self._time_phase)
        seconds = watch.seconds
        tokens = sum(len(outcome.tokens) for outcome in step.result.outcomes)
        self.step_rows.append(step.result.rows)
        self.step_seconds.append(seconds)
        self.tokens += tokens
        if any(isinstance(segment, PromptChunk) for segment in step.frame.segments):
            self.prompt_seconds += seconds
            self.prompt_step_tokens += tokens
        return step

    @contextmanager
    def _time_phase(self, phase: str) -> Generator[None]:
        """Measure the time that the context takes, as time of a phase. Time that is spent in a phase inside
        of it counts for the inner phase alone. The context gets None.

        phase: The phase's name; repeated phases of one name are added up.

        Nothing is recorded if the context ends by an error.
        """
        watch = Stopwatch()
        before = self.total_seconds
        yield
        within = self.total_seconds - before
        self.seconds[phase] = self.seconds.get(phase, 0.0) + watch.seconds - within


def call_seconds(call: Call, calls: int) -> list[float]:
    """Return the seconds of each call; [] if `calls` is 0.

    call: The function to measure, which must return only when its work is done.
    calls: Number of calls.

    A call that raises ends the measurement with its error.
    """
    seconds: list[float] = []
    for _ in range(calls):
        watch = Stopwatch()
        call()
        seconds.append(watch.seconds)
    return seconds


def median_seconds(call: Call, calls: int = 10) -> float:
    """Return the median seconds of a call, over TURNS measurements. One call before them is not measured.

    call: The function to measure.
    calls: Number of calls in a row per measurement, whose mean counts.
    """
    call()
    return statistics.median(mean_seconds(call, calls) for _ in range(TURNS))


def mean_seconds(call: Call, calls: int) -> float:
    """Return the mean seconds of a call. The GPU, if there is one, is synchronized before the first call and
    after the last.

    call: The function to measure.
    calls: Number of calls in a row, at least 1.

    Raises ZeroDivisionError if `calls` is 0.
    """
    _wait()
    watch = Stopwatch()
    for _ in range(calls):
        call()
    _wait()
    return watch.seconds / calls


def captured(call: Call, calls: int = 1) -> Call:
    """Return a function that launches the calls as one CUDA graph. Needs a CUDA device.

    call: The function to capture. It is called once before, so that kernels are compiled outside of the
        graph.
    calls: Number of calls that the graph contains.

    The returned function does not wait for the device. The tensors of `call` stay alive as long as the
    function does.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    # The graph reads the tensors of the call that it was captured from, so both must live equally long.
    captured_call = graph, call
    return lambda: captured_call[0].replay()


def _wait() -> None:
    """Wait until the GPU has done its work; without a GPU, return at once."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class RowLog:
    """Prints rows as they are measured, and writes all of them to a file after each.

    bench: The benchmark's name.
    settings: The settings of the run, which are written with the rows.
    output: The JSON file; None: rows are only printed.
    named: Keys of which a row's name is made. From the second row of one name on, the number of the
        repetition is added.
    rows: All rows so far, with their names.
    """

    def __init__(self, bench: str, settings: Row, output: Path | None, *named: str) -> None:
        """Make an empty log. Nothing is written or printed before the first row.

        bench: Name of the benchmark.
        settings: Settings of the run, which are written with the rows.
        output: The JSON file; None: rows are only printed.
        named: Keys of a row that make up its name.
        """
        self._bench = bench
        self._settings = settings
        self._output = output
        self._named = named
        self._watch = Stopwatch()
        self._repetitions = Counter[tuple[object, ...]]()
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Add a row: print it, and write all rows so far.

        row: Figures by name.

        From the second row of one name on, the row gets an entry "turn" with the number of the repetition,
        counted from 2. The printed line begins with the seconds since the log was made.
        """
        key = tuple(row.get(name) for name in self._named)
        self._repetitions[key] += 1
        repetition = {"turn": self._repetitions[key]} if self._repetitions[key] > 1 else {}
        self.rows += named([{**row, **repetition}], *self._named, "turn")
        figures = "  ".join(f"{name} {value}" for name, value in {**row, **repetition}.items())
        print(f"{self._watch.seconds:.0f} s  {figures}", flush=True)
        if self._output:
            write_results(self._output, self._bench, self._settings, self.rows)
