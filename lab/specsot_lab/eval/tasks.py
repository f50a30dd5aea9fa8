"""The tasks: their prompts, and how an answer to one is scored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import specsot_bench as bench
from specsot.errors import InvalidRequest, ModelError
from specsot_lab.eval import scoring

DATA = Path(__file__).parent / "data"
PASSAGES = Path(bench.__file__).parent / "data"  # the tables of the product read these, too
KEPT_THERE = ("multi-doc-qa",)
NUMBERS = ("retrieval", "gsm8k")  # are what is asked for
TASKS = ("planning", "retrieval", "multi-doc-qa", "gsm8k", "mt_bench", "vicuna", "humaneval", "routing")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, and those that follow it in the same conversation.

    turns:      as they are asked, instructions of its own in front of the first.
    references: right answers to the first.
    dimensions: what a plan must speak of; drawn from the question where none are given.
    """

    task: str
    id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[str, ...] = ()
    dimensions: tuple[str, ...] = ()


def read_task(name: str, file: Path | None = None) -> list[Prompt]:
    """Return a task's own prompts, or those of a file in the same form.

    name: one of TASKS. file: JSON lines; None: the prompts that ship with the lab.
    Raises InvalidRequest for an unknown task, ModelError for an unreadable file.
    """
    if name not in TASKS:
        raise InvalidRequest(f"no task is called {name!r}; they are {', '.join(TASKS)}", field="tasks")
    path = file or (PASSAGES if name in KEPT_THERE else DATA) / f"{name}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a text may have other ends of lines in it
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: no prompts of a task ({error})") from None
    prompts_by_id: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = _read(f"{path}, line {number}", name, line)
            if prompt.id in prompts_by_id:
                raise ModelError(f"{path}, line {number}: a prompt before it has the id {prompt.id!r}, too")
            prompts_by_id[prompt.id] = prompt
    return list(prompts_by_id.values())


def score(prompt: Prompt, answer: str) -> dict[str, float]:
    """Return the scores of an answer to the first turn, by name; the first one is the task's quality. Empty
    if the task has none.
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


def _read(place: str, task: str, line: str) -> Prompt:
    """Return the prompt of a line. place: of the line, for the error. task: name. Raises ModelError."""
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("not an object")
        return _prompt(task, cast("dict[str, Any]", row))
    except KeyError as error:
        raise ModelError(f"{place}: no prompt of a task: it has no {error}") from None
    except ValueError as error:
        raise ModelError(f"{place}: no prompt of a task: {error}") from None


def _prompt(task: str, row: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a JSON object. Raises KeyError for a missing field, ValueError for an impossible
    one.
    """
    turns = _texts("turns", row["turns"])
    references = _texts("reference", row.get("reference"))
    if not turns:
        raise ValueError("turns is empty")
    if task in NUMBERS:
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
    """Return a list's texts, numbers included; none for None. Raises ValueError for anything else: the
    letters of a text would be taken for texts.

    name: of the field. value: as read.
    """
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {value!r}")
    elements = cast("list[object]", value or [])
    if not all(isinstance(element, str | int | float) for element in elements):
        raise ValueError(f"{name} must be a list of texts, got {value!r}")
    return tuple(map(str, elements))
