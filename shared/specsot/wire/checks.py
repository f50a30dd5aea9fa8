"""The checks every decoder shares: each passes a value through or raises WireError in one line.

Refuses to know which message it looks at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence, Sized
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from specsot.errors import WireError

MOST = 1 << 14  # sequences, trees, points of a curve in one message

TMessage = TypeVar("TMessage", bound=Message)
T = TypeVar("T")
P = TypeVar("P", bound=Sized)


def parse(kind: type[TMessage], data: bytes) -> TMessage:
    """A protobuf message of `kind` from bytes."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise WireError(f"not a {kind.DESCRIPTOR.full_name}: {len(data)} bytes that do not parse") from None


def require(holds: bool, complaint: str) -> None:
    if not holds:
        raise WireError(complaint)


def few(parts: P, what: str) -> P:
    """Parts of a message, not yet looked at: an empty one takes two bytes, a value hundreds."""
    require(len(parts) <= MOST, f"{len(parts)} {what} in one message, {MOST} are allowed")
    return parts


def chosen(message: Message, oneof: str) -> str:
    """The name of the field that is set in a oneof."""
    name = message.WhichOneof(oneof)
    require(name is not None, f"{message.DESCRIPTOR.name} carries nothing we know")
    return str(name)


def known(table: dict[int, T], number: int, what: str) -> T:
    """The value an enum number stands for."""
    if number not in table:
        raise WireError(f"{what} {number} is unknown")
    return table[number]


def duration(seconds: float, what: str) -> float:
    """A finite number of seconds, not negative."""
    require(math.isfinite(seconds) and seconds >= 0, f"{what} must be seconds >= 0, got {seconds}")
    return seconds


def durations(values: Sequence[float], what: str) -> tuple[float, ...]:
    return tuple(duration(value, what) for value in values)


def ascending(numbers: Sequence[int], what: str) -> tuple[int, ...]:
    """Strictly ascending numbers."""
    rising = all(a < b for a, b in itertools.pairwise(numbers))
    require(rising, f"{what} must ascend")
    return tuple(numbers)


def named(text: str, what: str) -> str:
    """A name or address: not empty, one line, at most 255 characters."""
    require(bool(text) and len(text) <= 255 and text.isprintable(), f"{what} must be a short line of text")
    return text
