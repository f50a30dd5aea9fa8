"""`specsot plan`: what a model takes on which devices, and how fast it may be, before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from specsot.model.config import require_torch
from specsot.service.command import Example, command
from specsot.service.option_table import Offer, option
from specsot_app.fleet.options import FleetOptions

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
def plan(given: PlanOptions) -> int:
    """Show what each device would hold of layers, KV pages, graphs and draft model, without loading it.

    Reads only the config and the headers of the weight files. Exit status 1 if the model does not fit.
    """
    require_torch()
    from specsot_app.fleet.fitting import plan_fleet
    from specsot_app.terminal.plan_view import lines_of

    found = plan_fleet(given.fleet)
    print(json.dumps(dataclasses.asdict(found)) if given.json else "\n".join(lines_of(found)))
    return 1 if found.lacking else 0
