"""The files that a run leaves in its output folder, and from which it is continued: settings and answers.

A line is appended as soon as its answer is complete. The settings say which models answered, within which
limits. They contain nothing secret.
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

# Name of the setting that is known only after the fleet was opened.
SERVED_MODELS = "served"
# One line of records.jsonl: the fields of `record_head`, with "scores", "turns" and perhaps "error", see
# `answer_to`.
Record = dict[str, Any]
# What identifies a record, see `key_of`.
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Folder:
    """The output folder of one run. It is created when something is written.

    path: Path of the folder.
    """

    path: Path

    @property
    def records(self) -> Path:
        """Return the path of the answers' file, which has one JSON object per line."""
        return self.path / "records.jsonl"

    @property
    def summary(self) -> Path:
        """Return the path of the results' file, which is JSON."""
        return self.path / "summary.json"

    @property
    def plot(self) -> Path:
        """Return the path of the plot, a PNG."""
        return self.path / "plot.png"

    def forget(self) -> None:
        """Delete the run's files. Files that are absent are skipped, and other files in the folder stay."""
        for file in (self._settings, self.records, self.summary, self.plot):
            file.unlink(missing_ok=True)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the records in the folder, by name.

        Raises ModelError if the folder has no settings, or they cannot be read.
        """
        try:
            return dict(json.loads(self._settings.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"{self._settings}: not settings of a run ({error})") from None

    def check(self, settings: Mapping[str, object]) -> None:
        """Return if this run may add its records to the folder: if the folder has no records, or records of
        the same settings.

        settings: The settings of the present run, by name. SERVED_MODELS may be absent, and is then not
            compared.
        Raises InvalidRequest if a setting differs, ModelError if the stored settings cannot be read.

        Every name that either side has is compared; a setting that one side lacks counts as None there.
        Records without stored settings count as if all of their settings were None. The error names the first
        difference and advises --fresh or another --output.
        """
        if not self._settings.exists() and not self.records.exists():
            return
        stored = self.settings() if self._settings.exists() else {}
        for name in dict.fromkeys((*settings, *stored)):
            stored_value = stored.get(name)
            value = settings.get(name)
            if stored_value == value or (name == SERVED_MODELS and name not in settings):
                continue
            difference = (
                f"{name} was {stored_value!r}, is {value!r}" if name in stored else f"{name} is not recorded"
            )
            message = f"{self.path} has records of other settings: {difference}"
            raise InvalidRequest(f"{message}; delete them with --fresh, or choose another --output", "output")

    def begin(self, settings: Mapping[str, object]) -> None:
        """Store the settings before the first record, and create the folder. Settings that are already stored
        stay as they are.

        settings: The settings of the present run, by name, with SERVED_MODELS.
        Raises InvalidRequest if the folder has records of other settings, ModelError if the stored settings
        cannot be read.

        The folder's parents are created, too.
        """
        self.check(settings)
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._settings.exists():
            self._settings.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @property
    def _settings(self) -> Path:
        """Return the path of the settings' file."""
        return self.path / "settings.json"


def first_matching_folder(name: str, settings: Mapping[str, object]) -> Folder:
    """Return the first of the folders `name`, `name`-2, `name`-3, ... that is new or has records of these
    settings.

    name: Path of the first folder.
    settings: The settings of the present run, by name.
    Raises ModelError if the settings of one of the folders cannot be read.

    Nothing is created.
    """
    for number in count(1):
        folder = Folder(Path(name if number == 1 else f"{name}-{number}"))
        with suppress(InvalidRequest):
            folder.check(settings)
            return folder
    raise AssertionError("count() does not end")


def key_of(record: Record) -> Key:
    """Return the key of a record: task, id, mode and the words of the questions. A question whose words were
    changed has another key, and so no record yet.

    record: A record, or the fields of `record_head`.
    """
    return *prompt_key(record), record.get("mode") or "", *record["questions"]


def prompt_key(record: Record) -> tuple[str, str]:
    """Return the key of a record's prompt: task and id.

    record: A record, or the fields of `record_head`.
    """
    return record["task"], record["id"]


def append(path: Path, record: Record) -> None:
    """Append a record to a file as one line of JSON. The folder and the file are created if they are absent.

    path: The file.
    record: The record.

    Any earlier content of the file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[Record]:
    """Return the records of a file; an empty list if the file does not exist. A last line that was cut off is
    removed from the file.

    path: The file.
    Raises ModelError if another line is not a record.

    The order is that of the file. A file without a single complete line gives an empty list.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    complete_length = content.rfind(b"\n") + 1
    if complete_length < len(content):
        # The complete lines are not written again, so an interruption here loses nothing.
        os.truncate(path, complete_length)
    try:
        return [_record(json.loads(line)) for line in content[:complete_length].splitlines()]
    except ValueError as error:
        raise ModelError(f"{path}: not records of a run ({error})") from None


def _record(value: Any) -> Record:
    """Return a parsed line as a record.

    value: The parsed JSON of the line.
    Raises ValueError if it is not an object with a task, an id and questions.

    Other fields are not checked. The error has the first 80 characters of the line.
    """
    if not isinstance(value, dict) or not {"task", "id", "questions"} <= value.keys():
        raise ValueError(f"a line is {json.dumps(value)[:80]}")
    return cast("Record", value)


def settings_of(options: FleetOptions, max_tokens: int) -> dict[str, Any]:
    """Return those settings of a run that are known before the fleet is open, as they look after being stored
    as JSON.

    options: Options of the fleet. The client's connection is left out, because it may contain a token.
        Fingerprints of the model files are added, unless a master that already runs is used.
    max_tokens: Maximum number of tokens of an answer.
    Raises ModelError if a model of the options cannot be found or read.

    "draft_fingerprint" is None without a head. Tuples become lists.
    """
    fleet_settings: dict[str, Any] = asdict(options)
    # The connection says nothing of the answers, and may contain a token.
    del fleet_settings["client"]
    if options.master is None:
        models = models_of(options)
        fleet_settings["fingerprint"] = fingerprint(models.base)
        fleet_settings["draft_fingerprint"] = models.draft and fingerprint(models.draft)
    return json.loads(json.dumps(fleet_settings | {"max_new_tokens": max_tokens}))


async def served_by(fleet: FleetClient, options: FleetOptions) -> dict[str, Any]:
    """Return the models that a running master reports, as {SERVED_MODELS: [[name, fingerprint], ...]}. Return
    an empty dict for a fleet that this process starts, whose models the settings already name.

    fleet: Client of the open fleet.
    options: Options with which the fleet was opened.

    Raises Unavailable if the master does not answer.
    """
    if options.master is None:
        return {}
    models = (await fleet.info()).models
    return {SERVED_MODELS: [[model.name, model.fingerprint] for model in models]}


# Beginning of a record's error if the fleet did not finish the answer.
UNFINISHED_ERROR = "the answer was broken off"


async def answer_to(
    fleet: FleetClient, prompt: Prompt, mode: Mode, request_options: Mapping[str, Any]
) -> Record:
    """Ask a prompt's questions one after another in one conversation, and return the record. The record has a
    turn for each question that was answered. If a question was refused or its answer not finished, "error"
    says why, and later questions are not asked.

    fleet: Client of the open fleet.
    prompt: The questions, with references for the scores.
    mode: How the questions are answered: "direct", "sot" or "auto".
    request_options: Further options of every request, by name, such as "max_new_tokens".

    A refusal is an InvalidRequest; its text is the error. Any other end than a stop or the limit of tokens
    gives an error that begins with UNFINISHED_ERROR. The scores are those of the first turn, and stay {} if
    it was not answered. Other errors of the fleet are raised.
    """
    turns: list[dict[str, Any]] = []
    record = record_head(prompt, mode) | {"scores": {}, "turns": turns}
    messages: list[Message] = []
    for question in prompt.turns:
        messages.append(Message("user", question))
        try:
            answer = answer_of(await final_view(fleet, ask_of(messages, mode=mode, **request_options)))
        except InvalidRequest as error:  # for example a prompt that is longer than the model's context
            return record | {"error": str(error)}
        if answer.reason not in (Reason.STOP, Reason.LENGTH):
            return record | {"error": f"{UNFINISHED_ERROR}: {answer.reason.value}"}
        if not turns:
            record["scores"] = score(prompt, answer.text)
        turns.append(_turn(answer))
        messages.append(Message("assistant", answer.text))
    return record


def record_head(prompt: Prompt, mode: Mode) -> Record:
    """Return the fields of a record that say what was asked: task, category, id, mode and questions.

    prompt: The prompt.
    mode: The mode in which the prompt is answered.
    """
    fields = {"task": prompt.task, "category": prompt.category, "id": prompt.id, "mode": mode}
    return fields | {"questions": list(prompt.turns)}


def is_broken_off(record: Record) -> bool:
    """Return True if the fleet failed to finish the answer, so that asking again may succeed. Return False
    for an answer and for a refusal, which would be repeated.

    record: A record.
    """
    return record.get("error", "").startswith(UNFINISHED_ERROR)


def _turn(answer: Answer) -> dict[str, Any]:
    """Return one turn of a record as JSON values: the text, its seconds, tokens, steps, branches and points,
    and the router's decision.

    answer: The complete answer to one question.
    """
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
