"""What a run leaves in its output folder, and goes on from: settings and answers.

A line is appended as soon as it is there. Settings say who answered, within which limits, and
nothing secret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

from specsot.checkpoint.fingerprint import fingerprint
from specsot.errors import InvalidRequest, ModelError
from specsot.events import Reason
from specsot.params import Message, Mode
from specsot_app.core.ask import Answer, answer_of, ask_of
from specsot_app.fleet.opening import FleetClient, final_view
from specsot_app.fleet.options import FleetOptions, models_of
from specsot_lab.eval.tasks import Prompt, score

# The setting that is known only once the fleet is open.
SERVED = "served"  # the setting that is known only once the fleet is open
Record = dict[str, Any]
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Folder:
    """The output folder of one run, at `path`; it is created when something is written."""

    path: Path

    @property
    def records(self) -> Path:
        """Return the file of the answers, one JSON object a line."""
        return self.path / "records.jsonl"

    @property
    def summary(self) -> Path:
        """Return the file of the results, as JSON."""
        return self.path / "summary.json"

    @property
    def plot(self) -> Path:
        """Return the file of the picture."""
        return self.path / "plot.png"

    def forget(self) -> None:
        """Delete the run's files; other files in the folder stay."""
        for file in (self._settings, self.records, self.summary, self.plot):
            file.unlink(missing_ok=True)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the records in the folder. Raises ModelError if there are none, or they
        cannot be read.
        """
        try:
            return dict(json.loads(self._settings.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"{self._settings}: not settings of a run ({error})") from None

    def check(self, settings: Mapping[str, object]) -> None:
        """Raise InvalidRequest if the folder's records were asked for with other settings; return if it has
        no records.

        settings: of the present run, by name. Raises ModelError for unreadable settings.
        """
        if not self._settings.exists() and not self.records.exists():
            return
        stored = self.settings() if self._settings.exists() else {}
        for name in dict.fromkeys((*settings, *stored)):
            stored_value = stored.get(name)
            value = settings.get(name)
            if stored_value == value or (name == SERVED and name not in settings):
                continue
            difference = (
                f"{name} was {stored_value!r}, is {value!r}" if name in stored else f"{name} is not told"
            )
            message = f"{self.path} has records of other settings: {difference}"
            raise InvalidRequest(f"{message}; --fresh forgets them, another --output keeps them", "output")

    def begin(self, settings: Mapping[str, object]) -> None:
        """Store the settings before the first record. Raises InvalidRequest for a folder with other settings,
        ModelError.
        """
        self.check(settings)
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._settings.exists():
            self._settings.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @property
    def _settings(self) -> Path:
        """Return the file of the settings."""
        return self.path / "settings.json"


def first_matching_folder(name: str, settings: Mapping[str, object]) -> Folder:
    """Return the first of the folders `name`, `name`-2, `name`-3, ... that is new or has records of these
    settings.

    Raises ModelError for unreadable settings.
    """
    for number in count(1):
        folder = Folder(Path(name if number == 1 else f"{name}-{number}"))
        with suppress(InvalidRequest):
            folder.check(settings)
            return folder
    raise AssertionError("count() does not end")


def key_of(record: Record) -> Key:
    """Return what a record answers: task, id, mode and the questions' words, so that a changed question has
    no record yet.
    """
    return *prompt_key(record), record.get("mode") or "", *record["questions"]


def prompt_key(record: Record) -> tuple[str, str]:
    """Return (task, id) of a record's prompt."""
    return record["task"], record["id"]


def append(path: Path, record: Record) -> None:
    """Append a record to a file as one line; the folder is created. path: the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[Record]:
    """Return the records of a file; none if it does not exist. A last line that was cut off is removed from
    the file. Raises ModelError for other content.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    complete_length = content.rfind(b"\n") + 1
    if complete_length < len(content):
        os.truncate(
            path, complete_length
        )  # nothing is written anew: whoever is interrupted here has lost nothing
    try:
        return [_record(json.loads(line)) for line in content[:complete_length].splitlines()]
    except ValueError as error:
        raise ModelError(f"{path}: not records of a run ({error})") from None


def _record(value: Any) -> Record:
    """Return a parsed line as a record. Raises ValueError if it is none."""
    if not isinstance(value, dict) or not {"task", "id", "questions"} <= value.keys():
        raise ValueError(f"a line is {json.dumps(value)[:80]}")
    return cast("Record", value)


def settings_of(options: FleetOptions, max_tokens: int) -> dict[str, Any]:
    """Return a run's settings as far as they are known before the fleet is open, as JSON gives them back.

    options: of the fleet; the connection, which may have a token, is left out. max_tokens: of an answer.
    Raises ModelError.
    """
    settings: dict[str, Any] = asdict(options)
    del settings["client"]  # the way there, and a token
    if options.master is None:
        models = models_of(options)
        settings["fingerprint"] = fingerprint(models.base)
        settings["draft_fingerprint"] = models.draft and fingerprint(models.draft)
    return json.loads(json.dumps(settings | {"max_new_tokens": max_tokens}))


async def served_by(fleet: FleetClient, options: FleetOptions) -> dict[str, Any]:
    """Return what a master elsewhere says that it serves; nothing for a fleet of our own, of which all is
    known.
    """
    if options.master is None:
        return {}
    models = (await fleet.info()).models
    return {SERVED: [[model.name, model.fingerprint] for model in models]}


# Beginning of the error of an answer that the fleet did not finish.
BROKEN_OFF = "the answer was broken off"


async def answer_to(
    fleet: FleetClient, prompt: Prompt, mode: Mode, request_options: Mapping[str, Any]
) -> Record:
    """Return the record of a prompt: as many turns as were answered; its `error` says why one was not.

    fleet: the client. prompt: its turns. mode: how to answer. request_options: of every request.
    """
    turns: list[dict[str, Any]] = []
    record = record_head(prompt, mode) | {"scores": {}, "turns": turns}
    messages: list[Message] = []
    for question in prompt.turns:
        messages.append(Message("user", question))
        try:
            answer = answer_of(await final_view(fleet, ask_of(messages, mode=mode, **request_options)))
        except InvalidRequest as error:  # too long for the model's context, say
            return record | {"error": str(error)}
        if answer.reason not in (Reason.STOP, Reason.LENGTH):
            return record | {"error": f"{BROKEN_OFF}: {answer.reason.value}"}
        if not turns:
            record["scores"] = score(prompt, answer.text)
        turns.append(_turn(answer))
        messages.append(Message("assistant", answer.text))
    return record


def record_head(prompt: Prompt, mode: Mode) -> Record:
    """Return the part of a record that says what was asked: task, category, id, mode and questions."""
    fields = {"task": prompt.task, "category": prompt.category, "id": prompt.id, "mode": mode}
    return fields | {"questions": list(prompt.turns)}


def is_broken_off(record: Record) -> bool:
    """Return whether the fleet failed the answer, which may succeed the next time; a refusal will be the
    same.
    """
    return record.get("error", "").startswith(BROKEN_OFF)


def _turn(answer: Answer) -> dict[str, Any]:
    """Return one turn of a record: text, seconds, tokens, points and so on."""
    statistics = answer.statistics
    return {
        "text": answer.text,
        "seconds": statistics.seconds,
        "first": statistics.seconds_to_first_token,
        "tokens": statistics.merged_tokens,
        "branches": statistics.branches,
        "points": [[branch.point.title, branch.text] for branch in answer.branches],
        "steps": statistics.steps,
        "per_step": statistics.mean_accepted,
        "decision": statistics.decision,
    }
