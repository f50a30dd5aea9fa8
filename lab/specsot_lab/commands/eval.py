"""`specsot eval`: quality and speed of planned answers, compared with direct ones.

`specsot_lab.eval` is imported only when the command runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Final

from specsot.errors import InvalidRequest
from specsot.service.command import Example, command
from specsot.service.option_table import Offer, option, truth
from specsot_app.core.ask import RequestOptions, SamplingOptions, asked
from specsot_app.fleet.options import FleetOptions
from specsot_app.runtime import run_until_signal

# Options of a fleet that an evaluation does not offer.
OF_EVALUATED: Final = Offer(
    without=(
        *("demo", "model_format", "kv_memory", "draft_format", "overrides", "drafting"),
        *("hop_dtype", "plan_style"),
    )
)


# Options of every request that an evaluation offers; the others are what it varies.
ASKED: Final = ("max_parallel", "constraint", "ignore_eos")
# Options of sampling that an evaluation offers.
SAMPLED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
# Folder of records, unless another one is given.
OUTPUT: Final = "eval"


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """Options of `specsot eval`. Each field is an option of the command line, described by its help text.

    tasks: Names of the tasks, separated by commas.
    prompts: File of prompts for one task; None: the task's own prompts.
    num_samples: Prompts of each task, from the first; None: all.
    output: Folder of records; None: "eval", or a new folder if its records have other settings.
    fresh: True: the records of the folder are deleted first.
    max_new_tokens: Maximum number of tokens of an answer.
    aspects: Number of sampled direct answers from which aspects are collected; None: aspects are not
        measured.
    router: True: the threshold of the router is measured instead.
    plans: True: the forms of words of plans are measured instead.
    lengths: True: the lengths of direct answers are measured instead.
    write: True: what was measured is written into the model's specsot.json; only with `plans` and `lengths`.
    at_once: Number of answers that are written at the same time.
    enable_parallel: False: only direct answers are measured.
    request: Options of every request.
    sampling: Options of sampling of every request.
    fleet: The fleet that answers.
    """

    HEADING: ClassVar[str] = "Evaluation"

    tasks: str = option(
        "planning", "Tasks, separated by commas, such as planning,gsm8k.", keywords={"task": str}
    )
    prompts: Path | None = option(None, "Prompts of your own (JSON lines), for one task.", metavar="FILE")
    num_samples: int | None = option(None, "Prompts of each task, from the first.", min_value=1)
    output: Path | None = option(
        None,
        "Folder of records, from which a run is continued.",
        metavar="DIR",
        unset="eval; with other settings than its records have, eval-2 and so on",
    )
    fresh: bool = option(False, "Delete its records first.")
    max_new_tokens: int = option(512, "Maximum number of tokens per answer.", min_value=1)
    aspects: int | None = option(
        None,
        "Instead of scores, measure coverage of what at least two of this many sampled direct "
        "answers mention.",
        min_value=2,
    )
    router: bool = option(
        False, "Measure instead the score from which mode auto plans, and store it with the model."
    )
    plans: bool = option(
        False, "Measure instead in which form of words the model writes the points of plans best."
    )
    lengths: bool = option(
        False, "Measure instead how long direct answers are, at which the lengths of planned ones aim."
    )
    write: bool = option(
        False, "With --plans or --lengths: put what was measured into the model's specsot.json."
    )
    at_once: int = option(
        1,
        "Answers written at once; more than one is faster, but the times are not those of single answers.",
        min_value=1,
    )
    enable_parallel: bool = option(
        True,
        "Ask both ways, with a plan and directly; otherwise only directly.",
        keywords={"enable_parallel": truth},
        keyword_only=True,
    )
    request: Annotated[RequestOptions, Offer(only=ASKED)] = field(default_factory=RequestOptions)
    sampling: Annotated[SamplingOptions, Offer(only=SAMPLED)] = field(default_factory=SamplingOptions)
    fleet: Annotated[FleetOptions, OF_EVALUATED] = field(default_factory=FleetOptions)


# Examples at the end of the help.
EXAMPLES: Final = (
    Example("specsot eval --tasks planning --num-samples 10", "Ten questions, asked both ways"),
    Example("specsot eval --tasks vicuna --aspects 5 --at-once 16", "Quality without a judge"),
    Example("specsot eval --tasks routing --at-once 16", "How often mode auto plans"),
    Example("specsot eval --router --model models/llama --at-once 8", "The threshold of the router's score"),
    Example("specsot eval --plans --write --model models/llama --at-once 8", "How its points are asked for"),
    Example("specsot eval --lengths --write --model models/llama --at-once 8", "How long its answers are"),
    Example("specsot eval --master 10.0.0.1:50050 --tasks gsm8k", "A fleet that runs already"),
)


@command(EvalOptions, examples=EXAMPLES)
def eval(options: EvalOptions) -> int:
    """Ask a task's prompts directly and with a plan; show quality, speed and where planning is profitable.

    \fThe first of these that is given decides what is measured: --router, --plans, --lengths, the task
    "routing", --aspects; otherwise quality and speed of direct and planned answers, or of
    direct ones alone. Returns the exit status: 0, or 1 if there is no result. Raises InvalidRequest for
    --write without --plans or --lengths, for prompts of one's own with several tasks, for "routing" together
    with other tasks, if there are no prompts, for unknown tasks, and if the folder's records have
    other settings; ModelError for a model, prompts or records that cannot be read. --num-samples does not
    limit the bundled prompts of "routing". Without --output, the folder is the first of eval, eval-2 and so
    on that fits, and its name is written to stderr. With --fresh, the folder's records are deleted, after all
    options have been checked.

    options: Options of the command line; see `EvalOptions`.
    """
    from specsot_app.terminal.show import open_with_progress
    from specsot_lab.eval import lengths, other_measures, threshold, wording
    from specsot_lab.eval.records import Folder, first_matching_folder
    from specsot_lab.eval.running import MODES, Run, evaluate, with_warm_up
    from specsot_lab.eval.tasks import read_task

    output_arguments = open_with_progress(sys.stderr), sys.stdout, sys.stderr
    if options.router:
        return run_until_signal(
            threshold.evaluate(options.fleet, options.prompts, options.at_once, *output_arguments)
        )
    if options.plans:
        wording_arguments = (
            options.fleet,
            options.prompts,
            options.output or Path(OUTPUT),
            options.write,
            options.at_once,
        )
        return run_until_signal(wording.evaluate(*wording_arguments, *output_arguments))
    if options.lengths:
        length_arguments = options.fleet, options.prompts, options.write, options.at_once
        return run_until_signal(lengths.evaluate(*length_arguments, *output_arguments))
    if options.write:
        raise InvalidRequest("--write is for what --plans and --lengths measure", "write")
    names = list(dict.fromkeys(name.strip() for name in options.tasks.split(",")))
    if options.prompts is not None and len(names) != 1:
        raise InvalidRequest("prompts of your own are for one task", field="prompts")
    if other_measures.ROUTING in names and len(names) > 1:
        raise InvalidRequest("routing is asked in mode auto, so it is a run of its own", field="tasks")
    if names == [other_measures.ROUTING] and options.prompts is None:
        prompts = other_measures.routing_prompts()
    else:
        prompts = [
            prompt for name in names for prompt in read_task(name, options.prompts)[: options.num_samples]
        ]
    if not prompts:
        raise InvalidRequest("there are no prompts to ask", field="prompts")
    keywords = asked(options.request, options.sampling)
    request = {name: value for name, value in keywords.items() if name in (*ASKED, *SAMPLED)}
    folder = Folder(options.output or Path(OUTPUT))
    run_options = Run(
        prompts, options.fleet, options.max_new_tokens, folder, *output_arguments, options.at_once, request
    )
    if options.output is None and not options.fresh:
        run_options = replace(run_options, folder=first_matching_folder(OUTPUT, run_options.settings))
        sys.stderr.write(f"records: {run_options.folder.path}\n")
    if options.fresh:
        # A run that cannot start must not delete records.
        run_options.check()
        run_options.folder.forget()
    if names == [other_measures.ROUTING]:
        run = other_measures.routing(run_options)
    elif options.aspects is not None:
        run = other_measures.aspects(run_options, options.aspects)
    else:
        modes = MODES if options.enable_parallel else ("direct",)
        run = evaluate(replace(run_options, opener=with_warm_up(run_options.opener)), modes=modes)
    return run_until_signal(run)
