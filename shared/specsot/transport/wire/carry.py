"""What the ring carries, on the wire: frames, results, features, drafts and taps with their tensors.

Needs torch; who only speaks to the master uses `specsot.transport.wire.members`.
What has large tensors is cut: no message holds more than 1 MiB of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specsot.core.frames import Drafts, Features, Frame, Payload, Result
from specsot.errors import WireError
from specsot.members import Tap
from specsot.tracing import well_formed
from specsot.transport.links import Lost
from specsot.transport.wire.tensors import (
    Beside,
    PieceReader,
    Pieces,
    PieceWriter,
    TapReader,
    cut_tap,
    decode_beside,
    decode_tensor,
)
from specsot.transport.wire.values import (
    chosen,
    decode_drafts,
    decode_feature_batch,
    decode_opening,
    decode_result,
    decode_segment,
    duration,
    durations,
    encode_drafts,
    encode_feature_batch,
    encode_opening,
    encode_result,
    encode_segment,
    few,
    named,
    require,
)
from specsot.v1 import ring_pb2, values_pb2

Carried = Frame | Result | Features | Drafts | Tap | Lost

TENSORS = {"frame": ("hidden", "fused"), "features": ("rows",)}  # in the order in which they are cut


def encode_carry(message: Carried) -> Iterator[ring_pb2.CarryRequest]:
    """One request, or as many as it has parts; they must follow each other on one stream."""
    match message:
        case Frame():
            request, cut = ring_pb2.CarryRequest(), PieceWriter()
            write_frame(message, request.frame, cut)
            yield from _with_pieces(request, cut)
        case Result():
            yield ring_pb2.CarryRequest(result=encode_result(message))
        case Features():
            request, cut = ring_pb2.CarryRequest(), PieceWriter()
            write_features(message, request.features, cut)
            yield from _with_pieces(request, cut)
        case Drafts():
            yield ring_pb2.CarryRequest(drafts=encode_drafts(message))
        case Tap():
            yield from (ring_pb2.CarryRequest(tap=part) for part in cut_tap(message))
        case Lost():
            lost = ring_pb2.Lost(peer=message.peer, reason=message.reason, epoch=message.epoch)
            yield ring_pb2.CarryRequest(lost=lost)
        case _:
            raise WireError(f"the ring does not carry {type(message).__name__}")


def _with_pieces(request: ring_pb2.CarryRequest, cut: PieceWriter) -> Iterator[ring_pb2.CarryRequest]:
    yield request
    for data in cut.pieces():
        yield ring_pb2.CarryRequest(remainder=ring_pb2.Remainder(data=data))


class CarryReader:
    """Decodes one stream's requests in order; what came in parts waits here for the rest."""

    def __init__(self) -> None:
        self._taps = TapReader()
        self._begun: tuple[ring_pb2.Frame | ring_pb2.Features, PieceReader] | None = None

    def read(self, request: ring_pb2.CarryRequest) -> Carried | None:
        """The message, or None for a part of one. Raises WireError."""
        kind = chosen(request, "message")
        if self._begun is not None:
            require(kind == "remainder", f"{kind} came where a message was not whole yet")
            return self._go_on(request.remainder.data)
        if kind in TENSORS:
            return self._begin(kind, request)
        match kind:
            case "result":
                return decode_result(request.result)
            case "drafts":
                return decode_drafts(request.drafts)
            case "tap":
                return self._taps.read(request.tap)
            case "lost":
                return decode_lost(request.lost)
            case other:
                raise WireError(f"{other} does not belong here")

    def _begin(self, kind: str, request: ring_pb2.CarryRequest) -> Frame | Features | None:
        message = getattr(request, kind)
        there = {name: getattr(message, name) for name in TENSORS[kind] if message.HasField(name)}
        here = {name: tensor for name, tensor in there.items() if not tensor.beside}
        self._begun = message, PieceReader(here)
        return self._finish()

    def _go_on(self, data: bytes) -> Frame | Features | None:
        assert self._begun is not None
        self._begun[1].take(data)
        return self._finish()

    def _finish(self) -> Frame | Features | None:
        """The message if it is whole now."""
        assert self._begun is not None
        message, gathering = self._begun
        if gathering.lacks:
            return None
        self._begun = None
        if isinstance(message, ring_pb2.Frame):
            return decode_frame(message, gathering.pieces)
        return decode_features(message, gathering.pieces)


def decode_lost(message: ring_pb2.Lost) -> Lost:
    return Lost(named(message.peer, "a lost peer"), message.reason, message.epoch)


def write_frame(frame: Frame, message: ring_pb2.Frame, cut: PieceWriter) -> None:
    """In place: see describe_tensor."""
    message.epoch, message.number = frame.epoch, frame.number
    message.openings.extend(map(encode_opening, frame.openings))
    message.segments.extend(map(encode_segment, frame.segments))
    message.closings.extend(frame.closings)
    write_rows(frame.hidden, message.hidden, cut)
    write_rows(frame.fused, message.fused, cut)
    message.seconds.extend(frame.seconds)
    message.resting, message.trace = frame.resting, frame.trace or ""


def decode_frame(message: ring_pb2.Frame, pieces: Pieces) -> Frame:
    return Frame(
        epoch=message.epoch,
        number=message.number,
        openings=tuple(map(decode_opening, few(message.openings, "openings"))),
        segments=tuple(map(decode_segment, few(message.segments, "segments"))),
        closings=tuple(message.closings),
        hidden=decode_rows(message, "hidden", pieces),
        fused=decode_rows(message, "fused", pieces),
        seconds=durations(message.seconds, "a stage's time"),
        resting=message.resting,
        trace=well_formed(message.trace),
    )


def write_features(features: Features, message: ring_pb2.Features, cut: PieceWriter) -> None:
    """In place: see describe_tensor."""
    message.epoch, message.number = features.epoch, features.number
    message.openings.extend(map(encode_opening, features.openings))
    message.lessons.extend(map(encode_feature_batch, features.lessons))
    message.closings.extend(features.closings)
    write_rows(features.rows, message.rows, cut)
    message.fed, message.seconds = features.fed, features.seconds
    message.wall, message.rested = features.wall, features.rested
    message.trace = features.trace or ""


def decode_features(message: ring_pb2.Features, pieces: Pieces) -> Features:
    lessons = tuple(map(decode_feature_batch, few(message.lessons, "lessons")))
    rows = decode_rows(message, "rows", pieces)
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


def write_rows(payload: Payload | None, message: values_pb2.Tensor, cut: PieceWriter) -> None:
    """None leaves the field unset: reading a field does not set it."""
    if isinstance(payload, Beside):
        payload.describe(message)
    elif payload is not None:
        cut.write(payload, message)


def decode_rows(message: Any, field: str, pieces: Pieces) -> Payload | None:
    """The [rows, width] tensor of a field, or None where it is unset."""
    if not message.HasField(field):
        return None
    tensor = getattr(message, field)
    rows = decode_beside(tensor) if tensor.beside else decode_tensor(tensor, pieces[field])
    require(len(rows.shape) == 2, f"{field} must be [rows, width], got {list(rows.shape)}")
    return rows
