"""The ring's messages on the wire: frames, results, features, drafts and taps with their tensors.

This module needs torch; `specsot.transport.wire.members` encodes the messages to the master without torch.
Messages with large tensors are cut: no protobuf message holds more than 1 MiB of tensor data.
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
    PieceReader,
    Pieces,
    PieceWriter,
    SeparateTensor,
    TapReader,
    cut_tap,
    decode_separate_tensor,
    decode_tensor,
)
from specsot.transport.wire.values import OPENINGS, SEGMENTS, STAGE_SECONDS, TRACE
from specsot.v1 import ring_pb2, values_pb2

# A message that a link between members carries.
Carried = Frame | Result | Features | Drafts | Tap | KvRows | Lost
# A message whose tensors may be cut into pieces.
Cut = ring_pb2.Frame | ring_pb2.Features | ring_pb2.KvRows

# The tensor fields of each kind of message, in the order in which they are written.
TENSORS = {
    "frame": ("hidden", "fused"),
    "features": ("rows",),
    "kv_rows": ("rows",),
}

# The schemas of messages with tensors, whose tensor fields are written apart.
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
    wall=checked(check_duration, "a step's time"),
    trace=TRACE,
)
KV_ROWS = Schema(KvRows, ring_pb2.KvRows, without=TENSORS["kv_rows"])
register(FRAME, FEATURES, KV_ROWS, Schema(Lost, ring_pb2.Lost, peer=checked(check_name, "a lost peer")))
# All messages that links between members carry.
CARRY = OneOf[Carried, ring_pb2.CarryRequest](ring_pb2.CarryRequest, "message", "the ring does not carry")


def encode_carry(message: Carried) -> Iterator[ring_pb2.CarryRequest]:
    """Yield a message as one or more protobuf messages, which must follow each other on one stream.

    message: the value to send.

    Raises WireError for a value that the ring does not carry.

    A tap becomes one message for each part of its weight. Any other message becomes one message with as much
    of its tensors as PIECE_BYTES allow, followed by pieces with the rest. A tensor that is None leaves its
    field unset, and a SeparateTensor is only described.
    """
    if isinstance(message, Tap):
        yield from (ring_pb2.CarryRequest(tap=part) for part in cut_tap(message))
        return
    request = CARRY.encode(message)
    pieces = PieceWriter()
    kind = chosen(request, "message")
    for name in TENSORS.get(kind, ()):
        write_rows(getattr(message, name), getattr(getattr(request, kind), name), pieces)
    yield request
    for data in pieces.pieces():
        piece = ring_pb2.CarryRequest()
        # Set in place, because protobuf copies a message that is assigned to a field of another one.
        piece.remainder.data = data
        yield piece


class CarryReader:
    """Decodes the protobuf messages of one stream in order, and joins the parts of a message."""

    def __init__(self) -> None:
        """Begin with no part of any message."""
        self._taps = TapReader()
        self._incomplete: tuple[Cut, PieceReader] | None = None

    def read(self, request: ring_pb2.CarryRequest) -> Carried | None:
        """Return the message that this part completes, or None if more parts follow.

        request: the next protobuf message of the stream.

        Raises WireError for a part that cannot be decoded or does not follow the parts before it.

        The state of an incomplete message is kept between calls. A part of another kind between the pieces of
        a message raises WireError.
        """
        kind = chosen(request, "message")
        if self._incomplete is not None:
            require(kind == "remainder", f"{kind} came before all parts of a message had arrived")
            self._incomplete[1].add(request.remainder.data)
            return self._finish(*self._incomplete)
        if kind in TENSORS:
            message = getattr(request, kind)
            if sum(len(getattr(message, name).data) for name in TENSORS[kind]) < PIECE_BYTES:
                # The message is complete, as nearly all are, or it is invalid.
                return _decode(message, {})
            present = {name: getattr(message, name) for name in TENSORS[kind] if message.HasField(name)}
            within = {name: tensor for name, tensor in present.items() if not tensor.separate}
            return self._finish(message, PieceReader(within))
        return self._taps.read(request.tap) if kind == "tap" else CARRY.decode(request)

    def _finish(self, message: Cut, reader: PieceReader) -> Carried | None:
        """Return the message if all pieces have arrived; otherwise remember it and return None.

        message: the protobuf message with tensors.
        reader: the pieces of its tensors so far.

        Raises WireError if the complete message is invalid.
        """
        self._incomplete = (message, reader) if reader.missing_bytes else None
        return None if self._incomplete else _decode(message, reader.pieces)


def _decode(message: Cut, pieces: Pieces) -> Carried:
    """Return the value of a message with tensors. Raises WireError if it is invalid.

    message: the protobuf message.
    pieces: the rest of each tensor's data, by the tensor's field.

    A field without a tensor becomes None.
    """
    if isinstance(message, ring_pb2.Frame):
        hidden, fused = (decode_rows(message, name, pieces, True) for name in TENSORS["frame"])
        return FRAME.decode(message, hidden=hidden, fused=fused)
    if isinstance(message, ring_pb2.KvRows):
        return KV_ROWS.decode(message, rows=decode_rows(message, "rows", pieces))
    return decode_features(message, pieces)


def decode_features(message: ring_pb2.Features, pieces: Pieces) -> Features:
    """Return the features of a message.

    message: the protobuf message.
    pieces: the rest of the tensor's data, by field.

    Raises WireError if it is invalid, and if `rows` has not one row per token.

    `rows` may be None for any number of tokens, because a drafter without a draft head is sent none.
    """
    rows = decode_rows(message, "rows", pieces)
    features = FEATURES.decode(message, rows=rows)
    num_tokens = sum(len(feature_batch.tokens) for feature_batch in features.feature_batches)
    num_rows = 0 if rows is None else rows.shape[0]
    # Drafters without a draft head are sent no rows.
    complete = rows is None or num_rows == num_tokens
    require(complete, f"feature batches of {num_tokens} tokens came with {num_rows} rows")
    return features


def write_rows(payload: Payload | None, message: values_pb2.Tensor, pieces: PieceWriter) -> None:
    """Write a tensor, or the description of one that travels separately, into a message's field.

    payload: the tensor, its description, or None, which leaves the field unset.
    message: the message's tensor field.
    pieces: writes the tensor, and keeps the part for which the message has no room.

    Raises WireError for a type of tensor that messages do not support.
    """
    if isinstance(payload, SeparateTensor):
        payload.describe(message)
    elif payload is not None:
        pieces.write(payload, message)


def decode_rows(message: Any, field: str, pieces: Pieces, may_be_int8: bool = False) -> Payload | None:
    """Return the [rows, width] tensor of a field, or None if the field is unset.

    message: the protobuf message that has the field.
    field: name of the field.
    pieces: the rest of the tensor's data, by field.
    may_be_int8: True if the tensor may be rounded to 8 bits by blocks, as [rows, blocks, bytes of a block].

    Raises WireError for another number of dimensions, and for 8 bits unless they are allowed.

    A tensor whose data travels separately is returned as its description, a SeparateTensor, with the same
    checks. Raises WireError also if the data does not have the size that the shape needs.
    """
    if not message.HasField(field):
        return None
    tensor = getattr(message, field)
    rows = decode_separate_tensor(tensor) if tensor.separate else decode_tensor(tensor, pieces.get(field, ()))
    by_blocks = rows.dtype is torch.int8
    require(may_be_int8 or not by_blocks, f"{field} must not be in 8 bits")
    require(len(rows.shape) == 2 + by_blocks, f"{field} must be [rows, width], got {list(rows.shape)}")
    return rows
