"""`specsot verify`: a fleet's answers beside a reference's, and its head beside its base.

Refuses to know how answers are made and measured; it takes one step behind the other, so that only one
copy of the model is in memory at a time.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from specsot.model.config import read_config
from specsot.model.precision import resolve_dtype
from specsot.params import DrafterName
from specsot_app.fleets import Opener, Wanted, models_of, open_fleet, overrides_of
from specsot_app.hush import quiet_logs
from specsot_app.running import run_until_signal
from specsot_app.terminal.progress import counting_bar
from specsot_app.verify.questions import choose_questions
from specsot_app.verify.reference import OnePassReference, TransformersReference
from specsot_app.verify.report import CheckedAnswer, Report, as_json, lines_of
from specsot_app.verify.served import FleetAnswer, ask_all
from specsot_app.verify.trials import ModelPair, measure_fit
from specsot_master.prompts import Prompts
from specsot_master.text import Text

STAGES = 2  # so that a split is verified too


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """wanted: the fleet, and where its models lie on this machine (a master elsewhere has its own copies).

    tokens: of each answer. near: top-2 gap below which a difference is a matter of rounding.
    """

    wanted: Wanted
    questions: tuple[str, ...]
    tokens: int
    near: float


def verify(
    wanted: Wanted,
    file: Path | None,
    tokens: int,
    near: float,
    as_object: bool,
    opener: Opener = open_fleet,
) -> int:
    """Print what was found; 0: every answer is the reference's and the head fits, 1: not so."""
    task = VerifyOptions(_put_to_the_test(wanted), choose_questions(file, wanted.model is None), tokens, near)
    report = examine(task, opener)
    text = Text(models_of(wanted).base)
    if as_object:
        print(json.dumps(as_json(report)))
    else:
        print("\n".join(lines_of(report, lambda token: text.decode((token,)))))
    return 0 if report.holds else 1


def examine(task: VerifyOptions, opener: Opener) -> Report:
    """Ask the fleet, then the reference, then the head. Raises what opening and loading raise."""
    quiet_logs()
    models, drafter = models_of(task.wanted), _drafter(task.wanted)
    served = run_until_signal(_serve(task, drafter, opener))
    answers = _compare(task, served)
    fit = None
    spoken = [(one.prompt, one.tokens) for one in served if one.tokens]
    if models.draft is not None and drafter == "eagle" and spoken:
        with counting_bar(sys.stderr, "drafting them with the head", 1):
            fit = measure_fit(_pair(task.wanted, models.base, models.draft), spoken)
    return Report(answers, task.near, drafter, fit, _rounding(task.wanted))


def _drafter(wanted: Wanted) -> DrafterName:
    """Who drafts: in an own fleet whoever it has, elsewhere whom it is asked for."""
    return models_of(wanted).drafts if wanted.master is None else wanted.drafter or "eagle"


async def _serve(task: VerifyOptions, drafter: DrafterName, opener: Opener) -> list[FleetAnswer]:
    base = models_of(task.wanted).base
    fleet = await opener(task.wanted)
    try:
        prompts = Prompts(base, Text(base))
        with counting_bar(sys.stderr, "asking the fleet", len(task.questions)) as step:
            return await ask_all(fleet, prompts, task.questions, drafter, task.tokens, step)
    finally:
        await fleet.close()


def _compare(task: VerifyOptions, served: list[FleetAnswer]) -> tuple[CheckedAnswer, ...]:
    wanted, base = task.wanted, models_of(task.wanted).base
    reference = _reference(wanted, base)
    ends = Text(base).end_ids
    answers: list[CheckedAnswer] = []
    with counting_bar(sys.stderr, "reading the answers again", len(served)) as step:
        for one in served:
            found = reference.compare(one.prompt, one.tokens, ends if one.ended else None)
            answers.append(CheckedAnswer(one.question, len(one.tokens), one.per_lap, tuple(found)))
            step()
    return tuple(answers)


def _reference(wanted: Wanted, base: Path) -> TransformersReference | OnePassReference:
    if _rounding(wanted):
        return OnePassReference(_pair(wanted, base, base).base())
    return TransformersReference(base, resolve_dtype(wanted.dtype, wanted.device), wanted.device)


def _rounding(wanted: Wanted) -> str:
    """What the base is held in, where that makes another model of it."""
    kept = "int8 KV" if wanted.kv_cache_dtype == "int8" else None
    return ", ".join(filter(None, (wanted.quantization, kept)))


def _pair(wanted: Wanted, base: Path, draft: Path) -> ModelPair:
    own = wanted.draft_dtype and resolve_dtype(wanted.draft_dtype, wanted.device)
    return ModelPair(
        base,
        draft,
        resolve_dtype(wanted.dtype, wanted.device),
        wanted.device,
        wanted.model_format,
        wanted.draft_format,
        overrides_of(wanted),
        wanted.quantization,
        wanted.kv_cache_dtype or "auto",
        own,
        wanted.draft_quantization,
    )


def _put_to_the_test(wanted: Wanted) -> Wanted:
    """A tree in every lap; two stages, where nothing else is asked and the model has as many layers."""
    if wanted.stages is None and wanted.layers is None:
        wanted = replace(wanted, stages=min(STAGES, read_config(models_of(wanted).base).layers))
    return replace(wanted, tree="fixed")
