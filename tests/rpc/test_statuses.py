"""Every error of ours crosses a real call and comes out as itself, with its details.

Knows nothing of what the calls are for.
"""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from specsot import errors
from specsot.errors import SpecsotError
from specsot.transport.grpc_server import GrpcServer, open_server
from specsot.transport.grpc_status import TRAILER, error_of, status_of
from specsot.v1 import master_pb2, master_pb2_grpc

OURS: list[SpecsotError] = [
    errors.InvalidRequest("top_p must be in [0, 1], got 2", field="top_p"),
    errors.InvalidRequest("it can never succeed"),
    errors.ContextLengthExceeded.of(2048, 2000, 100),
    errors.NotFound("no model of that name"),
    errors.Overloaded("64 requests are waiting already", retry_after=2.5),
    errors.Unavailable("the ring is not complete: waiting for 1 of 2 workers"),
    errors.Refused("fingerprint a here, b there"),
    errors.Occupied("a member named d has joined already, at d:1"),
    errors.ModelError("config.json: no such file"),
    errors.HeadMismatch("fc is [4, 8], the base needs [4, 12]"),
    errors.PlanError("no valid line", text="[PLAN]\nthis is none"),
    errors.WireError("tensor needs 4 bytes, got 3"),
    errors.TimedOut("the deadline passed while the request waited"),
    errors.Cancelled("the caller said stop"),
    errors.SpecsotError("something else"),
]


class Raising(master_pb2_grpc.MasterServicer):
    """Raises what it is given: at once, or after one event."""

    def __init__(self) -> None:
        self.error: Exception = SpecsotError("none yet")

    async def GetInfo(self, request: Any, context: Any) -> Any:
        raise self.error

    async def Generate(self, request: Any, context: Any) -> None:
        await context.write(master_pb2.GenerateEvent(number=0))
        raise self.error


async def opened(servicer: Raising) -> tuple[GrpcServer, str]:
    attach = {"specsot.v1.Master": lambda s: master_pb2_grpc.add_MasterServicer_to_server(servicer, s)}
    endpoint = await open_server("127.0.0.1:0", attach)
    return endpoint, f"127.0.0.1:{endpoint.port}"


def facts(error: SpecsotError) -> tuple[object, ...]:
    extras = (getattr(error, name, None) for name in ("field", "retry_after", "text"))
    return type(error), str(error), *extras


@pytest.mark.parametrize("error", OURS, ids=lambda error: type(error).__name__)
async def test_an_error_comes_back_as_itself(error: SpecsotError) -> None:
    servicer = Raising()
    servicer.error = error
    endpoint, address = await opened(servicer)
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await master_pb2_grpc.MasterStub(channel).GetInfo(master_pb2.GetInfoRequest())
        assert facts(error_of(caught.value)) == facts(error)
        call = master_pb2_grpc.MasterStub(channel).Generate(master_pb2.GenerateRequest())
        assert (await call.read()).number == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert facts(error_of(caught.value)) == facts(error)
    await endpoint.close(0)


async def test_nothing_of_python_reaches_a_peer() -> None:
    servicer = Raising()
    servicer.error = KeyError("/home/somebody/secret")
    endpoint, address = await opened(servicer)
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await master_pb2_grpc.MasterStub(channel).GetInfo(master_pb2.GetInfoRequest())
    await endpoint.close(0)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "internal error"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.TimedOut),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unavailable),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
    ],
)
@pytest.mark.parametrize("trailer", [(), ((TRAILER, b"\xff\xff"),)], ids=["plain", "garbage"])
def test_a_status_without_our_details(
    code: grpc.StatusCode, kind: type[SpecsotError], trailer: tuple[Any, ...]
) -> None:
    metadata = grpc.aio.Metadata(*trailer)
    error = error_of(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details="plain words"))
    assert (type(error), str(error)) == (kind, "plain words")


def test_details_are_those_other_languages_read() -> None:
    status = status_of(errors.InvalidRequest("top_k must be >= 0, got -1", field="top_k"))
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "specsot")
    assert bad.field_violations[0].field == "top_k"
    retry = error_details_pb2.RetryInfo()
    assert status_of(errors.Overloaded("later", 1.5)).details[1].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 1.5


def test_details_of_another_domain_are_not_ours() -> None:
    status = status_pb2.Status(code=5, message="m")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="REFUSED", domain="elsewhere"))
    metadata = grpc.aio.Metadata((TRAILER, status.SerializeToString()))
    failure = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), metadata, details="m")
    assert type(error_of(failure)) is errors.NotFound


@pytest.mark.parametrize("letter", ["x", "你", "\ud800"])
async def test_the_longest_words_fit_into_trailers(letter: str) -> None:
    """gRPC would drop trailers over 8 KiB, and with them what went wrong."""
    servicer = Raising()
    endpoint, address = await opened(servicer)
    async with grpc.aio.insecure_channel(address) as channel:
        for error in (
            errors.PlanError("no line: " + letter * 100_000, text=letter * 100_000),
            errors.InvalidRequest("wrong: " + letter * 100_000, field="stop"),
        ):
            servicer.error = error
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await master_pb2_grpc.MasterStub(channel).GetInfo(master_pb2.GetInfoRequest())
            found = error_of(caught.value)
            assert type(found) is type(error)
            assert 100 < len(str(found)) < len(str(error))
    await endpoint.close(0)
