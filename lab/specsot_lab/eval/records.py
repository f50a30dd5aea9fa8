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

SERVED = "served"  # the setting that is known only once the fleet is open
Record = dict[str, Any]
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Folder:
    """One run's, at `path`; made when something is written."""

    path: Path

    @property
    def records(self) -> Path:
        return self.path / "records.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def plot(self) -> Path:
        return self.path / "plot.png"

    def forget(self) -> None:
        """Begin anew; what else lies in the folder stays."""
        for file in (self._settings, self.records, self.summary, self.plot):
            file.unlink(missing_ok=True)

    def settings(self) -> dict[str, Any]:
        """Of the records in it. Raises ModelError."""
        try:
            return dict(json.loads(self._settings.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"{self._settings}: not settings of a run ({error})") from None

    def check(self, settings: Mapping[str, object]) -> None:
        """Raises InvalidRequest where its records were asked for with others, ModelError."""
        if not self._settings.exists() and not self.records.exists():
            return
        kept = self.settings() if self._settings.exists() else {}
        for name in dict.fromkeys((*settings, *kept)):
            was = kept.get(name)
            now = settings.get(name)
            if was == now or (name == SERVED and name not in settings):
                continue
            differs = f"{name} was {was!r}, is {now!r}" if name in kept else f"{name} is not told"
            told = f"{self.path} has records of other settings: {differs}"
            raise InvalidRequest(f"{told}; --fresh forgets them, another --output keeps them", "output")

    def begin(self, settings: Mapping[str, object]) -> None:
        """Remember them before the first record. Raises InvalidRequest, ModelError."""
        self.check(settings)
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._settings.exists():
            self._settings.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @property
    def _settings(self) -> Path:
        return self.path / "settings.json"


def first_fitting(name: str, settings: Mapping[str, object]) -> Folder:
    """The first of the folders `name`, `name`-2, `name`-3, ... that is new or has records of these settings.

    Raises ModelError.
    """
    for number in count(1):
        folder = Folder(Path(name if number == 1 else f"{name}-{number}"))
        with suppress(InvalidRequest):
            folder.check(settings)
            return folder
    raise AssertionError("count() does not end")


def key_of(record: Record) -> Key:
    """What it answers: of other words under an old id there is no record yet."""
    return *whose(record), record.get("mode") or "", *record["questions"]


def whose(record: Record) -> tuple[str, str]:
    return record["task"], record["id"]


def append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_records(path: Path) -> list[Record]:
    """What was appended; a last line that was cut off is dropped. Raises ModelError."""
    if not path.exists():
        return []
    written = path.read_bytes()
    whole = written.rfind(b"\n") + 1
    if whole < len(written):
        os.truncate(path, whole)  # nothing is written anew: whoever is interrupted here has lost nothing
    try:
        return [_record(json.loads(line)) for line in written[:whole].splitlines()]
    except ValueError as error:
        raise ModelError(f"{path}: not records of a run ({error})") from None


def _record(told: Any) -> Record:
    if not isinstance(told, dict) or not {"task", "id", "questions"} <= told.keys():
        raise ValueError(f"a line is {json.dumps(told)[:80]}")
    return cast("Record", told)


def settings_of(wanted: FleetOptions, tokens: int) -> dict[str, Any]:
    """As far as they are known before the fleet is open, and as JSON gives them back. Raises ModelError."""
    asked: dict[str, Any] = asdict(wanted)
    del asked["client"]  # the way there, and a token
    if wanted.master is None:
        models = models_of(wanted)
        asked["fingerprint"] = fingerprint(models.base)
        asked["draft_fingerprint"] = models.draft and fingerprint(models.draft)
    return json.loads(json.dumps(asked | {"max_new_tokens": tokens}))


async def served_by(fleet: FleetClient, wanted: FleetOptions) -> dict[str, Any]:
    """What a master elsewhere says that it serves; of a fleet of our own all is known."""
    if wanted.master is None:
        return {}
    models = (await fleet.info()).models
    return {SERVED: [[model.name, model.fingerprint] for model in models]}


BROKEN_OFF = "the answer was broken off"


async def answer_to(fleet: FleetClient, prompt: Prompt, mode: Mode, asked: Mapping[str, Any]) -> Record:
    """As many turns as were answered; `error` says why one was not. asked: options of every request."""
    turns: list[dict[str, Any]] = []
    record = about(prompt, mode) | {"scores": {}, "turns": turns}
    said: list[Message] = []
    for question in prompt.turns:
        said.append(Message("user", question))
        try:
            told = answer_of(await final_view(fleet, ask_of(said, mode=mode, **asked)))
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
        "steps": told.steps,
        "per_step": told.mean_accepted,
        "decision": told.decision,
    }
