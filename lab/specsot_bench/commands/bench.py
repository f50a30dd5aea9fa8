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

# The options of a fleet that a table has; the others are part of the methods.
OF_MEASURED = Offer(
    only=(
        *("model", "draft_model", "dtype", "quantization", "kv_cache_dtype"),
        *("draft_dtype", "draft_quantization", "device"),
    )
)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where results are written.

    output: Path of the JSON file; None: results are only printed.
    """

    HEADING: ClassVar[str] = "Output"

    output: Path | None = option(
        None, "Also write the figures to this file, as JSON.", aliases=("json", "output-json"), metavar="FILE"
    )

    @property
    def place(self) -> Path | None:
        """Return the output file, or None, after checking that it can be written before anything is measured.

        InvalidRequest is raised for a folder, for the endings .md, .tex and .png, and for a file or folder
        without write permission. Missing folders are created; the file itself is not. None means that no
        output file was asked for.

        Raises InvalidRequest, also for names of the files that are written beside it.
        """
        file = self.output
        if file is None:
            return None
        if file.is_dir() or file.suffix in (".md", ".tex", ".png"):
            raise InvalidRequest(
                f"{file} cannot be the JSON file: it is a folder, or its ending is that of another output",
                "output",
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise InvalidRequest(f"{file} cannot be written", "output")
        return file


@dataclass(frozen=True, slots=True)
class TablesOptions:
    """Options of `specsot bench quick` and `full`.

    methods: Rows of the table.
    prompts: File of questions, one a line; None: built-in questions.
    minutes: Maximum minutes for all answers; None: no limit.
    text: File with a text for perplexity; None: a built-in text.
    small_model: Directory or name of a small language model; None: none.
    fleet: Options of the models and their precision.
    output: Where results are written.
    """

    HEADING: ClassVar[str] = "Measurement"

    methods: TableOptions = field(default_factory=TableOptions)
    prompts: Path | None = option(None, "Questions of your own, one a line.", metavar="FILE")
    minutes: float | None = option(
        None, "Maximum minutes for all answers; methods that are not reached are marked as such.", min_value=0
    )
    text: Path | None = option(None, "Text for perplexity.", metavar="FILE", unset="one that comes with it")
    small_model: str | None = option(
        None, "A small language model with the same tokenizer, like --model.", metavar="MODEL"
    )
    fleet: Annotated[FleetOptions, OF_MEASURED] = field(default_factory=FleetOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


# Examples in the help of `specsot bench quick`.
QUICK = (Example("specsot bench quick --rounds 3 --output quick.json", "Three questions for each method"),)
# Examples in the help of `specsot bench full`.
FULL = (Example("specsot bench full --minutes 60 --output full.json", "An hour"),)


@command(TablesOptions, table="bench-quick", examples=QUICK)
def quick(options: TablesOptions) -> int:
    """Measure every family of methods side by side, with short answers: minutes on two cores."""
    return measure("quick", options)


@command(TablesOptions, table="bench-full", examples=FULL)
def full(options: TablesOptions) -> int:
    """Measure all methods, up to 2,000 tokens: tables, plots, recommended settings."""
    return measure("full", options)


def measure(name: str, options: TablesOptions) -> int:
    """Run a table and publish it; return the exit status. `quick` and `full` differ in their methods alone.

    The exit status is 0. Without `minutes` there is no limit. The bundled small model is not given a text
    for perplexity unless `text` names one. Raises ModelError if a model is missing, InvalidRequest for
    questions or a text that cannot be read.

    name: Name of the table, "quick" or "full".
    options: Options of the command.
    """
    require_torch()
    output = options.output.place
    from specsot_app.fleet.demo import is_small
    from specsot_bench import rounds as rounds_module
    from specsot_bench.asking import questions_of
    from specsot_bench.core import methods
    from specsot_bench.rounds import publish

    method_table = {"quick": methods.quick, "full": methods.full}[name](options.methods)
    models = rounds_module.models_of(options.fleet, options.small_model)
    seconds = math.inf if options.minutes is None else 60 * options.minutes
    # The bundled small model knows only its own topics, so that its perplexity on an encyclopedia means
    # nothing.
    reads_no_text = options.text is None and is_small(models.base)
    text = None if reads_no_text else rounds_module.read_reference(options.text)
    task = rounds_module.TableRun(
        method_table,
        models,
        questions_of(options.prompts, is_small(models.base), rounds_module.QUESTIONS),
        text,
        seconds,
    )
    return publish(task, name, output)
