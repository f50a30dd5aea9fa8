"""What is written down of a request: what its plan was told, in order.

Told the same again, it stands where it stood, and tells its client the same events.
Pure. Refuses to know files. Times are seconds since the request came.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from specsot.frames import Chance, End, Outcome
from specsot.params import Ask


@dataclass(frozen=True, slots=True)
class AdmittedRecord:
    """It entered the ring, which had `found` tokens of its prompt already."""

    at: float
    found: int


@dataclass(frozen=True, slots=True)
class BranchRecord:
    """The branch of this point was opened. wording: a fingerprint of its prompt, "" for unknown."""

    point: int
    wording: str = ""


@dataclass(frozen=True, slots=True)
class LapRecord:
    """One lap: (ordinal of the sequence, what came of it)."""

    at: float
    said: tuple[tuple[int, Outcome], ...]


@dataclass(frozen=True, slots=True)
class ReopenedRecord:
    """The sequence of this ordinal was opened anew; its steps count from 0."""

    ordinal: int


@dataclass(frozen=True, slots=True)
class CancelledRecord:
    """Its client cancelled it."""

    at: float


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """It ended with this error, by the name of its class."""

    error: str
    message: str


Record = AdmittedRecord | BranchRecord | LapRecord | ReopenedRecord | CancelledRecord | FailedRecord


@dataclass(frozen=True, slots=True)
class JournaledRequest:
    """A request and its records. began: seconds of the wall clock at which it came.

    owner: whose it is, "" for nobody in particular.
    wording: a fingerprint of its first prompt, "" for unknown.
    """

    id: str
    client: str
    ask: Ask
    seed: int
    began: float
    records: tuple[Record, ...] = ()
    owner: str = ""
    wording: str = ""


def fingerprint_of(tokens: Sequence[int]) -> str:
    """Of a prompt: another template, plan file or tokenizer gives another one."""
    return blake2b(array("q", tokens).tobytes(), digest_size=8).hexdigest()


def encode_record(record: Record) -> str:
    match record:
        case AdmittedRecord(at, found):
            parts: list[Any] = ["begun", at, found]
        case BranchRecord(point, wording):
            parts = ["branched", point, wording]
        case LapRecord(at, said):
            parts = ["heard", at, [_encode_outcome(ordinal, outcome) for ordinal, outcome in said]]
        case ReopenedRecord(ordinal):
            parts = ["again", ordinal]
        case CancelledRecord(at):
            parts = ["stopped", at]
        case FailedRecord(error, message):
            parts = ["failed", error, message]
    return json.dumps(parts, separators=(",", ":"))


def decode_record(text: str) -> Record:
    match json.loads(text):
        case ["begun", float(at), int(found)]:
            return AdmittedRecord(at, found)
        case ["branched", int(point), *wording]:
            return BranchRecord(point, *wording)
        case ["heard", float(at), [*said]]:
            return LapRecord(at, tuple(_decode_outcome(*one) for one in said))
        case ["again", int(ordinal)]:
            return ReopenedRecord(ordinal)
        case ["stopped", float(at)]:
            return CancelledRecord(at)
        case ["failed", str(error), str(message)]:
            return FailedRecord(error, message)
        case _:
            raise ValueError(f"no record: {text[:40]}")


def _encode_outcome(ordinal: int, outcome: Outcome) -> list[Any]:
    """Only what plan and log look at."""
    end = outcome.end.value if outcome.end else None
    chances = [[one.logprob, one.top] for one in outcome.chances]
    return [ordinal, outcome.step, outcome.tokens, end, chances]


def _decode_outcome(
    ordinal: int, step: int, tokens: list[int], end: str | None, chances: list[Any]
) -> tuple[int, Outcome]:
    told = tuple(Chance(logprob, tuple((token, other) for token, other in top)) for logprob, top in chances)
    return ordinal, Outcome(0, step, (), tuple(tokens), End(end) if end else None, told)
