"""Records: what the journal stores of a request, so that a later master can replay it."""

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
    """Record: the request entered the ring.

    at: seconds after the request's arrival.
    found: how many first tokens of its prompt the ring's prefix cache had.
    plans: False if the ring had no room for the request's speculative plan, so that it is answered directly.
    """

    at: float
    found: int
    plans: bool = True


@dataclass(frozen=True, slots=True)
class BranchRecord:
    """Record: the branch of a point was opened.

    point: the point's id.
    wording: a fingerprint of the branch's prompt; "" without one, which is then not compared.
    """

    point: int
    wording: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Record: one step of the ring advanced the request.

    at: seconds after the request's arrival.
    outcomes: the outcome of each sequence that the step advanced, as (ordinal, outcome).
    """

    at: float
    outcomes: tuple[tuple[int, Outcome], ...]


@dataclass(frozen=True, slots=True)
class ReopenedRecord:
    """Record: a sequence was opened again after a repair. Its draft rounds count from 0.

    ordinal: 0 for the skeleton or the answer, else the id of the point that the sequence writes.
    """

    ordinal: int


@dataclass(frozen=True, slots=True)
class CancelledRecord:
    """Record: the client cancelled the request.

    at: seconds after the request's arrival.
    """

    at: float


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """Record: the request ended with an error.

    error: the name of the error's class.
    message: the error's message.
    """

    error: str
    message: str


# Everything that can happen to a request.
Record = AdmittedRecord | BranchRecord | StepRecord | ReopenedRecord | CancelledRecord | FailedRecord


def fingerprint_of(tokens: Sequence[int]) -> str:
    """Return a fingerprint of a prompt's tokens: 16 hexadecimal digits, also for no tokens. Another template,
    plan file or tokenizer changes it.

    tokens: token ids.
    """
    return blake2b(array("q", tokens).tobytes(), digest_size=8).hexdigest()


def check_prompt_unchanged(old_fingerprint: str, tokens: Sequence[int]) -> None:
    """Check that a prompt has not changed since the journal was written; return nothing if it has not.

    old_fingerprint: the fingerprint in the journal; "" if it is unknown, then nothing is checked.
    tokens: the token ids of the prompt as this master words it.

    Raises Unavailable if it has, because the journal's text answers another prompt.
    """
    if old_fingerprint and old_fingerprint != fingerprint_of(tokens):
        raise Unavailable("the master was restarted, and words its prompts differently now; ask again")


def error_of(class_name: str, message: str) -> SpecsotError:
    """Return the error with this class name and message. It is a SpecsotError if no class in `specsot.errors`
    has the name.

    class_name: the name of the error's class, such as "TimedOut".
    message: the error's message; a PlanError gets no plan text.
    """
    kind = getattr(errors, class_name, SpecsotError)
    return PlanError(message, "") if kind is PlanError else kind(message)
