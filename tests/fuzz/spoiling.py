"""Bytes nobody meant: good ones spoiled, and messages of the right kind with any values in any fields."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

TEXTS = st.sampled_from(["", " ", "x", "[END]", "a\nb", "\0", "😴" * 30, "y" * 3000, "../..", "%s{}"])
NUMBERS = st.sampled_from([0.0, -0.0, -1.0, 0.5, 1e308, float("inf"), float("-inf"), float("nan")])
SMALL = st.integers(0, 5)
VALUES = {
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=12) | st.integers(0, 6).map(lambda size: bytes(4 * size)),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: NUMBERS,
    FieldDescriptor.TYPE_FLOAT: NUMBERS,
    FieldDescriptor.TYPE_INT32: SMALL | st.sampled_from([-1, -(2**31), 2**31 - 1]),
    FieldDescriptor.TYPE_INT64: SMALL | st.sampled_from([-1, -(2**63), 2**63 - 1]),
    FieldDescriptor.TYPE_UINT32: SMALL | st.sampled_from([2**31, 2**32 - 1]),
    FieldDescriptor.TYPE_UINT64: SMALL | st.sampled_from([2**32, 2**63, 2**64 - 1]),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 4) | st.sampled_from([99, -1]),
}


@st.composite
def spoiled(draw: st.DrawFn, good: st.SearchStrategy[bytes]) -> bytes:
    """Some bytes changed, left out, put in or said twice; or bytes that never meant anything."""
    data = draw(good)
    for _ in range(draw(st.integers(1, 4))):
        at, until = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
        put = draw(st.sampled_from([b"", data[at:until] * 2]) | st.binary(max_size=9))
        data = data[:at] + put + data[until if draw(st.booleans()) else at + len(put) :]
    return data if draw(st.integers(0, 9)) else draw(st.binary(max_size=80))


@st.composite
def filled(draw: st.DrawFn, kind: type[Message]) -> bytes:
    """A message of this kind that parses, whatever it says."""
    message = kind()
    _fill(draw, message, kind.DESCRIPTOR, depth=6)
    return message.SerializeToString()


def _fill(draw: st.DrawFn, message: Any, kind: Descriptor, depth: int) -> None:
    fields = tuple(kind.fields)
    for field in draw(st.lists(st.sampled_from(fields), max_size=6)) if fields else ():
        if field.message_type is None:
            _set(message, field, draw)
        elif field.message_type.GetOptions().map_entry:
            key, value = (VALUES[one.type] for one in field.message_type.fields)
            getattr(message, field.name)[draw(key)] = draw(value)
        elif depth:
            found = getattr(message, field.name)
            part = found.add() if field.is_repeated else found
            part.SetInParent()
            _fill(draw, part, field.message_type, depth - 1)


def _set(message: Any, field: FieldDescriptor, draw: st.DrawFn) -> None:
    if field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(VALUES[field.type], max_size=4)))
    else:
        setattr(message, field.name, draw(VALUES[field.type]))
