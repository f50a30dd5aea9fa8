"""Every value that travels comes back as it was.

Knows nothing of streams, and of bytes that nobody meant (tests/fuzz).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from specsot import events as ev
from specsot import members, params
from specsot.core import frames as fr
from specsot.core import info
from specsot.errors import WireError
from specsot.transport.wire.carry import CarryReader, encode_carry
from specsot.transport.wire.events import (
    INFO,
    decode_ask,
    decode_event,
    encode_ask,
    encode_event,
)
from specsot.transport.wire.members import decode_downward, decode_upward, encode_downward, encode_upward
from specsot.transport.wire.schema import parse
from specsot.v1 import fleet_pb2, master_pb2, ring_pb2
from tests.wire.strategies import answers, asking, fleet, ring

FRAME = fr.Frame(epoch=1, number=0)

quick = settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())


def same(left: Any, right: Any) -> bool:
    """Equality that looks into tensors: bits, type and shape."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and same_tensor(left, right)
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return type(left) is type(right) and all(same(getattr(left, n), getattr(right, n)) for n in names)
    return type(left) is type(right) and left == right


@quick
@given(ring.carried)
def test_ring_messages(message: Any) -> None:
    reader = CarryReader()
    sent = [request.SerializeToString() for request in encode_carry(message)]
    *parts, last = [reader.read(parse(ring_pb2.CarryRequest, data)) for data in sent]
    assert same(message, last)
    assert parts == [None] * len(parts)


@quick
@given(fleet.upward)
def test_what_members_say(message: Any) -> None:
    data = encode_upward(message).SerializeToString()
    assert decode_upward(parse(fleet_pb2.JoinRequest, data)) == message


@quick
@given(fleet.downward)
def test_what_the_master_says(message: Any) -> None:
    data = encode_downward(message).SerializeToString()
    assert decode_downward(parse(fleet_pb2.JoinResponse, data)) == message


@quick
@given(answers.numbered)
def test_events(numbered: Any) -> None:
    data = encode_event(numbered).SerializeToString()
    assert decode_event(parse(master_pb2.GenerateEvent, data)) == numbered


@quick
@given(asking.asks)
def test_requests(ask: Any) -> None:
    data = encode_ask(ask).SerializeToString()
    assert decode_ask(parse(master_pb2.GenerateRequest, data)) == ask


@quick
@given(answers.infos)
def test_info(info: Any) -> None:
    data = INFO.encode(info).SerializeToString()
    assert INFO.decode(parse(master_pb2.GetInfoResponse, data)) == info


class AllSeen(Exception):
    """There is no need to draw on."""


@pytest.mark.parametrize(
    ("made", "by"),
    [
        (params.Ask(prompt="x"), asking.asks),
        (params.Sampling(), asking.samplings),
        (fr.Outcome(1, 0, (), ()), ring.outcomes()),
        (ev.MergedText(0, ""), answers.merged),
        (FRAME, ring.frames),
        (fr.Opening(1, 1), ring.openings()),
        (fr.Drafts(1), ring.drafts),
        (fr.Result(1, 0), ring.results),
        (fr.Features(1, 0), ring.features()),
        (members.TreeShape(), fleet.shapes),
        (ev.Statistics(), answers.figures),
        (info.Info(), answers.infos),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_field_is_forgotten(made: Any, by: st.SearchStrategy[Any]) -> None:
    """Each field takes another value than its default somewhere, so the round trips see it."""
    names = {field.name for field in dataclasses.fields(made) if field.init}
    seen: set[str] = set()

    @settings(quick, max_examples=1000, phases=[Phase.generate])
    @given(by)
    def look(value: Any) -> None:
        seen.update(name for name in names if not same(getattr(value, name), getattr(made, name)))
        if seen == names:
            raise AllSeen

    with pytest.raises(AllSeen):
        look()


def test_what_does_not_travel_is_refused_at_the_sender() -> None:
    with pytest.raises(WireError, match="int64"):
        next(encode_carry(dataclasses.replace(FRAME, hidden=torch.zeros(1, 1, dtype=torch.int64))))
    with pytest.raises(WireError, match="does not carry str"):
        next(encode_carry("words"))
    with pytest.raises(WireError, match="send the master a str"):
        encode_upward("words")
    with pytest.raises(WireError, match="send a member a str"):
        encode_downward("words")
