"""One prompt in one mode: every turn asked behind the answers before it, and what came as a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsot.errors import InvalidRequest
from specsot.events import Reason
from specsot.params import Message, Mode
from specsot_app.core.ask import Answer, answer_of, ask_of
from specsot_app.fleet.opening import FleetClient, hear
from specsot_lab.eval.records import Record
from specsot_lab.eval.tasks import Prompt, score

BROKEN_OFF = "the answer was broken off"


async def answer_to(fleet: FleetClient, prompt: Prompt, mode: Mode, asked: Mapping[str, Any]) -> Record:
    """As many turns as were answered; `error` says why one was not. asked: options of every request."""
    turns: list[dict[str, Any]] = []
    record = about(prompt, mode) | {"scores": {}, "turns": turns}
    said: list[Message] = []
    for question in prompt.turns:
        said.append(Message("user", question))
        try:
            told = answer_of(await hear(fleet, ask_of(said, mode=mode, **asked)))
        except InvalidRequest as error:  # too long for the model's context, say
            return record | {"error": str(error)}
        if told.reason not in (Reason.STOP, Reason.LENGTH):
            return record | {"error": f"{BROKEN_OFF}: {told.reason.value}"}
        if not turns:
            record["scores"] = score(prompt, told.text)
        turns.append(_turn(told))
        said.append(Message("assistant", told.text))
    return record


def about(prompt: Prompt, mode: Mode) -> Record:
    """The beginning of its record."""
    named = {"task": prompt.task, "category": prompt.category, "id": prompt.id, "mode": mode}
    return named | {"questions": list(prompt.turns)}


def is_broken_off(record: Record) -> bool:
    """The fleet failed it, which may be better the next time; a refusal will be the same."""
    return record.get("error", "").startswith(BROKEN_OFF)


def _turn(answer: Answer) -> dict[str, Any]:
    told = answer.statistics
    return {
        "text": answer.text,
        "seconds": told.seconds,
        "first": told.seconds_to_first_token,
        "tokens": told.merged_tokens,
        "branches": told.branches,
        "points": [[branch.point.title, branch.text] for branch in answer.branches],
        "laps": told.laps,
        "per_lap": told.mean_accepted,
        "decision": told.decision,
    }
