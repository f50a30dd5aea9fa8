"""Large tensors are cut into messages of at most 1 MiB, and come back as they were; nothing else does.

Knows nothing of streams (tests/rpc has those).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specsot.core.frames import Drafts, FeatureBatch, Features, Frame
from specsot.errors import WireError
from specsot.transport.wire.carry import Carried, CarryReader, encode_carry
from specsot.transport.wire.tensors import PIECE_BYTES
from specsot.v1 import ring_pb2

SLACK = 1 << 10  # a header's own bytes


def tensor(kib: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(kib * 1024 // dtype.itemsize, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).reshape(-1, 128)


def cut(message: Carried) -> list[ring_pb2.CarryRequest]:
    return [ring_pb2.CarryRequest.FromString(one.SerializeToString()) for one in encode_carry(message)]


@pytest.mark.parametrize(
    ("hidden", "fused", "messages"),
    [
        (1023, None, 1),
        (1024, None, 1),
        (1025, None, 2),
        (600, 600, 2),
        (5 * 1024, 3 * 1024, 8),
        (None, 1500, 2),
    ],
)
def test_a_frame_is_cut_and_put_together(hidden: int | None, fused: int | None, messages: int) -> None:
    frame = Frame(
        7,
        1,
        hidden=None if hidden is None else tensor(hidden, 1, torch.bfloat16),
        fused=None if fused is None else tensor(fused, 2),
    )
    sent = cut(frame)
    assert len(sent) == messages
    assert all(one.ByteSize() <= PIECE_BYTES + SLACK for one in sent)
    *none, whole = read_all(sent)
    assert none == [None] * (messages - 1)
    assert isinstance(whole, Frame)
    for here, there in ((frame.hidden, whole.hidden), (frame.fused, whole.fused)):
        assert (here is None and there is None) or (here.dtype == there.dtype and torch.equal(here, there))


def test_features_are_sent_in_pieces_with_the_next_message_after_them() -> None:
    rows = tensor(2500, 3)
    features = Features(
        1, 0, feature_batches=(FeatureBatch(1, 0, tuple([5] * len(rows)), None, None),), rows=rows
    )
    reader = CarryReader()
    *_, whole = [reader.read(one) for one in cut(features)]
    assert isinstance(whole, Features)
    assert torch.equal(whole.rows, rows)
    assert reader.read(cut(Drafts(1))[0]) == Drafts(1)


def read_all(parts: list[ring_pb2.CarryRequest]) -> list[Carried | None]:
    reader = CarryReader()
    return [reader.read(part) for part in parts]


def begun() -> tuple[CarryReader, list[ring_pb2.CarryRequest]]:
    reader, parts = CarryReader(), cut(Frame(1, 0, hidden=tensor(3000, 4)))
    assert reader.read(parts[0]) is None
    return reader, parts


@pytest.mark.parametrize(
    ("then", "complaint"),
    [
        (ring_pb2.CarryRequest(drafts=ring_pb2.Drafts(epoch=1)), "drafts came before all parts of a message"),
        (ring_pb2.CarryRequest(frame=ring_pb2.Frame(epoch=1)), "frame came before all parts of a message"),
        (ring_pb2.CarryRequest(remainder=ring_pb2.Remainder()), "a piece of 0 bytes"),
        (
            ring_pb2.CarryRequest(remainder=ring_pb2.Remainder(data=b"x" * (PIECE_BYTES + 1))),
            f"a piece of {PIECE_BYTES + 1} bytes",
        ),
    ],
)
def test_what_may_not_follow(then: ring_pb2.CarryRequest, complaint: str) -> None:
    reader, _ = begun()
    with pytest.raises(WireError, match=complaint):
        reader.read(then)


def test_a_piece_too_much() -> None:
    reader, parts = begun()
    for part in parts[1:-1]:
        assert reader.read(part) is None
    with pytest.raises(WireError, match="a piece of 1048576 bytes came where 974848 are lacking"):
        reader.read(parts[1])


def test_a_piece_of_nothing() -> None:
    with pytest.raises(WireError, match="remainder is not allowed in CarryRequest"):
        CarryReader().read(ring_pb2.CarryRequest(remainder=ring_pb2.Remainder(data=b"x")))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda part: part.frame.hidden.shape.__setitem__(0, 2**31), "are allowed"),
        (lambda part: part.frame.hidden.shape.insert(0, 1), r"hidden must be \[rows, width\]|needs"),
        (lambda part: setattr(part.frame.hidden, "data", b"x"), "needs 3072000 bytes, got 1"),
        (lambda part: setattr(part.frame.hidden, "dtype", 99), "tensor type 99 is unknown"),
    ],
)
def test_what_is_announced_is_checked_before_anything_follows(change: Any, complaint: str) -> None:
    parts = cut(Frame(1, 0, hidden=tensor(3000, 4)))
    change(parts[0])
    with pytest.raises(WireError, match=complaint):
        read_all(parts)
