"""What `specsot eval` measures in addition to quality and speed: aspects and routing.

Each measurement asks only the first question of every prompt, prints a table, and writes the same figures as
JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import fmean

from specsot_bench.core.tables import figure, markdown, text
from specsot_bench.results import named
from specsot_lab.eval.core.aspect_table import (
    AskedQuestion,
    PlannedAnswer,
    by_category,
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


def first_turns(run: Run) -> list[Prompt]:
    """Return the run's prompts, cut to their first question.

    run: The run, whose folder is checked first.
    Raises InvalidRequest or ModelError if the run cannot begin, see `Run.check`.
    """
    run.check()
    return [replace(prompt, turns=prompt.turns[:1]) for prompt in run.prompts]
