"""What `specsot eval --router`, `--plans` and `--lengths` share: a local model that was not taught to plan,
labelled questions, answers to all of them, and the wording in the model's specsot.json.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TextIO, TypeVar

from specsot.errors import InvalidRequest
from specsot_app.fleet.opening import FleetClient, Opener
from specsot_app.fleet.options import FleetOptions, models_of
from specsot_bench.asking import counting_bar
from specsot_master.prompts import Prompts
from specsot_master.text import Text

T = TypeVar("T")
R = TypeVar("R")


def open_local(options: FleetOptions, field: str, stored: str, needless: str) -> tuple[Path, Text, Prompts]:
    """Return the directory of a local model that was not taught to plan, its tokenizer and its prompts.

    options: Options of the fleet.
    field: The option that the user gave.
    stored: What is stored next to the model, such as "the lengths are", for the error.
    needless: Why a model that was taught to plan needs nothing of it, for the error.

    Raises InvalidRequest if a running master is named or the model was taught to plan, and ModelError if the
    model cannot be read.
    """
    if options.master is not None:
        raise InvalidRequest(f"{stored} stored next to a local model, so --master cannot be used", field)
    base = models_of(options).base
    tokenizer = Text(base)
    prompts = Prompts(base, tokenizer)
    if not prompts.listed:
        raise InvalidRequest(f"{base} was trained to {needless}", field)
    return base, tokenizer, prompts


def read_rows(file: Path | None, bundled: str, convert: Callable[[Any], T]) -> tuple[list[T], str]:
    """Return the rows of a file of JSON lines, converted, and the name of the file for errors.

    file: The file. None: the bundled one.
    bundled: Name of the bundled file.
    convert: Converts a row; a missing or wrong field may raise KeyError, ValueError or TypeError.

    Blank lines are skipped. Raises InvalidRequest if the file cannot be read, or if one line cannot be
    converted.
    """
    source = file or resources.files("specsot_lab.eval") / "data" / bundled
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
        return [convert(json.loads(line)) for line in lines if line], str(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{source}: {type(error).__name__}: {error}", "prompts") from None


def question_in(row: Any) -> str:
    """Return the question of a row of JSON lines. Questions that are not strings are converted.

    row: The row. Raises KeyError or TypeError if it has no "question".
    """
    return str(row["question"])


async def answer_each(
    options: FleetOptions,
    opener: Opener,
    items: Sequence[T],
    answer: Callable[[FleetClient, T], Awaitable[R]],
    at_once: int,
    progress: tuple[str, TextIO],
) -> list[R]:
    """Return what a new fleet answers to each item, in order. The fleet is closed in every case.

    options: Options of the fleet.
    opener: Opens the fleet.
    items: What is asked.
    answer: Asks the fleet for one item.
    at_once: Number of items that are asked concurrently.
    progress: What is counted, and the stream that gets the progress bar.

    The first error is raised.
    """
    fleet = await opener(options)
    slots = asyncio.Semaphore(at_once)
    what, err = progress
    with counting_bar(err, what, len(items)) as advance:

        async def answer_one(item: T) -> R:
            """Return the answer to one item, and advance the progress bar.

            item: What is asked.
            """
            async with slots:
                found = await answer(fleet, item)
            advance()
            return found

        try:
            return await asyncio.gather(*map(answer_one, items))
        finally:
            await fleet.close()


def store_wording(file: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Store fields of the wording in a model's specsot.json. Its other fields and the file's other keys stay
    as they are; an absent file is created.

    file: The model's specsot.json.
    changed: Returns the fields to store from the stored "wording".

    Raises ValueError if the file is not JSON.
    """
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    wording = stored.get("wording", {})
    text = json.dumps({**stored, "wording": {**wording, **changed(wording)}}, indent=2, ensure_ascii=False)
    file.write_text(f"{text}\n", encoding="utf-8")
