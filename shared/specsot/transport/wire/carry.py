"""The ring's messages on the wire: frames, results, features, drafts and taps with their tensors.

Needs torch; who only speaks to the master uses `specsot.transport.wire.members`.
What has large tensors is cut: no message holds more than 1 MiB of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specsot.core.frames import Drafts, Features, Frame, Payload, Result
from specsot.members import KvRows, Tap
from specsot.transport.links import Lost
from specsot.transport.wire.schema import (
    OneOf,
    Schema,
    check_duration,
    check_name,
    checked,
    chosen,
    register,
    require,
)
from specsot.transport.wire.tensors import (
    PIECE_BYTES,
    Beside,
    PieceReader,
    Pieces,
    PieceWriter,
    TapReader,
    cut_tap,
    decode_beside,
    decode_tensor,
)
from specsot.transport.wire.values import OPENINGS, SEGMENTS, STAGE_SECONDS, TRACE
from specsot.v1 import ring_pb2, values_pb2

Carried = Frame | Result | Features | Drafts | Tap | KvRows | Lost
Cut = ring_pb2.Frame | ring_pb2.Features | ring_pb2.KvRows

TENSORS = {  # in the order in which they are cut
    "frame": ("hidden", "fused"),
    "features": ("rows",),
    "kv_rows": ("rows",),
}

FRAME = Schema(
    Frame,
    ring_pb2.Frame,
    without=TENSORS["frame"],
    openings=OPENINGS,
    segments=SEGMENTS,
    seconds=STAGE_SECONDS,
    trace=TRACE,
)
FEATURES = Schema(
    Features,
    ring_pb2.Features,
    without=TENSORS["features"],
    openings=OPENINGS,
    seconds=checked(check_duration, "a frame's time"),
    wall=checked(check_duration, "a lap's time"),
    trace=TRACE,
)
KV_ROWS = Schema(KvRows, ring_pb2.KvRows, without=TENSORS["kv_rows"])
register(FRAME, FEATURES, KV_ROWS, Schema(Lost, ring_pb2.Lost, peer=checked(check_name, "a lost peer")))
CARRY = OneOf[Carried, ring_pb2.CarryRequest](ring_pb2.CarryRequest, "message", "the ring does not carry")


def encode_carry(message: Carried) -> Iterator[ring_pb2.CarryRequest]:
    """One request, or as many as it has parts; they must follow each other on one stream."""
    if isinstance(message, Tap):
        yield from (ring_pb2.CarryRequest(tap=part) for part in cut_tap(message))
        return
    request = CARRY.encode(message)
    cut = PieceWriter()
    kind = chosen(request, "message")
    for name in TENSORS.get(kind, ()):
        write_rows(getattr(message, name), getattr(getattr(request, kind), name), cut)
    yield request
    for data in cut.pieces():
        rest = ring_pb2.CarryRequest()
        rest.remainder.data = data  # in place: a message that is put into another one is copied
        yield rest


class CarryReader:
    """Decodes one stream's requests in order; what came in parts waits here for the rest."""

    def __init__(self) -> None:
        self._taps = TapReader()
        self._begun: tuple[Cut, PieceReader] | None = None

    def read(self, request: ring_pb2.CarryRequest) -> Carried | None:
        """The message, or None for a part of one. Raises WireError."""
        kind = chosen(request, "message")
        if self._begun is not None:
            require(kind == "remainder", f"{kind} came where a message was not whole yet")
            self._begun[1].take(request.remainder.data)
            return self._finish(*self._begun)
        if kind in TENSORS:
            message = getattr(request, kind)
            if sum(len(getattr(message, name).data) for name in TENSORS[kind]) < PIECE_BYTES:
                return _decode(message, {})  # whole, as nearly all are, or broken
            there = {name: getattr(message, name) for name in TENSORS[kind] if message.HasField(name)}
            here = {name: tensor for name, tensor in there.items() if not tensor.beside}
            return self._finish(message, PieceReader(here))
        return self._taps.read(request.tap) if kind == "tap" else CARRY.decode(request)

    def _finish(self, message: Cut, reader: PieceReader) -> Carried | None:
        self._begun = (message, reader) if reader.lacks else None
        return None if self._begun else _decode(message, reader.pieces)


def _decode(message: Cut, pieces: Pieces) -> Carried:
    if isinstance(message, ring_pb2.Frame):
        hidden, fused = (decode_rows(message, name, pieces, True) for name in TENSORS["frame"])
        return FRAME.decode(message, hidden=hidden, fused=fused)
    if isinstance(message, ring_pb2.KvRows):
        return KV_ROWS.decode(message, rows=decode_rows(message, "rows", pieces))
    return decode_features(message, pieces)


def decode_features(message: ring_pb2.Features, pieces: Pieces) -> Features:
    rows = decode_rows(message, "rows", pieces)
    features = FEATURES.decode(message, rows=rows)
    taught = sum(len(lesson.tokens) for lesson in features.lessons)
    came = 0 if rows is None else rows.shape[0]
    whole = rows is None or came == taught  # who drafts without a head wants none
    require(whole, f"lessons of {taught} tokens came with {came} rows")
    return features


def write_rows(payload: Payload | None, message: values_pb2.Tensor, cut: PieceWriter) -> None:
    """In place: see describe_tensor. None leaves the field unset: reading a field does not set it."""
    if isinstance(payload, Beside):
        payload.describe(message)
    elif payload is not None:
        cut.write(payload, message)


def decode_rows(message: Any, field: str, pieces: Pieces, short: bool = False) -> Payload | None:
    """The [rows, width] tensor of a field, or None where it is unset. short: it may be rounded, by blocks."""
    if not message.HasField(field):
        return None
    tensor = getattr(message, field)
    rows = decode_beside(tensor) if tensor.beside else decode_tensor(tensor, pieces.get(field, ()))
    by_blocks = rows.dtype is torch.int8
    require(short or not by_blocks, f"{field} must not be in 8 bits")
    require(len(rows.shape) == 2 + by_blocks, f"{field} must be [rows, width], got {list(rows.shape)}")
    return rows
