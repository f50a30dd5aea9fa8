"""What the ring carries, on the wire: frames, results, features, drafts and taps with their tensors.

Refuses to know streams and peers. Needs torch; who only speaks to the master uses `specsot.wire.fleet`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specsot.errors import WireError
from specsot.frames import Drafts, Features, Frame, Payload, Result
from specsot.members import Tap
from specsot.tracing import well_formed
from specsot.v1 import ring_pb2, values_pb2
from specsot.wire.checks import chosen, duration, durations, few, require
from specsot.wire.taps import TapReader, cut_tap
from specsot.wire.tensors import decode_tensor, write_tensor
from specsot.wire.values import (
    decode_drafts,
    decode_lesson,
    decode_opening,
    decode_result,
    decode_segment,
    encode_drafts,
    encode_lesson,
    encode_opening,
    encode_result,
    encode_segment,
)

Carried = Frame | Result | Features | Drafts | Tap


def encode_carry(message: Carried) -> Iterator[ring_pb2.CarryRequest]:
    """One request, or for a tap as many as it has parts."""
    match message:
        case Frame():
            request = ring_pb2.CarryRequest()
            write_frame(message, request.frame)
            yield request
        case Result():
            yield ring_pb2.CarryRequest(result=encode_result(message))
        case Features():
            request = ring_pb2.CarryRequest()
            write_features(message, request.features)
            yield request
        case Drafts():
            yield ring_pb2.CarryRequest(drafts=encode_drafts(message))
        case Tap():
            yield from (ring_pb2.CarryRequest(tap=part) for part in cut_tap(message))
        case _:
            raise WireError(f"the ring does not carry {type(message).__name__}")


class CarryReader:
    """Decodes one stream's requests in order; parts of a tap wait here for the rest."""

    def __init__(self) -> None:
        self._taps = TapReader()

    def read(self, request: ring_pb2.CarryRequest) -> Carried | None:
        """The message, or None for a part of one. Raises WireError."""
        match chosen(request, "message"):
            case "frame":
                return decode_frame(request.frame)
            case "result":
                return decode_result(request.result)
            case "features":
                return decode_features(request.features)
            case "drafts":
                return decode_drafts(request.drafts)
            case "tap":
                return self._taps.read(request.tap)
            case other:
                raise WireError(f"{other} does not belong here")


def write_frame(frame: Frame, message: ring_pb2.Frame) -> None:
    """In place: see write_tensor."""
    message.epoch, message.number = frame.epoch, frame.number
    message.openings.extend(map(encode_opening, frame.openings))
    message.segments.extend(map(encode_segment, frame.segments))
    message.closings.extend(frame.closings)
    write_rows(frame.hidden, message.hidden)
    write_rows(frame.fused, message.fused)
    message.seconds.extend(frame.seconds)
    message.resting, message.trace = frame.resting, frame.trace or ""


def decode_frame(message: ring_pb2.Frame) -> Frame:
    return Frame(
        epoch=message.epoch,
        number=message.number,
        openings=tuple(map(decode_opening, few(message.openings, "openings"))),
        segments=tuple(map(decode_segment, few(message.segments, "segments"))),
        closings=tuple(message.closings),
        hidden=decode_rows(message, "hidden"),
        fused=decode_rows(message, "fused"),
        seconds=durations(message.seconds, "a stage's time"),
        resting=message.resting,
        trace=well_formed(message.trace),
    )


def write_features(features: Features, message: ring_pb2.Features) -> None:
    """In place: see write_tensor."""
    message.epoch, message.number = features.epoch, features.number
    message.openings.extend(map(encode_opening, features.openings))
    message.lessons.extend(map(encode_lesson, features.lessons))
    message.closings.extend(features.closings)
    write_rows(features.rows, message.rows)
    message.fed, message.seconds = features.fed, features.seconds
    message.wall, message.rested = features.wall, features.rested
    message.trace = features.trace or ""


def decode_features(message: ring_pb2.Features) -> Features:
    lessons = tuple(map(decode_lesson, few(message.lessons, "lessons")))
    rows = decode_rows(message, "rows")
    taught = sum(len(lesson.tokens) for lesson in lessons)
    came = 0 if rows is None else rows.shape[0]
    whole = rows is None or came == taught  # who drafts without a head wants none
    require(whole, f"lessons of {taught} tokens came with {came} rows")
    return Features(
        epoch=message.epoch,
        number=message.number,
        openings=tuple(map(decode_opening, few(message.openings, "openings"))),
        lessons=lessons,
        closings=tuple(message.closings),
        rows=rows,
        fed=message.fed,
        seconds=duration(message.seconds, "a frame's time"),
        wall=duration(message.wall, "a lap's time"),
        rested=message.rested,
        trace=well_formed(message.trace),
    )


def write_rows(payload: Payload | None, message: values_pb2.Tensor) -> None:
    """None leaves the field unset: reading a field does not set it."""
    if payload is not None:
        write_tensor(payload, message)


def decode_rows(message: Any, field: str) -> Payload | None:
    """The [rows, width] tensor of a field, or None where it is unset."""
    if not message.HasField(field):
        return None
    rows = decode_tensor(getattr(message, field))
    require(rows.dim() == 2, f"{field} must be [rows, width], got {list(rows.shape)}")
    return rows
