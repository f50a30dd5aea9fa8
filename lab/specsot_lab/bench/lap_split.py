"""`specsot bench laps`: where the time of a lap goes, on a CPU, for a model of one's own.

Sequencer, stage, verifier and drafter are called one after the other in this thread, each timed by the wall.
Then as many laps run under torch's profiler, which says what kind of work the time inside torch was.

compose: the sequencer. layers: embedding and layers. lm_head: logits, target tokens, acceptance. learn: the
drafter reads accepted features. draft: it grows trees.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from specsot.core.frames import Drafts, Fork, Open, Opening, TreeSegment
from specsot.core.pages import PageTable
from specsot.members import Configuration, Range, TreeShape
from specsot.model.decoder import Decoder
from specsot.model.memory_fit import WeightForm, weights_of
from specsot.model.weights import WeightFiles
from specsot.params import Message
from specsot_app.bench.core.tables import pipes
from specsot_app.bench.perplexity import load_whole
from specsot_app.bench.plots import drawn, shares
from specsot_app.bench.results import Row, write_results
from specsot_app.bench.runners import ModelSet
from specsot_app.terminal.show import counting_bar
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import make_engine
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_worker.core.pipeline import DraftTimeout
from specsot_worker.core.sequencer import FrameBudget, Sequencer
from specsot_worker.feature_stream import FeatureStore
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier

EPOCH, PAGE_ROWS, ROWS = 1, 256, 512
LEASE = 1 << 20  # positions: no sequence ends by it
WARM = 3  # laps that do not count
PHASES = ("compose", "layers", "lm_head", "learn", "draft")
KINDS = ("products", "attention", "copies", "other ops", "outside torch")


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """laps: that count, of each way. branches: side by side, behind the same prompt. shape: of trees."""

    model: Path
    prompt: tuple[int, ...]
    laps: int = 30
    branches: int = 6
    shape: TreeShape = field(default_factory=lambda: TreeShape(fixed=True))


@dataclass(slots=True)
class PhaseTimer:
    """Wall seconds by phase; laps, and what they wrote and fed."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    laps: int = 0
    tokens: int = 0
    rows: int = 0

    @contextmanager
    def at(self, phase: str) -> Generator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begun

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())


class Loop:
    """One stage with all layers, and a drafter where there is a head; sequences write until nobody asks."""

    def __init__(
        self, decoder: Decoder, head: DraftHead | None, options: SplitOptions, sequences: int
    ) -> None:
        shape, prompt = options.shape, options.prompt
        written = (options.laps * 2 + 2 * WARM + 4) * (shape.depth + 1) + shape.slots
        pages = (sequences + 1) * (-(-(len(prompt) + written) // PAGE_ROWS) + 1)
        slots = shape.slots if head else 1
        self._stage = DecoderStage(decoder, pages, PAGE_ROWS)
        store = None
        if head is not None:
            store = FeatureStore(pages, PAGE_ROWS, head.width, decoder.dtype, decoder.device)
        self._verifier = Verifier(decoder.logits, lambda _: None, store)
        budget, patience = (
            FrameBudget(max(ROWS, sequences * slots), 1, slots),
            DraftTimeout(0.0, head is not None),
        )
        self._sequencer = Sequencer(EPOCH, budget, PageTable(pages, PAGE_ROWS), patience)
        self._engine: DraftEngine | None = None
        if head is not None:
            for layer, weight in head.tap_slices().items():
                self._stage.tap(layer, weight)
            rows = max(ROWS, sequences * shape.slots)
            told = Configuration(EPOCH, "drafter", (), pages, PAGE_ROWS, shape.slots, rows, shape=shape)
            self._engine = make_engine(head, told)
        self._stage.capture()
        for order in _orders(prompt, sequences, head is not None):
            self._sequencer.apply_order(order)

    def turn(self, timer: PhaseTimer) -> bool:
        """One lap; whether all it fed were trees."""
        with timer.at("compose"):
            frame = self._sequencer.compose(0.0)
        assert frame is not None
        with timer.at("layers"):
            passed = self._stage.run(frame)
        with timer.at("lm_head"):
            verdict = self._verifier.verify(passed)
        with timer.at("compose"):
            self._sequencer.apply_result(verdict.result, 0.0)
        if self._engine is not None:
            with timer.at("learn"):
                for features in verdict.features:
                    self._engine.observe(features)
            with timer.at("draft"):
                drafts = Drafts(EPOCH, self._engine.draft(), self._engine.rest)
            with timer.at("compose"):
                self._sequencer.add_drafts(drafts)
        timer.laps += 1
        timer.rows += verdict.result.rows
        timer.tokens += sum(len(one.tokens) for one in verdict.result.outcomes)
        return bool(frame.segments) and all(isinstance(one, TreeSegment) for one in frame.segments)

    def warm(self) -> None:
        """Until the prompts are fed, and some laps more."""
        while not self.turn(PhaseTimer()):
            pass
        for _ in range(WARM):
            self.turn(PhaseTimer())


def _orders(prompt: tuple[int, ...], sequences: int, drafted: bool) -> list[Open]:
    """One text; or several that fork a prefix and begin with another token each."""
    if sequences == 1:
        return [Open(Opening(1, len(prompt), limit=LEASE, drafted=drafted), prompt, LEASE)]
    prefix = Open(Opening(1, len(prompt), decodes=False, drafted=drafted), prompt, LEASE)
    opening = [
        Opening(2 + n, len(prompt) + 1, Fork(1, len(prompt)), limit=LEASE, drafted=drafted)
        for n in range(sequences)
    ]
    return [prefix, *(Open(one, (prompt[n % len(prompt)],), LEASE) for n, one in enumerate(opening))]


def measure_models(models: ModelSet, question: str, laps: int, branches: int, output: Path | None) -> int:
    """Of model directories, behind a question as the model is asked it. Raises ModelError, HeadMismatch."""
    decoder = load_whole(models.base, models.dtype, "cpu", models.quantization)
    head = load_head(models.head, models.base, decoder.dtype, decoder.device) if models.head else None
    prompt = Prompts(models.base, Text(models.base)).chat((Message("user", question),))
    return measure(decoder, head, SplitOptions(models.base, tuple(prompt), laps, branches), output)


@torch.inference_mode()
def measure(decoder: Decoder, head: DraftHead | None, options: SplitOptions, output: Path | None) -> int:
    """A table of phases, and of kinds of work; JSON, Markdown and plots beside it where asked to."""
    ways = [(f"{drafts}{f', {count} branches' if count > 1 else ''}", used, count)
            for drafts, used in (("plain", None), ("eagle", head)) if drafts == "plain" or head
            for count in (1, options.branches)]  # fmt: skip
    floor, rows = floor_of(options.model, decoder), list[Row]()
    with counting_bar(sys.stderr, "ways", len(ways)) as count:
        for name, used, sequences in ways:
            rows.append({"name": name, **split(decoder, used, options, sequences, floor)})
            count()
    page = page_of(rows)
    print(page)
    if output is not None:
        settings = {"model": str(options.model), "laps": options.laps, "branches": options.branches}
        settings |= {"prompt_tokens": len(options.prompt), "threads": torch.get_num_threads()}
        write_results(output, "laps", {**settings, "dtype": str(decoder.dtype)}, rows)
        output.with_suffix(".md").write_text(page, encoding="utf-8")
        for what in ("phases", "kinds"):
            parts: dict[str, Mapping[str, float]] = {str(row["name"]): _of(row, what) for row in rows}
            drawn(partial(shares, parts, f"A lap by {what}", output.with_name(f"{output.stem}-{what}.png")))
    return 0


def split(
    decoder: Decoder, head: DraftHead | None, options: SplitOptions, sequences: int, floor: float
) -> Row:
    """Of one way: laps as they are, then as many under the profiler."""
    loop, timer = Loop(decoder, head, options, sequences), PhaseTimer()
    loop.warm()
    for _ in range(options.laps):
        loop.turn(timer)
    return {
        "lap_ms": round(1e3 * timer.whole / timer.laps, 3),
        "rows_per_lap": round(timer.rows / timer.laps, 1),
        "tokens_per_lap": round(timer.tokens / timer.laps, 2),
        "tokens_per_second": round(timer.tokens / timer.whole, 1),
        "weights_floor_ms": round(1e3 * floor, 3),
        "phases": {phase: round(1e3 * spent / timer.laps, 4) for phase, spent in timer.seconds.items()},
        "kinds": kinds_of(loop, options.laps),
    }


def kinds_of(loop: Loop, laps: int) -> dict[str, float]:
    """Milliseconds of a lap by kind of work. The profiler adds to every operation: shares tell more."""
    with profile(activities=[ProfilerActivity.CPU]):
        loop.turn(PhaseTimer())  # the profiler's own beginning takes seconds
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        timer = PhaseTimer()
        for _ in range(laps):
            loop.turn(timer)
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for one in seen.key_averages():
        spent[kind_of(one.key)] += one.self_cpu_time_total / 1e6
    spent["outside torch"] = max(timer.whole - sum(spent.values()), 0.0)
    return {kind: round(1e3 * spent[kind] / laps, 4) for kind in KINDS}


def kind_of(operation: str) -> str:
    """What an operation of torch is, by its name."""
    name = operation.removeprefix("aten::")
    if any(word in name for word in ("attention", "softmax", "flash")):
        return "attention"
    if name.endswith(("mm", "mv", "matmul")) or "linear" in name:  # mkldnn::_linear_pointwise too
        return "products"
    if any(word in name for word in ("copy", "index", "cat", "gather", "scatter", "clone", "fill")):
        return "copies"
    return "other ops"


def floor_of(model: Path, decoder: Decoder) -> float:
    """Seconds in which a lap's weights are read once, at the speed at which this machine copies memory."""
    whole = Range(0, decoder.config.layers)
    size = weights_of(WeightFiles(model), decoder.config, whole, WeightForm(decoder.dtype.itemsize))
    source = torch.ones(1 << 26)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - begun)
    return size / (2 * source.nbytes / best)


def page_of(rows: Sequence[Row]) -> str:
    """Phases in ms and %, then kinds of work in %."""
    heads = ("way", "ms a lap", "rows", "tokens", "tok/s", "weights read, ms")
    figures = ("lap_ms", "rows_per_lap", "tokens_per_lap", "tokens_per_second", "weights_floor_ms")
    whole = pipes(heads, [[str(row["name"]), *(f"{row[key]}" for key in figures)] for row in rows])
    return f"{whole}\n\n{_percents(rows, 'phases', PHASES)}\n\n{_percents(rows, 'kinds', KINDS)}\n"


def _percents(rows: Sequence[Row], what: str, parts: Sequence[str]) -> str:
    def cells(row: Row) -> list[str]:
        spent = _of(row, what)
        whole = sum(spent.values()) or 1.0
        return [str(row["name"]), *(f"{100 * spent[part] / whole:.1f} %" for part in parts)]

    return pipes((f"% of a lap by {what}", *parts), map(cells, rows))


def _of(row: Row, what: str) -> Mapping[str, float]:
    found: Any = row[what]
    return found
