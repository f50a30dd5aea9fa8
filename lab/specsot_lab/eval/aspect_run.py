"""`specsot eval --aspects`: quality without a judge, by what several sampled direct answers agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TextIO

from specsot_app.bench.results import named, write_results
from specsot_app.fleet.opening import Opener
from specsot_lab.eval.core.aspect_table import (
    AskedQuestion,
    PlannedAnswer,
    by_category,
    lines_of,
    measure,
    plans_of,
)
from specsot_lab.eval.records import Record
from specsot_lab.eval.running import Asked, Run, answer_all, complaints
from specsot_lab.eval.tasks import Prompt
from specsot_master.core.prompts import ENGLISH

TEMPERATURE = 0.7  # of the sampled answers: they must differ, and still be sense
SHARE = 4  # a sampled answer may have one in so many of the others' tokens: what matters comes first


async def evaluate(run: Run, samples: int, out: TextIO, err: TextIO, opener: Opener) -> int:
    """First turns alone: ask what is not in the folder yet, tell the whole. 1 where nothing can be told."""
    run.check()
    prompts = [replace(one, turns=one.turns[:1]) for one in run.prompts]
    asked = [one for prompt in prompts for one in asked_of(prompt, samples, run.tokens // SHARE)]
    records = await answer_all(run, asked, err, opener)
    each = samples + 2
    grouped = [records[place : place + each] for place in range(0, len(records), each)]
    questions = [question_of(prompt, found) for prompt, found in zip(prompts, grouped) if _is_whole(found)]
    rows = measure(questions)
    if rows:
        table, plans = by_category(rows), plans_of(questions, our_words())
        out.writelines(f"{line}\n" for line in lines_of(table, plans))
        settings = run.folder.settings() | {"samples": samples, "temperature": TEMPERATURE, "plans": plans}
        result = [*named(table, "category"), *named(rows, "id")]
        write_results(run.folder.path / "aspects.json", "aspects", settings, result)
    if len(rows) < len(run.prompts):
        out.write(
            f"{len(run.prompts) - len(rows)} of {len(run.prompts)} questions have no aspects or answers\n"
        )
    out.writelines(f"{line}\n" for line in complaints(records))
    return 0 if rows else 1


def asked_of(prompt: Prompt, samples: int, tokens: int) -> list[Asked]:
    """tokens: of a sampled answer, at most."""
    limits = {"temperature": TEMPERATURE, "max_new_tokens": tokens}
    drawn = [
        Asked(prompt, "direct", f"sampled {seed}", limits | {"seed": seed}) for seed in range(1, samples + 1)
    ]
    return [Asked(prompt, "direct"), Asked(prompt, "sot"), *drawn]


def question_of(prompt: Prompt, records: Sequence[Record]) -> AskedQuestion:
    """records: as `asked_of` has them."""
    direct, planned, *drawn = [record["turns"][0] for record in records]
    headings, bodies = zip(*planned["points"]) if planned["points"] else ((), ())
    return AskedQuestion(
        f"{prompt.task} {prompt.id}",
        prompt.category,
        prompt.turns[0],
        direct["text"],
        PlannedAnswer(planned["text"], tuple(headings), tuple(bodies)),
        tuple(turn["text"] for turn in drawn),
    )


def our_words() -> list[str]:
    """What a model is told when it plans; no title is to be made of it."""
    return [getattr(ENGLISH, field.name) for field in fields(ENGLISH)]


def _is_whole(records: Sequence[Record]) -> bool:
    return all("error" not in record for record in records)
