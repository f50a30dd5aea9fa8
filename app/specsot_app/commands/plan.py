"""`specsot plan`: what a model takes on which devices, and how fast it may be, before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from specsot.checkpoint.config import require_torch
from specsot.core.info import memory_in_words
from specsot.service.command import Example, command
from specsot.service.option_table import Offer, option
from specsot_app.core.device_choice import shared_gpus
from specsot_app.fleet.options import FleetOptions

if TYPE_CHECKING:
    from specsot_app.fleet.fitting import FleetPlan, StagePlan

# Headings of the table of stages.
TITLES = ("device", "layers", "weights", "KV", "graphs", "drafter", "total", "free")


def lines_of(plan: FleetPlan) -> list[str]:
    """Return the plan as lines: models, a table of stages, KV and speed, what is missing.

    A line "missing" follows for each device that lacks memory.

    plan: The fleet as it would be loaded.
    """
    rows = [TITLES, *map(_row, plan.stages)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    missing = [f"missing   {memory_in_words(size)} on {place}" for place, size in plan.lacking.items()]
    return [*_model_lines(plan), "", *table, "", *_ring_lines(plan), *missing]


def _model_lines(plan: FleetPlan) -> list[str]:
    """Return the line about the base model, and a second line about the drafter if a model drafts.

    The bytes in other forms are named if there are any, and what the drafter copies from the base if that is
    more than 0.

    plan: The fleet as it would be loaded.
    """
    other_forms = ", ".join(f"{form} {memory_in_words(size)}" for form, size in plan.forms.items())
    weights = f"{memory_in_words(plan.weights)} in {plan.held}" + (f" ({other_forms})" if other_forms else "")
    notes = ", text only" if plan.text_only else ""
    notes += " through Transformers, without CUDA graphs" if plan.transformers else ""
    lines = [f"model     {plan.model}: {plan.layers} layers{notes}, {weights}"]
    if plan.draft:
        borrowed = f", and {memory_in_words(plan.draft_borrowed)} copied from the base"
        size = memory_in_words(plan.draft_own) + (borrowed if plan.draft_borrowed else "")
        lines.append(f"drafter   {plan.draft}: {size}")
    return lines


def _row(stage: StagePlan) -> tuple[str, ...]:
    """Return a stage's cells of the table, in the order of TITLES; "-" for what takes no memory, "unknown"
    for free memory that is not known.

    stage: The stage, with its bytes.
    """
    free_memory = "unknown" if stage.room is None else memory_in_words(stage.room)
    parts = (stage.weights, stage.kv, stage.graphs, stage.drafter, stage.need)
    return (
        stage.place,
        stage.layers,
        *(memory_in_words(part) if part else "-" for part in parts),
        free_memory,
    )


def _ring_lines(plan: FleetPlan) -> list[str]:
    """Return the lines about KV positions and speed of the whole ring, and about GPUs that stages share.

    The first line has the positions of all sequences, the pages, and the longest sequence that fits, which
    the model's context bounds too.

    plan: The fleet as it would be loaded.
    """
    pages = f"{plan.positions // plan.page_rows} pages of {plan.page_rows}"
    shared = shared_gpus([stage.place for stage in plan.stages])
    return [
        f"KV        {plan.positions:,} positions in {pages}, for all sequences together; "
        f"one may have up to {min(plan.context, plan.positions):,}",
        f"speed     {_speed(plan.stages, plan.tokens_per_second)}",
        *([f"shared    {shared}"] if shared else []),
    ]


def _speed(stages: Sequence[StagePlan], tokens_per_second: float | None) -> str:
    """Return the predicted speed in words, or why there is none.

    The speed is that of one sequence without drafts and network, in tokens per second; the bandwidths are
    named in GB/s.

    stages: The planned stages of the ring.
    tokens_per_second: The prediction; None if the bandwidth of a device is unknown.
    """
    bytes_read = f"{memory_in_words(sum(stage.read for stage in stages))} of weights that one step reads"
    if tokens_per_second is None:
        return f"not predicted: the memory bandwidth of a device is unknown ({bytes_read})"
    speeds = ", ".join(dict.fromkeys(f"{stage.bandwidth / 1e9:,.0f}" for stage in stages if stage.bandwidth))
    return (
        f"{tokens_per_second:.1f} tokens/s predicted, not measured: {bytes_read} / {speeds} GB/s; "
        "one sequence, no drafts, no network"
    )


# The options of a fleet that a plan depends on.
OF_PLANNED = Offer(
    only=(
        *("model", "model_format", "dtype", "quantization", "kv_cache_dtype", "kv_memory", "device"),
        *("drafter", "draft_model", "draft_format", "overrides", "draft_dtype", "draft_quantization"),
        *("drafting", "preset", "stages", "layers", "devices"),
    ),
    help={
        "devices": "A device for each stage: HOST#GPU or HOST#cpu, followed by =MEMORY (free on it) and "
        "@GB/s (its bandwidth). On this machine's devices both are measured if left out.",
        "device": "Without --devices: the device of all stages, on this machine.",
    },
    unset={"stages": "as many as devices", "kv_memory": "1G", "model": "none: it must be given"},
)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of `specsot plan`.

    json: True: print one JSON object instead of lines.
    fleet: Options of the fleet that is planned.
    """

    HEADING: ClassVar[str] = "Plan"

    json: bool = option(False, "Print one JSON object.")
    fleet: Annotated[FleetOptions, OF_PLANNED] = field(default_factory=FleetOptions)


EXAMPLES = (
    Example("specsot plan --model models/llama --draft-model models/llama-eagle3", "On this machine"),
    Example(
        'specsot plan --model Qwen/Qwen3-8B --devices "10.0.0.1#0=12G@360,10.0.0.2#0=24G@1008"',
        "Two machines; of a model on the hub its config alone is fetched",
    ),
)


@command(PlanOptions, examples=EXAMPLES)
def plan(options: PlanOptions) -> int:
    """Show what each device would hold of layers, KV pages, graphs and draft model, without loading it.

    Reads only the config and the headers of the weight files. Exit status 1 if the model does not fit.

    \f The plan is printed on stdout, as lines or as one JSON object, also if the model does not fit. Raises
    Refused if the layers cannot be placed, ModelError and InvalidRequest for models and options that cannot
    be used.
    """
    require_torch()
    from specsot_app.fleet.fitting import plan_fleet

    fleet_plan = plan_fleet(options.fleet)
    print(json.dumps(dataclasses.asdict(fleet_plan)) if options.json else "\n".join(lines_of(fleet_plan)))
    return 1 if fleet_plan.lacking else 0
