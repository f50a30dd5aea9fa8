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

# Temperature of the sampled answers: they must differ, and still make sense. Untuned.
SAMPLED = 0.7  # temperature of the sampled answers: they must differ, and still be sense
# A sampled answer may have one in so many of the other answers' tokens, since what matters comes first.
# Untuned.
SHARE = 4  # a sampled answer may have one in so many of the others' tokens: what matters comes first


async def aspects(run: Run, samples: int) -> int:
    """Measure quality without a judge, by what sampled direct answers agree on; return 1 if there is no
    result, else 0.

    run: what is asked. samples: sampled direct answers of each question.
    """
    prompts = first_turns(run)
    requests = [request for prompt in prompts for request in asked_of(prompt, samples, run.tokens // SHARE)]
    records = await run.answers(requests)
    records_per_prompt = samples + 2
    grouped = [
        records[index : index + records_per_prompt] for index in range(0, len(records), records_per_prompt)
    ]
    questions = [
        question_of(prompt, prompt_records)
        for prompt, prompt_records in zip(prompts, grouped)
        if all("error" not in record for record in prompt_records)
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
    """Return the requests of one prompt: direct, planned, then the sampled ones.

    samples: their number. tokens: maximum tokens of a sampled answer.
    """
    limits = {"temperature": SAMPLED, "max_new_tokens": tokens}
    sampled = [
        Asked(prompt, "direct", f"sampled {seed}", limits | {"seed": seed}) for seed in range(1, samples + 1)
    ]
    return [Asked(prompt, "direct"), Asked(prompt, "sot"), *sampled]


def question_of(prompt: Prompt, records: Sequence[Record]) -> AskedQuestion:
    """Return a question with its answers. records: in the order of `asked_of`."""
    direct, planned, *sampled_turns = [record["turns"][0] for record in records]
    headings, bodies = zip(*planned["points"]) if planned["points"] else ((), ())
    return AskedQuestion(
        f"{prompt.task} {prompt.id}",
        prompt.category,
        prompt.turns[0],
        direct["text"],
        PlannedAnswer(planned["text"], tuple(headings), tuple(bodies)),
        tuple(turn["text"] for turn in sampled_turns),
    )


ROUTING = "routing"
PLANNED = "list"  # the category that is to be planned; no other one is
# Prompts of every source.
EACH = 20  # prompts of every source
SHARES = (text("category", "category"), figure("n", "prompts", 0), figure("planned", "planned"))


def routing_prompts() -> list[Prompt]:
    """Return 40 prompts whose answers are lists, and 20 each of chit-chat, maths and code."""
    sources = (("vicuna", PLANNED), ("gsm8k", "maths"), ("humaneval", "code"))
    borrowed_prompts = [
        replace(prompt, task=ROUTING, id=f"{task} {prompt.id}", category=category, references=())
        for task, category in sources
        for prompt in read_task(task)[:EACH]
    ]
    return [*read_task(ROUTING), *borrowed_prompts]


async def routing(run: Run) -> int:
    """Measure how often mode auto plans what has parts, and what has none; write what went the wrong way.
    Return 1 if nothing was answered, else 0.
    """
    records = await run.answers([Asked(prompt, "auto") for prompt in first_turns(run)])
    answered = [record for record in records if "error" not in record]
    wrong = [one for one in answered if is_planned(one) != (one["category"] == PLANNED)]
    rows: list[Record] = []
    for name in dict.fromkeys(one["category"] for one in answered):
        planned_flags = [is_planned(one) for one in answered if one["category"] == name]
        rows.append({"category": name, "prompts": len(planned_flags), "planned": fmean(planned_flags)})
    run.say(f"{markdown(SHARES, rows)}\n")
    for one in wrong:
        question_text = " ".join(one["questions"][0].split())[:90]
        run.say(f"{one['category']}, {one['turns'][0]['decision']}: {question_text}")
    run.complain(records)
    run.write(ROUTING, named(rows, "category"), wrong=[one["id"] for one in wrong])
    return 0 if answered else 1


def is_planned(record: Record) -> bool:
    """Return whether the answer of a record has at least two points."""
    return len(record["turns"][0]["points"]) >= 2


TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """A chain of `nodes` drafts, or a tree of so many nodes, its root left out."""

    kind: str
    nodes: int

    @property
    def name(self) -> str:
        """Return the shape as it is written, such as "chain:5"."""
        return f"{self.kind}:{self.nodes}"

    @property
    def drafting(self) -> DraftOptions:
        """Return options with which the whole shape is drafted in every step, whether or not it is
        profitable.

        Of a tree of 8 levels, with 10 children of a node as EAGLE-2 has them, the likeliest nodes are kept.
        """
        if self.kind == "chain":
            return DraftOptions(mode="linear", depth=self.nodes, nodes=self.nodes, tuner="fixed")
        return DraftOptions(mode="tree", depth=8, breadth=10, nodes=self.nodes, tuner="fixed")


def shapes_of(written: str) -> list[DraftShape]:
    """Return the shapes of a text such as "chain:5,tree:24". Raises InvalidRequest for any other text."""
    shapes: list[DraftShape] = []
    for part in written.split(","):
        kind, _, nodes = part.strip().partition(":")
        if kind not in ("chain", "tree") or not nodes.isdecimal() or not int(nodes):
            raise InvalidRequest(f"shapes are such as chain:5,tree:24, got {part!r}", field="draft_shapes")
        shapes.append(DraftShape(kind, int(nodes)))
    return shapes


async def draft_shapes(run: Run, shapes: Sequence[DraftShape]) -> int:
    """Measure tokens per step of direct answers by shapes of drafts, greedy and sampled, with a fleet for
    each shape; return 1 if there is no result, else 0.
    """
    if run.wanted.master is not None:
        raise InvalidRequest(
            "a fleet is opened for each shape, so there is no --master", field="draft_shapes"
        )
    prompts = first_turns(run)
    rows = list[Record]()
    all_records: list[Record] = []
    for shape in shapes:
        requests = [
            Asked(
                prompt, "direct", f"{shape.name} at {temperature:g}", {"temperature": temperature, "seed": 1}
            )
            for temperature in TEMPERATURES
            for prompt in prompts
        ]
        records = await run.answers(requests, replace(run.wanted, drafting=shape.drafting))
        all_records += records
        for index, temperature in enumerate(TEMPERATURES):
            shape_records = records[index * len(prompts) : (index + 1) * len(prompts)]
            rows += [
                row | {"drafts": shape.name, "temperature": temperature} for row in steps_of(shape_records)
            ]
    run.say(markdown(STEPS, rows))
    run.complain(all_records)
    run.write("shapes", named(rows, "task", "drafts", "temperature"))
    return 0 if rows else 1


def steps_of(records: Sequence[Record]) -> list[Record]:
    """Return a row for each task: tokens per step over all steps, and their bootstrap interval over
    questions.
    """
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
    """Return the prompts with their first turn alone. Raises InvalidRequest or ModelError if the run cannot
    begin.
    """
    run.check()
    return [replace(prompt, turns=prompt.turns[:1]) for prompt in run.prompts]
