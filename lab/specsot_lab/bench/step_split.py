"""`specsot bench steps`: how the time of a step is divided, on a CPU, for any model.

Sequencer, stage, verifier and drafter are called one after the other in this thread, each timed by the wall
clock. Then as many steps run under torch's profiler, which divides the time inside torch by kind of work.

compose: The sequencer.

layers: Embedding and layers.

lm_head: Logits, target tokens, acceptance.

learn: The drafter reads accepted features.

draft: The drafter grows trees.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from specsot.core.frames import Fork, Frame, Open, Opening, TreeSegment
from specsot.members import Range, TreeShape
from specsot.params import Message
from specsot_bench.asking import counting_bar
from specsot_bench.core.tables import Column, figure, markdown, text
from specsot_bench.eagle.generation import StepLoop, open_loop
from specsot_bench.eagle.models import TargetAndDraft
from specsot_bench.plots import picture
from specsot_bench.reference_model import load_decoder
from specsot_bench.results import Row, Stopwatch, publish
from specsot_bench.runners import ModelSet
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.loading import load_head
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.decoder import Decoder
from specsot_model.device_speed import copy_speed
from specsot_model.memory_fit import WeightForm, weights_of
from specsot_model.published import open_weights

# Steps that are not counted. Untuned.
WARM_STEPS: Final = 3
# The phases of a step, see above.
PHASES: Final = ("compose", "layers", "lm_head", "learn", "draft")
# The kinds of work of a step.
KINDS: Final = ("products", "attention", "copies", "other ops", "outside torch")


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """What is measured.

    model: Directory of the base model.
    prompt: Token ids of the prompt.
    steps: Measured steps of each way.
    branches: Numbers of sequences that are written at the same time after one prompt, a way each. One
        sequence is always measured.
    shape: The trees.
    """

    model: Path
    prompt: tuple[int, ...]
    steps: int = 30
    branches: Sequence[int] = (6,)
    shape: TreeShape = field(default_factory=lambda: TreeShape(fixed=True))


@dataclass(slots=True)
class StepClock:
    """Measured times of steps.

    seconds: Wall-clock seconds by phase, of all steps together.
    """

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def total_seconds(self) -> float:
        """Return the seconds of all phases together; 0 before the first step."""
        return sum(self.seconds.values())

    @contextmanager
    def time_phase(self, phase: str) -> Generator[None]:
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


def loop_of(decoder: Decoder, head: DraftHead | None, options: SplitOptions, sequences: int) -> StepLoop:
    """Return a loop of one sequence, or of several that fork the prompt and begin with another token each.
    All prompts have been computed, and WARM_STEPS more steps have passed.

    decoder: The base model.
    head: The head; None: without drafts.
    options: Prompt, trees and number of steps.
    sequences: Number of sequences.

    Each sequence may write as many tokens as twice `options.steps` steps and the unmeasured ones can accept
    at most. Several sequences fork one sequence that only prefills.
    """
    prompt = options.prompt
    shape = options.shape
    drafted = head is not None
    limit = (options.steps * 2 + 2 * WARM_STEPS + 4) * (shape.depth + 1)
    lease = len(prompt) + limit
    if sequences == 1:
        orders = [Open(Opening(1, len(prompt), limit=limit, drafted=drafted), prompt, lease)]
    else:
        orders = [Open(Opening(1, len(prompt), decodes=False, drafted=drafted), prompt, lease)]
        for number in range(sequences):
            fork = Fork(1, len(prompt))
            first_token = prompt[number % len(prompt)]
            opening = Opening(2 + number, len(prompt) + 1, fork, limit=limit, drafted=drafted)
            orders.append(Open(opening, (first_token,), lease))
    loop = open_loop(TargetAndDraft(decoder, head), shape, orders)
    while not _is_decoding(loop.turn().frame):
        pass
    for _ in range(WARM_STEPS):
        loop.turn()
    return loop


def _is_decoding(frame: Frame) -> bool:
    """Return whether a frame has at least one tree, and no prompt rows.

    frame: The frame.
    """
    return bool(frame.segments) and all(isinstance(segment, TreeSegment) for segment in frame.segments)


def measure_models(
    models: ModelSet, question: str, steps: int, branches: Sequence[int], output: Path | None
) -> int:
    """Measure model directories, and return the exit status 0.

    models: Base model, head and precision; without a head, drafts are not measured.
    question: What the user asks; the prompt is rendered by the model's chat template.
    steps: Measured steps of each way.
    branches: Numbers of sequences that are written at the same time.
    output: The JSON file; None: the tables are only printed.

    Raises ModelError and HeadMismatch if a model cannot be loaded.

    The base model is loaded on the device and in the type that `models` names.
    """
    decoder = load_decoder(models)
    placement = (models.base, decoder.dtype, decoder.device)
    head_quantization = models.drafter_quantization
    head = load_head(models.head, *placement, quantization=head_quantization) if models.head else None
    prompt = Prompts(models.base, Text(models.base)).chat((Message("user", question),))
    return measure(decoder, head, SplitOptions(models.base, tuple(prompt), steps, branches), output)


@torch.inference_mode()
def measure(decoder: Decoder, head: DraftHead | None, options: SplitOptions, output: Path | None) -> int:
    """Measure phases and kinds of work, and publish the tables. Return the exit status 0.

    decoder: The base model.
    head: The head; None: drafts are not measured.
    options: Prompt, trees and number of steps.
    output: The JSON file; None: the tables are only printed.

    The ways are "plain" and, with a head, "eagle", each with one sequence and with every number in
    `options.branches`, of which repeated ones count once. With an output file, two pictures are drawn beside
    it.
    """
    ways = [(f"{drafts}{f', {count} branches' if count > 1 else ''}", way_head, count)
            for drafts, way_head in (("plain", None), ("eagle", head)) if drafts == "plain" or head
            for count in dict.fromkeys((1, *options.branches))]  # fmt: skip
    floor = floor_of(options.model, decoder)
    rows = list[Row]()
    with counting_bar(sys.stderr, "ways", len(ways)) as count:
        for name, way_head, sequences in ways:
            rows.append({"name": name, **figures_of_way(decoder, way_head, options, sequences, floor)})
            count()
    settings = {"model": str(options.model), "steps": options.steps, "branches": options.branches}
    settings |= {"prompt_tokens": len(options.prompt), "threads": torch.get_num_threads()}
    publish(
        "steps", {**settings, "dtype": str(decoder.dtype)}, rows, page_of(rows), output, partial(_draw, rows)
    )
    return 0


def _draw(rows: Sequence[Row], stem: Path) -> None:
    """Draw phases and kinds of work.

    rows: The measured rows.
    stem: Path of the pictures without their suffixes.

    The files are named after the stem, "<stem>-phases.png" and "<stem>-kinds.png". Existing files are
    replaced.
    """
    for division in ("phases", "kinds"):
        parts = {str(row["name"]): row[division] for row in rows}
        draw_shares(
            parts, f"A step by {division}, % of its time", stem.with_name(f"{stem.name}-{division}.png")
        )


def figures_of_way(
    decoder: Decoder, head: DraftHead | None, options: SplitOptions, sequences: int, floor: float
) -> Row:
    """Return the figures of one way: of steps as they are, then of as many under the profiler.

    decoder: The base model.
    head: The head; None: without drafts.
    options: Prompt, trees and number of steps.
    sequences: Number of sequences.
    floor: The shortest possible seconds of a step, see `floor_of`.

    The keys are "step_ms", "rows_per_step", "tokens_per_step", "tokens_per_second", "weights_floor_ms", and
    "phases" and "kinds", which map each of PHASES and KINDS to milliseconds per step. A phase that did not
    occur has 0.
    """
    loop = loop_of(decoder, head, options, sequences)
    clock = StepClock()
    results = [loop.turn(clock.time_phase).result for _ in range(options.steps)]
    tokens = sum(len(outcome.tokens) for result in results for outcome in result.outcomes)
    return {
        "step_ms": round(1e3 * clock.total_seconds / options.steps, 3),
        "rows_per_step": round(statistics.mean(result.rows for result in results), 1),
        "tokens_per_step": round(tokens / options.steps, 2),
        "tokens_per_second": round(tokens / clock.total_seconds, 1),
        "weights_floor_ms": round(1e3 * floor, 3),
        "phases": {phase: round(1e3 * clock.seconds.get(phase, 0.0) / options.steps, 4) for phase in PHASES},
        "kinds": kinds_of(loop, options.steps),
    }


def kinds_of(loop: StepLoop, steps: int) -> dict[str, float]:
    """Return the milliseconds of a step by kind of work. The profiler makes every operation slower, so that
    only the proportions are meaningful.

    loop: The loop, which must be able to run `steps` more steps, and one before.
    steps: Measured steps.

    Every one of KINDS is a key. "outside torch" is the rest of the wall-clock time, at least 0.
    """
    with profile(activities=[ProfilerActivity.CPU]):
        # Starting the profiler takes seconds, which are not counted.
        loop.turn()
    clock = StepClock()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            loop.turn(clock.time_phase)
    seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for operation in profiled.key_averages():
        seconds[kind_of(operation.key)] += operation.self_cpu_time_total / 1e6
    seconds["outside torch"] = max(clock.total_seconds - sum(seconds.values()), 0.0)
    return {kind: round(1e3 * seconds[kind] / steps, 4) for kind in KINDS}


def kind_of(operation: str) -> str:
    """Return the kind of work of an operation of torch: one of KINDS, "other ops" if its name contains no
    known word.

    operation: Name of the operation, such as "aten::mm".

    The first rule that fits decides: "attention" if the name contains attention, softmax or flash; "products"
    if it ends in mm, mv or matmul, or contains linear; "copies" if it contains copy, index, cat, gather,
    scatter, clone or fill. "outside torch" is never returned.
    """
    name = operation.removeprefix("aten::")
    if any(word in name for word in ("attention", "softmax", "flash")):
        return "attention"
    if name.endswith(("mm", "mv", "matmul")) or "linear" in name:
        return "products"
    if any(word in name for word in ("copy", "index", "cat", "gather", "scatter", "clone", "fill")):
        return "copies"
    return "other ops"


def floor_of(model: Path, decoder: Decoder) -> float:
    """Return the seconds in which the weights of a step are read once, at the speed at which this machine
    copies memory.

    model: Directory of the base model.
    decoder: The loaded base model.

    The weights count with the bytes of the decoder's data type, whatever their quantization.
    """
    all_layers = Range(0, decoder.config.layers)
    size = weights_of(open_weights(model), decoder.config, all_layers, WeightForm(decoder.dtype.itemsize))
    return size / copy_speed("cpu")


def page_of(rows: Sequence[Row]) -> str:
    """Return three tables in Markdown: of whole steps, of phases and of kinds of work in per cent. Without
    rows, the tables have only their headings.

    rows: The measured rows.
    """
    parts = _percents("phases", PHASES), _percents("kinds", KINDS)
    return "\n\n".join(markdown(columns, rows) for columns in (COLUMNS, *parts))


def _percents(division: str, parts: Sequence[str]) -> list[Column]:
    """Return columns of the fractions of a step.

    division: "phases" or "kinds".
    parts: Names of the phases or kinds.

    The first column has the name of each row; then there is one column for each part.
    """

    def share(part: str) -> Column:
        """Return the column of one part, in per cent; 0 if the step took no time.

        part: Name of the phase or kind.
        """
        return Column(
            part, lambda row: f"{100 * row[division][part] / (sum(row[division].values()) or 1):.1f}"
        )

    return [text(f"% of a step by {division}", "name"), *map(share, parts)]


# The columns of the table of whole steps.
COLUMNS: Final = (
    text("way", "name"),
    figure("ms a step", "step_ms", 3),
    figure("rows", "rows_per_step", 1),
    figure("tokens", "tokens_per_step"),
    figure("tok/s", "tokens_per_second", 1),
    figure("weights read, ms", "weights_floor_ms", 3),
)


def draw_shares(rows: Mapping[str, Mapping[str, float]], title: str, file: Path) -> None:
    """Draw a bar of 100 % for each row, cut into its parts.

    rows: By the name of each row, its values by part. A part that a row lacks counts as 0.
    title: Title of the picture.
    file: The PNG file.

    A row whose values are all 0 has an empty bar. An existing file is replaced.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    with picture(file, title, (9, 0.5 * len(rows) + 1.8)) as (panel,):
        scaled_rows = [(row, 100 / (sum(row.values()) or 1)) for row in rows.values()]
        starts = [0.0] * len(rows)
        for part in parts:
            values = [row.get(part, 0.0) * percent for row, percent in scaled_rows]
            panel.barh(range(len(starts)), values, left=starts, height=0.6, label=part)
            starts = [start + value for start, value in zip(starts, values)]
        panel.set_yticks(range(len(rows)), list(rows))
        panel.invert_yaxis()
        panel.set_xlabel("%")
