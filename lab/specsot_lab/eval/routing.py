"""`specsot eval --tasks routing`: how often mode auto plans what has parts, and what has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import TextIO

from specsot_app.bench.core.tables import figure, markdown, text
from specsot_app.bench.results import named, write_results
from specsot_app.fleet.opening import Opener
from specsot_lab.eval.records import Record
from specsot_lab.eval.running import Asked, Run, answer_all, complaints
from specsot_lab.eval.tasks import Prompt, read_task

ROUTING = "routing"
PLANNED = "list"  # the category that is to be planned; no other one is
EACH = 20  # prompts of every source
COLUMNS = (text("category", "category"), figure("n", "prompts", 0), figure("planned", "planned"))


def prompts() -> list[Prompt]:
    """40 whose answers are lists, 20 each of chit-chat, maths and code."""
    borrowed = (("vicuna", PLANNED), ("gsm8k", "maths"), ("humaneval", "code"))
    others = [
        replace(prompt, task=ROUTING, id=f"{task} {prompt.id}", category=category, references=())
        for task, category in borrowed
        for prompt in read_task(task)[:EACH]
    ]
    return [*read_task(ROUTING), *others]


async def evaluate(run: Run, out: TextIO, err: TextIO, opener: Opener) -> int:
    """A table of shares, what went the wrong way, and routing.json."""
    run.check()
    records = await answer_all(run, [Asked(prompt, "auto") for prompt in run.prompts], err, opener)
    answered = [record for record in records if "error" not in record]
    rows = rows_of(answered)
    out.write(f"{markdown(COLUMNS, rows)}\n\n")
    wrong = [one for one in answered if is_planned(one) != (one["category"] == PLANNED)]
    for one in wrong:
        asked = " ".join(one["questions"][0].split())[:90]
        out.write(f"{one['category']}, {one['turns'][0]['decision']}: {asked}\n")
    out.writelines(f"{line}\n" for line in complaints(records))
    settings = run.folder.settings() | {"wrong": [one["id"] for one in wrong]}
    write_results(run.folder.path / "routing.json", ROUTING, settings, named(rows, "category"))
    return 0 if answered else 1


def rows_of(records: Sequence[Record]) -> list[dict[str, object]]:
    names = dict.fromkeys(record["category"] for record in records)
    found = [(name, [is_planned(one) for one in records if one["category"] == name]) for name in names]
    return [{"category": name, "prompts": len(ways), "planned": fmean(ways)} for name, ways in found]


def is_planned(record: Record) -> bool:
    return len(record["turns"][0]["points"]) >= 2
