"""The tasks: their prompts, and how an answer to one is scored.

Refuses to know how answers come about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsot.errors import InvalidRequest, ModelError
from specsot_app.eval import scoring

DATA = Path(__file__).parent / "data"
TASKS = ("planning", "retrieval", "multi-doc-qa", "gsm8k", "mt_bench", "vicuna", "humaneval")


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
    """A task's own prompts, or those of a file in the same form. Raises InvalidRequest, ModelError."""
    if name not in TASKS:
        raise InvalidRequest(f"no task is called {name!r}; they are {', '.join(TASKS)}", field="tasks")
    path = file or DATA / f"{name}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [_prompt(name, json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{path}: no prompts of a task ({type(error).__name__}: {error})") from None


def score(prompt: Prompt, answer: str) -> dict[str, float]:
    """Of an answer to the first turn, by name; the first one is the task's quality. Empty: it has none."""
    references = prompt.references
    if prompt.task == "planning":
        found = {"coverage": scoring.coverage(answer, prompt.dimensions)} if prompt.dimensions else {}
        return found | ({"rouge_l": scoring.rouge_l(answer, references)} if references else {})
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


def _prompt(task: str, row: Mapping[str, Any]) -> Prompt:
    (first, *more), given = map(str, row["turns"]), row.get("dimensions")
    drawn = scoring.dimensions_of(first) if task == "planning" and given is None else tuple(given or ())
    references = tuple(map(str, row.get("reference") or ()))
    asked = f"{row['system']}\n\n{first}" if row.get("system") else first
    return Prompt(task, str(row["id"]), str(row.get("category", task)), (asked, *more), references, drawn)
