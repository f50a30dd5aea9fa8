"""`specsot bench quick` and `full`: all methods side by side, as tables."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from specsot.checkpoint.config import require_torch
from specsot.errors import InvalidRequest
from specsot.service.command import Example, command
from specsot.service.option_table import Offer, option
from specsot_app.fleet.options import FleetOptions
from specsot_bench.core.methods import TableOptions

OF_MEASURED = Offer(
    only=(
        *("model", "draft_model", "dtype", "quantization", "kv_cache_dtype"),
        *("draft_dtype", "draft_quantization", "device"),
    )
)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where results are written."""

    HEADING: ClassVar[str] = "Output"

    output: Path | None = option(
        None, "Also write the figures to this file, as JSON.", aliases=("json", "output-json"), metavar="FILE"
    )

    @property
    def place(self) -> Path | None:
        """Return the output file, or None, after checking that it can be written before anything is measured.

        Raises InvalidRequest, also for names of the files that are written beside it.
        """
        file = self.output
        if file is None:
            return None
        if file.is_dir() or file.suffix in (".md", ".tex", ".png"):
            raise InvalidRequest(f"{file} is no name for JSON", "output")
        file.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise InvalidRequest(f"{file} cannot be written", "output")
        return file


@dataclass(frozen=True, slots=True)
class TablesOptions:
    """Options of `specsot bench quick` and `full`."""

    HEADING: ClassVar[str] = "Measurement"

    methods: TableOptions = field(default_factory=TableOptions)
    prompts: Path | None = option(None, "Questions of your own, one a line.", metavar="FILE")
    minutes: float | None = option(
        None, "Maximum minutes for all answers; methods that are not reached are marked as such.", least=0
    )
    text: Path | None = option(None, "Text for perplexity.", metavar="FILE", unset="one that comes with it")
    small_model: str | None = option(
        None, "A small language model with the same tokenizer, like --model.", metavar="MODEL"
    )
    fleet: Annotated[FleetOptions, OF_MEASURED] = field(default_factory=FleetOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


QUICK = (Example("specsot bench quick --rounds 3 --output quick.json", "Three questions for each method"),)
FULL = (Example("specsot bench full --minutes 60 --output full.json", "An hour"),)


@command(TablesOptions, table="bench-quick", examples=QUICK)
def quick(given: TablesOptions) -> int:
    """Measure every family of methods side by side, with short answers: minutes on two cores."""
    return measure("quick", given)


@command(TablesOptions, table="bench-full", examples=FULL)
def full(given: TablesOptions) -> int:
    """Measure all methods, up to 2,000 tokens: tables, plots, recommended settings."""
    return measure("full", given)


def measure(name: str, given: TablesOptions) -> int:
    """Run a table; `quick` and `full` differ in their methods alone."""
    require_torch()
    place = given.output.place
    from specsot_app.fleet.demo import is_small, questions_of
    from specsot_bench import rounds as room
    from specsot_bench.core import methods
    from specsot_bench.rounds import publish

    course = {"quick": methods.quick, "full": methods.full}[name](given.methods)
    models = room.models_of(given.fleet, given.small_model)
    seconds = math.inf if given.minutes is None else 60 * given.minutes
    # The bundled small model knows only its own topics, so that its perplexity on an encyclopedia means
    # nothing.
    unread = given.text is None and is_small(models.base)
    text = None if unread else room.read_reference(given.text)
    task = room.TableRun(
        course, models, questions_of(given.prompts, is_small(models.base), room.QUESTIONS), text, seconds
    )
    return publish(task, name, place)
