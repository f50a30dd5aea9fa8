"""What `specsot eval` measures in addition to quality and speed: aspects, routing, and shapes of drafts.

Each measurement asks only the first question of every prompt, prints a table, and writes the same figures as
JSON.
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
from specsot_lab.eval.running import PromptRequest, Run
from specsot_lab.eval.tasks import Prompt, read_task
from specsot_master.core.plans.wording import ENGLISH

# Temperature of the sampled answers. They must differ, and still make sense. Untuned.
SAMPLING_TEMPERATURE = 0.7
# A sampled answer has at most 1 / SAMPLE_TOKENS_DIVISOR of the tokens of the other answers, because the most
# important aspects come first. Untuned.
SAMPLE_TOKENS_DIVISOR = (
    4  # a sampled answer may have one in so many of the others' tokens: what matters comes first
)


async def aspects(run: Run, samples: int) -> int:
    """Measure quality without a judge, by the terms on which sampled direct answers agree. Return 1 if no
    question has aspects, else 0.

    run: The prompts, the fleet and the folder. The fleet's answers to each prompt are asked for, or read from
        the folder.
    samples: Number of sampled direct answers to each question.
    Raises InvalidRequest or ModelError if the run cannot begin, see `Run.check`.

    A question counts only if all of its answers, the sampled ones included, were given. The number of
    questions that have no aspects or answers is written, and a line for each record with an error. Without
    any row, no file is written.
    """
    prompts = first_turns(run)
    requests = [
        request
        for prompt in prompts
        for request in requests_of(prompt, samples, run.max_tokens // SAMPLE_TOKENS_DIVISOR)
    ]
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
        our_words = [getattr(ENGLISH, field.name) for field in fields(ENGLISH)]
        table = by_category(rows)
        plans = plans_of(questions, our_words)
        run.write_lines(*lines_of(table, plans))
        run.write(
            "aspects",
            [*named(table, "category"), *named(rows, "id")],
            samples=samples,
            temperature=SAMPLING_TEMPERATURE,
            plans=plans,
        )
    if num_missing := len(prompts) - len(rows):
        run.write_lines(f"{num_missing} of {len(prompts)} questions have no aspects or answers")
    run.report_unanswered(records)
    return 0 if rows else 1


def requests_of(prompt: Prompt, samples: int, max_tokens: int) -> list[PromptRequest]:
    """Return the requests of one prompt: the direct answer, the planned answer, then the sampled direct
    answers with the seeds 1, 2, ...

    prompt: The prompt.
    samples: Number of sampled answers.
    max_tokens: Maximum number of tokens of a sampled answer.

    The first two have the run's own options; the sampled ones are named "sampled 1", "sampled 2" and so on,
    and have the temperature SAMPLING_TEMPERATURE.
    """
    limits = {"temperature": SAMPLING_TEMPERATURE, "max_new_tokens": max_tokens}
    sampled = [
        PromptRequest(prompt, "direct", f"sampled {seed}", limits | {"seed": seed})
        for seed in range(1, samples + 1)
    ]
    return [PromptRequest(prompt, "direct"), PromptRequest(prompt, "sot"), *sampled]


def question_of(prompt: Prompt, records: Sequence[Record]) -> AskedQuestion:
    """Return a question with all of its answers.

    prompt: The prompt.
    records: The records of the prompt without errors, in the order of `requests_of`.

    The name is "<task> <id>". An answer without points has no headings and bodies.
    """
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


# Name of the task, and of the file of its results.
ROUTING = "routing"
# The only category whose prompts should be planned.
PLANNED_CATEGORY = "list"
# Prompts. Number that is borrowed from each other task. Untuned.
PROMPTS_PER_SOURCE = 20
# Columns of the table of routing.
ROUTING_COLUMNS = (text("category", "category"), figure("n", "prompts", 0), figure("planned", "planned"))


def routing_prompts() -> list[Prompt]:
    """Return the prompts of the routing task, then PROMPTS_PER_SOURCE each of questions whose answers are
    lists, of maths and of code. Their category says which of these they are.

    The category of borrowed prompts is PLANNED_CATEGORY, "maths" or "code". Their ids begin with the name of
    their own task, and they have no references. Raises ModelError if a file cannot be read.
    """
    sources = (("vicuna", PLANNED_CATEGORY), ("gsm8k", "maths"), ("humaneval", "code"))
    borrowed_prompts = [
        replace(prompt, task=ROUTING, id=f"{task} {prompt.id}", category=category, references=())
        for task, category in sources
        for prompt in read_task(task)[:PROMPTS_PER_SOURCE]
    ]
    return [*read_task(ROUTING), *borrowed_prompts]


async def routing(run: Run) -> int:
    """Measure which fraction of each category the mode "auto" plans, and write a line for each prompt that
    was routed wrongly. Return 1 if no prompt was answered, else 0.

    run: The prompts, the fleet and the folder.
    Raises InvalidRequest or ModelError if the run cannot begin, see `Run.check`.

    A prompt that was not answered has a line of its own and does not count. A prompt is routed wrongly if it
    is planned without being of PLANNED_CATEGORY, or the reverse. Its line has at most 90 characters of the
    question.
    """
    records = await run.answers([PromptRequest(prompt, "auto") for prompt in first_turns(run)])
    answered = [record for record in records if "error" not in record]
    misrouted = [
        record for record in answered if is_planned(record) != (record["category"] == PLANNED_CATEGORY)
    ]
    rows: list[Record] = []
    for name in dict.fromkeys(record["category"] for record in answered):
        planned_flags = [is_planned(record) for record in answered if record["category"] == name]
        rows.append({"category": name, "prompts": len(planned_flags), "planned": fmean(planned_flags)})
    run.write_lines(f"{markdown(ROUTING_COLUMNS, rows)}\n")
    for record in misrouted:
        question_text = " ".join(record["questions"][0].split())[:90]
        run.write_lines(f"{record['category']}, {record['turns'][0]['decision']}: {question_text}")
    run.report_unanswered(records)
    run.write(ROUTING, named(rows, "category"), wrong=[record["id"] for record in misrouted])
    return 0 if answered else 1


def is_planned(record: Record) -> bool:
    """Return True if the answer of a record has at least two points.

    record: A record with at least one turn.
    """
    return len(record["turns"][0]["points"]) >= 2


# Temperatures at which shapes of drafts are measured: greedy and sampled.
TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The shape of a draft: a chain of tokens or a tree.

    kind: "chain" or "tree".
    nodes: Number of drafted tokens; the root of a tree does not count.
    """

    kind: str
    nodes: int

    @property
    def name(self) -> str:
        """Return the shape in the notation of the command line, such as "chain:5"."""
        return f"{self.kind}:{self.nodes}"

    @property
    def drafting(self) -> DraftOptions:
        """Return options with which the whole shape is drafted in every step, whether or not that is
        profitable.

        A tree has up to 8 levels and 10 children of a node, as in EAGLE-2; of these, the likeliest nodes are
        drafted.
        """
        if self.kind == "chain":
            return DraftOptions(mode="linear", depth=self.nodes, nodes=self.nodes, tuner="fixed")
        return DraftOptions(mode="tree", depth=8, breadth=10, nodes=self.nodes, tuner="fixed")


def shapes_of(shape_list: str) -> list[DraftShape]:
    """Return the shapes that a text such as "chain:5,tree:24" lists, in order.

    shape_list: Shapes in the notation of the command line, separated by commas.
    Raises InvalidRequest for any other text, also for an empty one and for a shape of 0 nodes.

    Spaces around a shape are ignored; a shape may occur twice. The kind is "chain" or "tree", in lower case.
    """
    shapes: list[DraftShape] = []
    for part in shape_list.split(","):
        kind, _, nodes = part.strip().partition(":")
        if kind not in ("chain", "tree") or not nodes.isdecimal() or not int(nodes):
            raise InvalidRequest(f"shapes are such as chain:5,tree:24, got {part!r}", field="draft_shapes")
        shapes.append(DraftShape(kind, int(nodes)))
    return shapes


async def draft_shapes(run: Run, shapes: Sequence[DraftShape]) -> int:
    """Measure tokens per step of direct answers for each shape of drafts, greedy and sampled, with a new
    fleet for each shape. Return 1 if no answer had steps, else 0.

    run: The prompts, the options of the fleets, and the folder.
    shapes: The shapes to compare.
    Raises InvalidRequest if the run uses a master that already runs, and InvalidRequest or ModelError if the
    run cannot begin, see `Run.check`.

    Answers that are in the folder already are not asked for again. Rows are written shape by shape, greedy
    first. Without any row, an empty table is written.
    """
    if run.fleet_options.master is not None:
        raise InvalidRequest(
            "a fleet is opened for each shape of drafts, so --master cannot be used", field="draft_shapes"
        )
    prompts = first_turns(run)
    rows = list[Record]()
    all_records: list[Record] = []
    for shape in shapes:
        requests = [
            PromptRequest(
                prompt, "direct", f"{shape.name} at {temperature:g}", {"temperature": temperature, "seed": 1}
            )
            for temperature in TEMPERATURES
            for prompt in prompts
        ]
        records = await run.answers(requests, replace(run.fleet_options, drafting=shape.drafting))
        all_records += records
        for index, temperature in enumerate(TEMPERATURES):
            shape_records = records[index * len(prompts) : (index + 1) * len(prompts)]
            rows += [
                row | {"drafts": shape.name, "temperature": temperature} for row in steps_of(shape_records)
            ]
    run.write_lines(markdown(SHAPE_COLUMNS, rows))
    run.report_unanswered(all_records)
    run.write("shapes", named(rows, "task", "drafts", "temperature"))
    return 0 if rows else 1


def steps_of(records: Sequence[Record]) -> list[Record]:
    """Return a row for each task: tokens per step over all steps, with its bootstrap interval over questions.
    Records without steps are left out; without any others the list is empty.

    records: The records of one shape at one temperature.

    A mean over questions is weighted by their steps. "tokens" is the mean number of tokens of an answer. The
    tasks are in the order in which they first occur.
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


# Columns of the table of shapes.
SHAPE_COLUMNS = (
    text("set", "task"),
    text("drafts", "drafts"),
    figure("T", "temperature", 1),
    figure("n", "questions", 0),
    figure("steps", "steps", 0),
    figure("tokens a step", "per_step"),
    Column("95 %", lambda row: "{:.2f} .. {:.2f}".format(*row["interval"])),
)


def first_turns(run: Run) -> list[Prompt]:
    """Return the run's prompts, cut to their first question.

    run: The run, whose folder is checked first.
    Raises InvalidRequest or ModelError if the run cannot begin, see `Run.check`.
    """
    run.check()
    return [replace(prompt, turns=prompt.turns[:1]) for prompt in run.prompts]
