"""`specsot bench steps`: where the time of a step goes, on a CPU, for a model of one's own.

Sequencer, stage, verifier and drafter are called one after the other in this thread, each timed by the wall.
Then as many steps run under torch's profiler, which says what kind of work the time inside torch was.

compose: the sequencer. layers: embedding and layers. lm_head: logits, target tokens, acceptance. learn: the
drafter reads accepted features. draft: it grows trees.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from specsot.core.frames import Fork, Frame, Open, Opening, TreeSegment
from specsot.members import Range, TreeShape
from specsot.params import Message
from specsot_app.terminal.show import counting_bar
from specsot_bench.core.tables import Column, figure, markdown, text
from specsot_bench.eagle.generation import StepLoop, open_loop
from specsot_bench.eagle.models import TargetAndDraft
from specsot_bench.plots import picture
from specsot_bench.reference_model import load_decoder
from specsot_bench.results import Row, publish
from specsot_bench.runners import ModelSet
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.loading import load_head
from specsot_lab.bench.clock import StepClock
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.decoder import Decoder
from specsot_model.device_speed import copy_speed
from specsot_model.memory_fit import WeightForm, weights_of
from specsot_model.published import open_weights

WARM = 3  # steps that do not count
PHASES = ("compose", "layers", "lm_head", "learn", "draft")
KINDS = ("products", "attention", "copies", "other ops", "outside torch")


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """steps: that count, of each way. branches: how many texts side by side, behind the same prompt, a way
    for
    each number. shape: of trees.
    """

    model: Path
    prompt: tuple[int, ...]
    steps: int = 30
    branches: Sequence[int] = (6,)
    shape: TreeShape = field(default_factory=lambda: TreeShape(fixed=True))


def loop_of(decoder: Decoder, head: DraftHead | None, options: SplitOptions, sequences: int) -> StepLoop:
    """Return a loop of one sequence, or of several that fork a prefix and begin with another token each.
    Prompts are computed, and some steps more have passed.
    """
    prompt = options.prompt
    shape = options.shape
    drafted = head is not None
    limit = (options.steps * 2 + 2 * WARM + 4) * (shape.depth + 1)
    lease = len(prompt) + limit
    if sequences == 1:
        orders = [Open(Opening(1, len(prompt), limit=limit, drafted=drafted), prompt, lease)]
    else:
        orders = [Open(Opening(1, len(prompt), decodes=False, drafted=drafted), prompt, lease)]
        for number in range(sequences):
            fork = Fork(1, len(prompt))
            first = prompt[number % len(prompt)]
            opening = Opening(2 + number, len(prompt) + 1, fork, limit=limit, drafted=drafted)
            orders.append(Open(opening, (first,), lease))
    loop = open_loop(TargetAndDraft(decoder, head), shape, orders)
    while not _is_decoding(loop.turn().frame):
        pass
    for _ in range(WARM):
        loop.turn()
    return loop


def _is_decoding(frame: Frame) -> bool:
    """Return whether a frame has trees alone, and at least one."""
    return bool(frame.segments) and all(isinstance(one, TreeSegment) for one in frame.segments)


def measure_models(
    models: ModelSet, question: str, steps: int, branches: Sequence[int], output: Path | None
) -> int:
    """Measure model directories, after a question as the model is asked it; return the exit status. Raises
    ModelError, HeadMismatch.
    """
    decoder = load_decoder(models)
    given = (models.base, decoder.dtype, decoder.device)
    rounded = models.drafter_quantization
    head = load_head(models.head, *given, quantization=rounded) if models.head else None
    prompt = Prompts(models.base, Text(models.base)).chat((Message("user", question),))
    return measure(decoder, head, SplitOptions(models.base, tuple(prompt), steps, branches), output)


@torch.inference_mode()
def measure(decoder: Decoder, head: DraftHead | None, options: SplitOptions, output: Path | None) -> int:
    """Measure phases and kinds of work, publish the tables and return the exit status 0. head: None: without
    drafts. output: the JSON file; None: only print.
    """
    ways = [(f"{drafts}{f', {count} branches' if count > 1 else ''}", used, count)
            for drafts, used in (("plain", None), ("eagle", head)) if drafts == "plain" or head
            for count in dict.fromkeys((1, *options.branches))]  # fmt: skip
    floor = floor_of(options.model, decoder)
    rows = list[Row]()
    with counting_bar(sys.stderr, "ways", len(ways)) as count:
        for name, used, sequences in ways:
            rows.append({"name": name, **split(decoder, used, options, sequences, floor)})
            count()
    settings = {"model": str(options.model), "steps": options.steps, "branches": options.branches}
    settings |= {"prompt_tokens": len(options.prompt), "threads": torch.get_num_threads()}
    publish(
        "steps", {**settings, "dtype": str(decoder.dtype)}, rows, page_of(rows), output, partial(_draw, rows)
    )
    return 0


def _draw(rows: Sequence[Row], stem: Path) -> None:
    """Draw phases and kinds of work. stem: path without suffix."""
    for what in ("phases", "kinds"):
        parts = {str(row["name"]): row[what] for row in rows}
        shares(parts, f"A step by {what}, % of its time", stem.with_name(f"{stem.name}-{what}.png"))


def split(
    decoder: Decoder, head: DraftHead | None, options: SplitOptions, sequences: int, floor: float
) -> Row:
    """Return the figures of one way: steps as they are, then as many under the profiler. floor: seconds of a
    step at least.
    """
    loop = loop_of(decoder, head, options, sequences)
    clock = StepClock()
    for _ in range(options.steps):
        clock.time_step(loop)
    return {
        "step_ms": round(1e3 * clock.total_seconds / clock.steps, 3),
        "rows_per_step": round(sum(clock.step_rows) / clock.steps, 1),
        "tokens_per_step": round(clock.tokens / clock.steps, 2),
        "tokens_per_second": round(clock.tokens / clock.total_seconds, 1),
        "weights_floor_ms": round(1e3 * floor, 3),
        "phases": {phase: round(1e3 * clock.seconds.get(phase, 0.0) / clock.steps, 4) for phase in PHASES},
        "kinds": kinds_of(loop, options.steps),
    }


def kinds_of(loop: StepLoop, steps: int) -> dict[str, float]:
    """Return the milliseconds of a step by kind of work. The profiler adds to every operation, so that
    fractions tell more.
    """
    with profile(activities=[ProfilerActivity.CPU]):
        loop.turn()  # the profiler's own beginning takes seconds
    clock = StepClock()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            clock.time_step(loop)
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for one in seen.key_averages():
        spent[kind_of(one.key)] += one.self_cpu_time_total / 1e6
    spent["outside torch"] = max(clock.total_seconds - sum(spent.values()), 0.0)
    return {kind: round(1e3 * spent[kind] / steps, 4) for kind in KINDS}


def kind_of(operation: str) -> str:
    """Return what kind of work an operation of torch is, by its name."""
    name = operation.removeprefix("aten::")
    if any(word in name for word in ("attention", "softmax", "flash")):
        return "attention"
    if name.endswith(("mm", "mv", "matmul")) or "linear" in name:  # mkldnn::_linear_pointwise too
        return "products"
    if any(word in name for word in ("copy", "index", "cat", "gather", "scatter", "clone", "fill")):
        return "copies"
    return "other ops"


def floor_of(model: Path, decoder: Decoder) -> float:
    """Return the seconds in which a step's weights are read once, at the speed at which this machine copies
    memory.
    """
    whole = Range(0, decoder.config.layers)
    size = weights_of(open_weights(model), decoder.config, whole, WeightForm(decoder.dtype.itemsize))
    return size / copy_speed("cpu")


def page_of(rows: Sequence[Row]) -> str:
    """Return tables of whole steps, then of phases and kinds of work in per cent."""
    parts = _percents("phases", PHASES), _percents("kinds", KINDS)
    return "\n\n".join(markdown(columns, rows) for columns in (COLUMNS, *parts))


def _percents(what: str, parts: Sequence[str]) -> list[Column]:
    """Return columns of the fractions of a step. what: "phases" or "kinds". parts: their names."""

    def share(part: str) -> Column:
        """Return the column of one part."""
        return Column(part, lambda row: f"{100 * row[what][part] / (sum(row[what].values()) or 1):.1f}")

    return [text(f"% of a step by {what}", "name"), *map(share, parts)]


COLUMNS = (
    text("way", "name"),
    figure("ms a step", "step_ms", 3),
    figure("rows", "rows_per_step", 1),
    figure("tokens", "tokens_per_step"),
    figure("tok/s", "tokens_per_second", 1),
    figure("weights read, ms", "weights_floor_ms", 3),
)


def shares(rows: Mapping[str, Mapping[str, float]], title: str, file: Path) -> None:
    """Draw a bar of 100 % for each row, cut into its parts, which are the same in all. rows: values by part.
    file: the PNG.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    with picture(file, title, (9, 0.5 * len(rows) + 1.8)) as (panel,):
        wholes = [(row, 100 / (sum(row.values()) or 1)) for row in rows.values()]
        left = [0.0] * len(rows)
        for part in parts:
            values = [row.get(part, 0.0) * percent for row, percent in wholes]
            panel.barh(range(len(left)), values, left=left, height=0.6, label=part)
            left = [before + value for before, value in zip(left, values)]
        panel.set_yticks(range(len(rows)), list(rows))
        panel.invert_yaxis()
        panel.set_xlabel("%")
