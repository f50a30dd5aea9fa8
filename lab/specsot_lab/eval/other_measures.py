"""What `specsot eval` measures beside quality and speed: aspects, routing, shapes of drafts.

Each asks first turns alone, and tells a table that its JSON holds, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean

from specsot.drafting import DraftOptions
from specsot.errors import InvalidRequest
from specsot_bench.core.tables import Column, figure, markdown, text
from specsot_bench.results import named
from specsot_lab.eval.core.aspect_table import (
    AskedQuestion,
    PlannedAnswer,
    by_category,
    interval_of,
    lines_of,
    measure,
    plans_of,
)
from specsot_lab.eval.records import Record
from specsot_lab.eval.running import Asked, Run
from specsot_lab.eval.tasks import Prompt, read_task
from specsot_master.core.plans.wording import ENGLISH

SAMPLED = 0.7  # temperature of the sampled answers: they must differ, and still be sense
SHARE = 4  # a sampled answer may have one in so many of the others' tokens: what matters comes first


async def aspects(run: Run, samples: int) -> int:
    """Quality without a judge, by what sampled direct answers agree on. 1 where nothing can be told."""
    prompts = first_turns(run)
    asked = [one for prompt in prompts for one in asked_of(prompt, samples, run.tokens // SHARE)]
    records = await run.answers(asked)
    each = samples + 2
    grouped = [records[place : place + each] for place in range(0, len(records), each)]
    questions = [
        question_of(prompt, found)
        for prompt, found in zip(prompts, grouped)
        if all("error" not in record for record in found)
    ]
    rows = measure(questions)
    if rows:
        our_words = [getattr(ENGLISH, field.name) for field in fields(ENGLISH)]  # no title is made of them
        table = by_category(rows)
        plans = plans_of(questions, our_words)
        run.say(*lines_of(table, plans))
        run.write(
            "aspects",
            [*named(table, "category"), *named(rows, "id")],
            samples=samples,
            temperature=SAMPLED,
            plans=plans,
        )
    if missing := len(prompts) - len(rows):
        run.say(f"{missing} of {len(prompts)} questions have no aspects or answers")
    run.complain(records)
    return 0 if rows else 1


def asked_of(prompt: Prompt, samples: int, tokens: int) -> list[Asked]:
    """tokens: of a sampled answer, at most."""
    limits = {"temperature": SAMPLED, "max_new_tokens": tokens}
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


ROUTING = "routing"
PLANNED = "list"  # the category that is to be planned; no other one is
EACH = 20  # prompts of every source
SHARES = (text("category", "category"), figure("n", "prompts", 0), figure("planned", "planned"))


def routing_prompts() -> list[Prompt]:
    """40 whose answers are lists, 20 each of chit-chat, maths and code."""
    borrowed = (("vicuna", PLANNED), ("gsm8k", "maths"), ("humaneval", "code"))
    others = [
        replace(prompt, task=ROUTING, id=f"{task} {prompt.id}", category=category, references=())
        for task, category in borrowed
        for prompt in read_task(task)[:EACH]
    ]
    return [*read_task(ROUTING), *others]


async def routing(run: Run) -> int:
    """How often mode auto plans what has parts, and what has none; and what went the wrong way."""
    records = await run.answers([Asked(prompt, "auto") for prompt in first_turns(run)])
    answered = [record for record in records if "error" not in record]
    wrong = [one for one in answered if is_planned(one) != (one["category"] == PLANNED)]
    rows: list[Record] = []
    for name in dict.fromkeys(one["category"] for one in answered):
        ways = [is_planned(one) for one in answered if one["category"] == name]
        rows.append({"category": name, "prompts": len(ways), "planned": fmean(ways)})
    run.say(f"{markdown(SHARES, rows)}\n")
    for one in wrong:
        asked = " ".join(one["questions"][0].split())[:90]
        run.say(f"{one['category']}, {one['turns'][0]['decision']}: {asked}")
    run.complain(records)
    run.write(ROUTING, named(rows, "category"), wrong=[one["id"] for one in wrong])
    return 0 if answered else 1


def is_planned(record: Record) -> bool:
    return len(record["turns"][0]["points"]) >= 2


TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A chain of `nodes` drafts, or a tree of so many nodes, its root left out."""

    kind: str
    nodes: int

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.nodes}"

    @property
    def drafting(self) -> DraftOptions:
        """The whole of it in every step, whether it pays or not. Of a tree of 8 levels, with 10 children of a
        node as EAGLE-2 has them, the likeliest nodes are kept.
        """
        if self.kind == "chain":
            return DraftOptions(mode="linear", depth=self.nodes, nodes=self.nodes, tuner="fixed")
        return DraftOptions(mode="tree", depth=8, breadth=10, nodes=self.nodes, tuner="fixed")


def shapes_of(told: str) -> list[DraftShape]:
    """ "chain:5,tree:24". Raises InvalidRequest."""
    found: list[DraftShape] = []
    for one in told.split(","):
        kind, _, nodes = one.strip().partition(":")
        if kind not in ("chain", "tree") or not nodes.isdecimal() or not int(nodes):
            raise InvalidRequest(f"shapes are such as chain:5,tree:24, got {one!r}", field="draft_shapes")
        found.append(DraftShape(kind, int(nodes)))
    return found


async def draft_shapes(run: Run, shapes: Sequence[DraftShape]) -> int:
    """Tokens a step of direct answers, by shapes of drafts, greedy and sampled. A fleet for each shape."""
    if run.wanted.master is not None:
        raise InvalidRequest(
            "a fleet is opened for each shape, so there is no --master", field="draft_shapes"
        )
    prompts = first_turns(run)
    rows = list[Record]()
    found: list[Record] = []
    for shape in shapes:
        asked = [
            Asked(prompt, "direct", f"{shape.name} at {heat:g}", {"temperature": heat, "seed": 1})
            for heat in TEMPERATURES
            for prompt in prompts
        ]
        records = await run.answers(asked, replace(run.wanted, drafting=shape.drafting))
        found += records
        for place, heat in enumerate(TEMPERATURES):
            mine = records[place * len(prompts) : (place + 1) * len(prompts)]
            rows += [row | {"drafts": shape.name, "temperature": heat} for row in steps_of(mine)]
    run.say(markdown(STEPS, rows))
    run.complain(found)
    run.write("shapes", named(rows, "task", "drafts", "temperature"))
    return 0 if rows else 1


def steps_of(records: Sequence[Record]) -> list[Record]:
    """One for each task. Tokens a step over all steps, and their bootstrap interval over questions."""
    answered = [record for record in records if record["turns"] and record["turns"][0]["steps"]]
    rows: list[Record] = []
    for task in dict.fromkeys(record["task"] for record in answered):
        turns = [record["turns"][0] for record in answered if record["task"] == task]
        means = [turn["per_step"] for turn in turns]
        steps = [turn["steps"] for turn in turns]
        per_step = math.fsum(mean * count for mean, count in zip(means, steps)) / sum(steps)
        rows.append({
            "task": task,
            "questions": len(turns),
            "steps": sum(steps),
            "per_step": per_step,
            "interval": interval_of(means, steps),
            "tokens": fmean(turn["tokens"] for turn in turns),
        })  # fmt: skip
    return rows


STEPS = (
    text("set", "task"),
    text("drafts", "drafts"),
    figure("T", "temperature", 1),
    figure("n", "questions", 0),
    figure("steps", "steps", 0),
    figure("tokens a step", "per_step"),
    Column("95 %", lambda row: "{:.2f} .. {:.2f}".format(*row["interval"])),
)


def first_turns(run: Run) -> list[Prompt]:
    """Raises InvalidRequest, ModelError where the run cannot begin."""
    run.check()
    return [replace(one, turns=one.turns[:1]) for one in run.prompts]
