"""What the journal keeps of a request: it happens again in a master that reads it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from specsot import errors
from specsot.core.frames import Outcome
from specsot.errors import PlanError, SpecsotError, Unavailable


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


def fingerprint_of(tokens: Sequence[int]) -> str:
    """Of a prompt: another template, plan file or tokenizer gives another one."""
    return blake2b(array("q", tokens).tobytes(), digest_size=8).hexdigest()


def check_prompt_unchanged(before: str, tokens: Sequence[int]) -> None:
    """Raises Unavailable: what was written then answered another prompt. before: "" for unknown."""
    if before and before != fingerprint_of(tokens):
        raise Unavailable("the master was restarted, and words its prompts differently now; ask again")


def error_of(name: str, message: str) -> SpecsotError:
    kind = getattr(errors, name, SpecsotError)
    return PlanError(message, "") if kind is PlanError else kind(message)
