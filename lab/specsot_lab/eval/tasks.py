"""The tasks of the evaluation: their prompts, and how the answer to a prompt is scored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import specsot_bench as bench
from specsot.errors import InvalidRequest, ModelError
from specsot_lab.eval import scoring

# Folder of the prompts that ship with the lab.
LAB_DATA = Path(__file__).parent / "data"
# Folder of prompts that the benchmarks of the product read, too.
BENCH_DATA = Path(bench.__file__).parent / "data"
# Tasks whose prompts are in BENCH_DATA.
BENCH_TASKS = ("multi-doc-qa",)
# Tasks whose references must be numbers.
NUMBER_TASKS = ("retrieval", "gsm8k")
# Names of all tasks.
TASKS = ("planning", "retrieval", "multi-doc-qa", "gsm8k", "mt_bench", "vicuna", "humaneval", "routing")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, and the questions that follow it in the same conversation.

    task: Name of the task, one of TASKS.
    id: Id of the prompt, unique in its task.
    category: Category under which results are summed up; the name of the task if the file gives none.
    turns: The questions in order, at least one. A system instruction precedes the first question in the same
        text.
    references: Right answers to the first question; empty if there are none.
    dimensions: Phrases that a plan must mention. For planning prompts without any they are taken from the
        question, see `scoring.dimensions_of`.
    """

    task: str
    id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[str, ...] = ()
    dimensions: tuple[str, ...] = ()


def read_task(name: str, file: Path | None = None) -> list[Prompt]:
    """Return the prompts of a task in the order of the file; blank lines are skipped.

    name: Name of the task, one of TASKS.
    file: JSON lines of prompts for this task. None: the prompts that ship with the lab.
    Raises InvalidRequest for an unknown task, ModelError for an unreadable file, an unusable line, or an id
    that occurs twice.

    Repeated ids count as such within one file only. The file may begin with a byte order mark. The error of a
    line names its number.
    """
    if name not in TASKS:
        raise InvalidRequest(f"no task is called {name!r}; they are {', '.join(TASKS)}", field="tasks")
    path = file or (BENCH_DATA if name in BENCH_TASKS else LAB_DATA) / f"{name}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8-sig").split(
            "\n"
        )  # splitlines() would also split at other line ends inside a string
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: no prompts of a task ({error})") from None
    prompts_by_id: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = _read(f"{path}, line {number}", name, line)
            if prompt.id in prompts_by_id:
                raise ModelError(f"{path}, line {number}: an earlier prompt has the id {prompt.id!r}, too")
            prompts_by_id[prompt.id] = prompt
    return list(prompts_by_id.values())


def score(prompt: Prompt, answer: str) -> dict[str, float]:
    """Return the scores of an answer to a prompt's first question, 0 to 1, by name. The first one is the
    task's quality. Return an empty dict if the task has no score, or the prompt has no references.

    prompt: The prompt with its references.
    answer: The text of the answer to the first question.

    The names are "coverage" (of the dimensions) and "rouge_l" for planning, "exact_match" for retrieval, "f1"
    and "exact_match" for multi-doc-qa, and "final_number" for gsm8k. Planning without dimensions has no
    "coverage", without references no "rouge_l". Other tasks have no score.
    """
    references = prompt.references
    if prompt.task == "planning":
        scores = {"coverage": scoring.coverage(answer, prompt.dimensions)} if prompt.dimensions else {}
        return scores | ({"rouge_l": scoring.rouge_l(answer, references)} if references else {})
    if not references:
        return {}
    if prompt.task == "retrieval":
        return {"exact_match": scoring.first_number(answer, references)}
    if prompt.task == "multi-doc-qa":
        return {
            "f1": scoring.token_f1(answer, references),
            "exact_match": scoring.exact_match(answer, references),
        }
    if prompt.task == "gsm8k":
        return {"final_number": scoring.final_number(answer, references)}
    return {}


def _read(line_location: str, task: str, line: str) -> Prompt:
    """Return the prompt of one line.

    line_location: File and line number, for the error.
    task: Name of the task.
    line: The line, a JSON object.
    Raises ModelError if the line is not a prompt.

    The error says which field is missing, or what cannot be used, after the location.
    """
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("not an object")
        return _prompt(task, cast("dict[str, Any]", row))
    except KeyError as error:
        raise ModelError(f"{line_location}: not a prompt of a task: it has no {error}") from None
    except ValueError as error:
        raise ModelError(f"{line_location}: not a prompt of a task: {error}") from None


def _prompt(task: str, row: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a JSON object.

    task: Name of the task.
    row: The object; "id" and "turns" are required, "system", "category", "reference" and "dimensions" are
        optional.
    Raises KeyError for a missing field, ValueError for a field that cannot be used.

    A system instruction is put before the first question, separated by an empty line. A missing or empty
    category is the task's name. For planning, dimensions that are absent or null are taken from the first
    question; an empty list stays empty. ValueError is raised for empty turns, for fields that are not lists
    of texts or numbers, and for references of NUMBER_TASKS that are not numbers.
    """
    turns = _texts("turns", row["turns"])
    references = _texts("reference", row.get("reference"))
    if not turns:
        raise ValueError("turns is empty")
    if task in NUMBER_TASKS:
        for reference in references:
            scoring.number_of(reference)
    (first, *more), given_dimensions = turns, row.get("dimensions")
    dimensions = (
        scoring.dimensions_of(first)
        if task == "planning" and given_dimensions is None
        else _texts("dimensions", given_dimensions)
    )
    first_turn = f"{row['system']}\n\n{first}" if row.get("system") else first
    return Prompt(
        task, str(row["id"]), str(row.get("category") or task), (first_turn, *more), references, dimensions
    )


def _texts(name: str, value: object) -> tuple[str, ...]:
    """Return the elements of a list as texts; an empty tuple for None.

    name: Name of the field, for the error.
    value: The field as it was read from JSON: None, or a list of texts and numbers.
    Raises ValueError for anything else. A single text is refused, because its letters would be taken for
    texts.

    Numbers are converted to text, and truth values count as numbers. An empty list gives an empty tuple.
    """
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {value!r}")
    elements = cast("list[object]", value or [])
    if not all(isinstance(element, str | int | float) for element in elements):
        raise ValueError(f"{name} must be a list of texts, got {value!r}")
    return tuple(map(str, elements))
