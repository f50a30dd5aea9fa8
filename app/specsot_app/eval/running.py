"""`specsot eval`: asks every prompt directly and with a plan, and keeps what came of it.

Refuses to know how answers are scored and summed up. A record is appended as soon as its answer is there, so
that a run that was broken off goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, cast

from specsot.errors import InvalidRequest, ModelError
from specsot.events import Numbered, Reason
from specsot.params import Mode
from specsot.view import View, advance
from specsot_app.answers import Answer, answer_of
from specsot_app.asking import ask_of
from specsot_app.eval.summing import lines_of, sum_up
from specsot_app.eval.tasks import Prompt, score
from specsot_app.fleets import Fleet, Opener, Wanted
from specsot_app.terminal.progress import counting

MODES: tuple[Mode, ...] = ("direct", "sot")
OF_THE_DEMO = (
    "The demo model babbles outside its topics: its quality here means nothing, only its speed does."
)

Record = dict[str, Any]


async def evaluate(
    prompts: Sequence[Prompt],
    wanted: Wanted,
    tokens: int,
    output: Path,
    out: TextIO,
    err: TextIO,
    opener: Opener,
) -> int:
    """Ask what is not in the output's records yet; then tell the whole. 1 where a request failed."""
    file = output / "records.jsonl"
    kept = read_records(file)
    there = {key_of(record) for record in kept}
    left: list[tuple[Prompt, Mode]] = [
        (prompt, mode) for prompt in prompts for mode in MODES if (prompt.task, prompt.id, mode) not in there
    ]
    if left:
        fleet = await opener(wanted)
        try:
            with counting(err, "answers", len(left)) as count:
                for prompt, mode in left:
                    record = await ask(fleet, prompt, mode, tokens)
                    append(file, record)
                    kept.append(record)
                    count()
        finally:
            await fleet.close()
    return tell(kept, prompts, wanted, output, out)


async def ask(fleet: Fleet, prompt: Prompt, mode: Mode, tokens: int) -> Record:
    """One answer as a record; one that was refused or failed has its error instead of scores."""
    about: Record = {"task": prompt.task, "category": prompt.category, "id": prompt.id, "mode": mode}
    asked = f"{prompt.system}\n\n{prompt.question}" if prompt.system else prompt.question
    try:
        answer = await _answer(fleet, asked, mode, tokens)
    except InvalidRequest as error:  # too long for the model's context, say
        return about | {"error": str(error)}
    if answer.reason is Reason.FAILED:
        return about | {"error": "the request failed"}
    told = answer.statistics
    return about | {
        "scores": score(prompt, answer.text),
        "seconds": told.seconds,
        "first": told.seconds_to_first_token,
        "tokens": told.completion_tokens,
        "branches": told.branches,
        "text": answer.text,
    }


async def _answer(fleet: Fleet, question: str, mode: Mode, tokens: int) -> Answer:
    view = View()
    asked = ask_of(question, mode=mode, max_new_tokens=tokens)
    async with aclosing(cast("AsyncGenerator[Numbered]", fleet.generate(asked))) as events:
        async for numbered in events:
            view = advance(view, numbered.event)
    return answer_of(view)


def tell(
    records: Sequence[Record], prompts: Sequence[Prompt], wanted: Wanted, output: Path, out: TextIO
) -> int:
    """The table, and summary.json beside the records; of the prompts asked for alone."""
    asked = {(prompt.task, prompt.id) for prompt in prompts}
    those = [record for record in records if key_of(record)[:2] in asked]
    answered, failed = ([one for one in those if ("error" in one) is bad] for bad in (False, True))
    lines = sum_up(answered)
    output.mkdir(parents=True, exist_ok=True)
    summary = [asdict(line) | {"speedup": line.speedup, "verdict": line.verdict} for line in lines]
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    out.writelines(f"{line}\n" for line in lines_of(lines))
    if wanted.model is None and wanted.master is None:
        out.write(f"{OF_THE_DEMO}\n")
    for record in failed:
        out.write(f"not answered: {record['task']} {record['id']} ({record['mode']}): {record['error']}\n")
    return 1 if failed and not answered else 0


def key_of(record: Record) -> tuple[str, str, str]:
    return record["task"], record["id"], record["mode"]


def append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[Record]:
    """Records of a run before this one; a last line that was cut off is dropped. Raises ModelError."""
    if not path.exists():
        return []
    whole, _, rest = path.read_text(encoding="utf-8").rpartition("\n")
    if rest:
        path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise ModelError(f"{path}: not records of a run ({error})") from None
