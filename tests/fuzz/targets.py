"""Whatever reads a stranger's bytes or text, by name: it makes something of them, or refuses in our words.

A target that raises anything but a SpecsotError has a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specsot.core.skeleton import MAX_POINTS, MAX_TITLE_BYTES, PlanReader
from specsot.errors import SpecsotError
from specsot.transport.wire.carry import CarryReader
from specsot.transport.wire.events import INFO, decode_ask, decode_event, resumes
from specsot.transport.wire.members import decode_downward, decode_upward
from specsot.transport.wire.schema import parse
from specsot.v1 import fleet_pb2, master_pb2, ring_pb2

LONGEST_COMPLAINT = 2000


def read_carried(data: bytes) -> None:
    CarryReader().read(parse(ring_pb2.CarryRequest, data))


def read_member(data: bytes) -> None:
    decode_upward(parse(fleet_pb2.JoinRequest, data))


def read_master(data: bytes) -> None:
    decode_downward(parse(fleet_pb2.JoinResponse, data))


def read_request(data: bytes) -> None:
    request = parse(master_pb2.GenerateRequest, data)
    resumes(request)
    decode_ask(request)


def read_event(data: bytes) -> None:
    decode_event(parse(master_pb2.GenerateEvent, data))


def read_info(data: bytes) -> None:
    INFO.decode(parse(master_pb2.GetInfoResponse, data))


def read_skeleton(data: bytes) -> None:
    """In pieces of three characters; what comes out is a plan as the rest of the house knows plans."""
    reader, text = PlanReader(), data.decode(errors="replace")
    for begin in range(0, len(text), 3):
        reader.feed(text[begin : begin + 3])
    reader.finish()
    assert reader.finished
    assert reader.kind in ("plan", "direct")
    assert len(reader.points) <= MAX_POINTS
    for number, point in enumerate(reader.points, start=1):
        assert point.id == number
        assert 1 <= point.length <= 9999
        assert 0 < len(point.title.encode()) <= MAX_TITLE_BYTES
        assert len(point.title.splitlines()) == 1
        assert all(need < number for need in point.needs)
        assert list(point.needs) == sorted(set(point.needs))


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "carry": read_carried,
    "member": read_member,
    "master": read_master,
    "request": read_request,
    "event": read_event,
    "info": read_info,
    "skeleton": read_skeleton,
}


def attempt(target: str, data: bytes) -> str:
    """Why it was refused, in one line fit for a stranger; "" when it was not."""
    try:
        TARGETS[target](data)
    except SpecsotError as error:
        complaint = str(error)
        assert complaint
        assert "\n" not in complaint
        assert len(complaint) <= LONGEST_COMPLAINT
        return complaint
    return ""
