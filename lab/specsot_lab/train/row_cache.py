"""The rows of a run: kept from a run before, if they are what is asked for; else made now, and kept.

Of files the content counts, and not where they lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specsot.errors import InvalidRequest, ModelError
from specsot.model.decoder import Decoder
from specsot.model.fingerprint import fingerprint
from specsot_lab.train import rows as stock
from specsot_lab.train.answers import Watch, Writer, answer_all
from specsot_lab.train.rows import Row
from specsot_lab.train.settings import TrainOptions
from specsot_lab.train.text_files import files_in, read_questions, rows_of
from specsot_master.prompts import Prompts
from specsot_master.text import Text

ROWS = "rows.npz"


def kept_rows(wanted: TrainOptions) -> list[Row] | None:
    """Those in the run's folder; None: there are none. Raises ModelError: they are of other than is given."""
    path = wanted.training / ROWS
    if not path.exists():
        return None
    if found := _objection(stock.made_of(path), wanted):
        raise ModelError(f"{path} {found}; name another --output, or remove it")
    return stock.load(path)


def make_rows(wanted: TrainOptions, decoder: Decoder, watch: Watch) -> list[Row]:
    """Of the questions and texts that are given. Raises InvalidRequest: there are none."""
    made = _making(wanted)  # first: a file may change while the base answers
    text = Text(wanted.model)
    questions = [
        question for path in _files(wanted.questions) for question in read_questions(path, wanted.phrasings)
    ]
    rows: list[Row] = []
    if questions:
        writer = Writer(decoder, text.end_ids, wanted.asking.together)
        rows += answer_all(questions, Prompts(wanted.model, text), text, writer, wanted.asking, watch)
    for path in _files(wanted.data):
        rows += rows_of(path, text, wanted.learning.length, 1 + max((row.group for row in rows), default=-1))
    if not rows:
        raise InvalidRequest("nothing to learn from: give --questions or --data", field="questions")
    stock.save(rows, wanted.training / ROWS, made)
    return rows


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _objection(made: dict[str, Any] | None, wanted: TrainOptions) -> str | None:
    """What speaks against kept rows; None: nothing. Without --questions and --data only the base counts."""
    given, again = _making(wanted), bool(wanted.questions or wanted.data)
    if made is None:
        return "does not say what it was made of" if again else None
    names = sorted(given.keys() | made.keys()) if again else ["model"]
    differing = [f"--{name}" for name in names if given.get(name) != made.get(name)]
    return f"was made with other {', '.join(differing)}" if differing else None


def _making(wanted: TrainOptions) -> dict[str, Any]:
    """What rows are made of, by the names of the flags. --together says only how fast."""
    made: dict[str, Any] = {"model": fingerprint(wanted.model)}
    if wanted.questions:
        made |= {
            "questions": _digests(wanted.questions),
            "phrasing": list(wanted.phrasings),
            "direct": wanted.asking.direct,
            "plan-tokens": wanted.asking.plan_tokens,
            "answer-tokens": wanted.asking.answer_tokens,
        }
    if wanted.data:
        made |= {"data": _digests(wanted.data), "length": wanted.learning.length}
    return made


def _digests(paths: Sequence[Path]) -> list[str]:
    return [digest_of(path) for path in _files(paths)]


def _files(paths: Sequence[Path]) -> list[Path]:
    return [one for path in paths for one in files_in(path)]
