"""Any bytes at all, at every decoder: a value or one clear line; never more memory than the bytes justify."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsot.transport.wire.carry import encode_carry
from specsot.transport.wire.events import INFO, encode_ask, encode_event
from specsot.transport.wire.members import encode_downward, encode_upward
from specsot.v1 import fleet_pb2, master_pb2, ring_pb2
from tests.conftest import examples
from tests.fuzz.spoiling import filled, spoiled
from tests.fuzz.targets import attempt
from tests.wire.strategies import answers, asking, fleet, ring

ANY_BYTES = 256 << 10  # what a decoder may take for itself
PER_BYTE = 600  # and for each byte that came: an empty message has two, and becomes a value with its defaults

patient = settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)

Encode = Callable[[Any], Message]

KINDS: dict[str, tuple[type[Message], st.SearchStrategy[Any], Encode]] = {
    "carry": (ring_pb2.CarryRequest, ring.carried, lambda message: next(encode_carry(message))),
    "member": (fleet_pb2.JoinRequest, fleet.upward, encode_upward),
    "master": (fleet_pb2.JoinResponse, fleet.downward, encode_downward),
    "request": (master_pb2.GenerateRequest, asking.asks, encode_ask),
    "event": (master_pb2.GenerateEvent, answers.numbered, encode_event),
    "info": (master_pb2.GetInfoResponse, answers.infos, INFO.encode),
}


@contextmanager
def watched(data: bytes) -> Iterator[None]:
    """Fails when more memory was taken meanwhile than so many bytes justify."""
    tracemalloc.start()
    try:
        yield
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most <= ANY_BYTES + PER_BYTE * len(data), f"{most} bytes of memory for {len(data)}"


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("what", ["spoiled", "anything"])
def test_messages(target: str, what: str) -> None:
    kind, good, encode = KINDS[target]
    wrong = spoiled(good.map(lambda value: encode(value).SerializeToString()))

    @patient
    @given(wrong if what == "spoiled" else filled(kind))
    def try_it(data: bytes) -> None:
        with watched(data):
            attempt(target, data)

    try_it()
