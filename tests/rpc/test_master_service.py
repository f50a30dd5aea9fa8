"""The public API over a real server, with a fake conductor behind it.

Knows nothing of prompts, plans and rings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
import pytest

from specsot.core.info import Info, MemberInfo, ModelInfo, PagesInfo
from specsot.errors import InvalidRequest, Overloaded, Unavailable
from specsot.events import Finished, MergedText, Numbered, Reason, SkeletonText, Started, Statistics
from specsot.members import Range
from specsot.params import Ask, Limits
from specsot.transport.grpc_client import MasterClient, connect
from specsot.transport.grpc_server import GrpcServer
from specsot.transport.grpc_status import error_of
from specsot.v1 import master_pb2, master_pb2_grpc, values_pb2
from specsot_master.engine import Caller
from specsot_master.grpc_api import FleetService, MasterService, client_of, open_master_port
from specsot_master.master import RequestCounter
from tests.rpc.test_uplink import FakeFleet

pytestmark = pytest.mark.timeout(30)

DONE = Finished(Reason.STOP, "hello", (1, 2), Statistics(phases={"direct": 0.5}))
INFO = Info(
    models=(ModelInfo("demo", "abc", 8, 2048),),
    members=(MemberInfo("worker", "w0", "127.0.0.1:1", "abc", Range(0, 8)),),
    epoch=3,
    ready=True,
    pages=PagesInfo(64, 60, 256),
)


class FakeConductor:
    """Writes three events, or as many as `stop` lets it; remembers what it was asked and how it ended."""

    def __init__(self) -> None:
        self.asked: list[tuple[Ask, str | None, str]] = []
        self.owners: list[str] = []  # of all calls
        self.hold, self.closed, self.begun = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.hold.set()
        self.endless = False
        self.timeout: float | None = None
        self.refusal: Exception | None = None

    async def open(
        self, ask: Ask | None, caller: Caller, offset: int | None = None
    ) -> AsyncGenerator[Numbered, None]:
        if offset is not None:
            self.owners.append(caller.owner)
            return _last(offset)
        self.asked.append((ask, caller.request, caller.client))
        self.owners.append(caller.owner)
        self.timeout = caller.timeout
        if self.refusal:
            raise self.refusal
        return self._events(ask, caller.request or "r1")

    async def _events(self, ask: Ask, request_id: str) -> AsyncGenerator[Numbered, None]:
        try:
            yield Numbered(0, Started(request_id, "demo", ask.mode, 7, 3))
            self.begun.set()
            await self.hold.wait()
            offset = 1
            while self.endless:
                yield Numbered(offset, SkeletonText("x" * 1000))
                offset += 1
            yield Numbered(1, MergedText(0, "hello"))
            yield Numbered(2, DONE)
        finally:
            self.closed.set()

    def cancel(self, request_id: str, owner: str = "") -> bool:
        self.owners.append(owner)
        return request_id == "r1"


async def _last(offset: int) -> AsyncGenerator[Numbered, None]:
    yield Numbered(offset, DONE)


class Served:
    def __init__(
        self, conductor: FakeConductor, desk: RequestCounter, endpoint: GrpcServer, client: MasterClient
    ) -> None:
        self.conductor, self.desk, self.endpoint, self.client = conductor, desk, endpoint, client
        self.address = f"127.0.0.1:{endpoint.port}"


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    conductor = FakeConductor()
    desk = RequestCounter(conductor, lambda: INFO)
    service = MasterService(desk, lambda: INFO)
    endpoint = await open_master_port("127.0.0.1:0", service, FleetService(FakeFleet()))
    client = await connect(f"127.0.0.1:{endpoint.port}")
    yield Served(conductor, desk, endpoint, client)
    await client.close()
    await endpoint.close(0)


async def test_a_request_and_its_events(served: Served) -> None:
    ask = Ask(prompt="hi", mode="direct", limits=Limits(max_new_tokens=9), seed=7)
    events = [numbered async for numbered in served.client.generate(ask, "mine")]
    assert served.conductor.asked == [(ask, "mine", "ipv4:127.0.0.1")]
    assert served.conductor.timeout is None
    assert events == [
        Numbered(0, Started("mine", "demo", "direct", 7, 3)),
        Numbered(1, MergedText(0, "hello")),
        Numbered(2, DONE),
    ]


async def test_cancel_and_info(served: Served) -> None:
    assert await served.client.cancel("r1")
    assert not await served.client.cancel("nobody")
    with pytest.raises(InvalidRequest, match="request_id must be given"):
        await served.client.cancel("")
    assert await served.client.info() == INFO


async def test_a_client_that_stops_listening_ends_its_request(served: Served) -> None:
    served.conductor.hold.clear()
    events = served.client.generate(Ask(prompt="hi"))
    await anext(events)
    await events.aclose()
    await asyncio.wait_for(served.conductor.closed.wait(), 60)


@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_vanishes_ends_its_request(served: Served, reads: bool) -> None:
    """Where it does not read, the handler sits in a blocked write, where gRPC cancels in another way."""
    served.conductor.endless = not reads
    if reads:
        served.conductor.hold.clear()
    async with grpc.aio.insecure_channel(served.address) as channel:
        call = master_pb2_grpc.MasterStub(channel).Generate(master_pb2.GenerateRequest(prompt="hi"))
        await call.read()
        await served.conductor.begun.wait()
    await asyncio.wait_for(served.conductor.closed.wait(), 60)


async def test_a_deadline_ends_its_request(served: Served) -> None:
    served.conductor.hold.clear()
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub = master_pb2_grpc.MasterStub(channel)
        call = stub.Generate(master_pb2.GenerateRequest(prompt="hi"), timeout=2.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert served.conductor.timeout is not None
    assert 0 < served.conductor.timeout < 2.1  # gRPC reckons by clocks of its own
    await asyncio.wait_for(served.conductor.closed.wait(), 60)


async def test_a_client_cannot_ask_for_a_form_that_only_the_master_writes(served: Served) -> None:
    form = values_pb2.Form(structural_tag='{"parts": ["a"], "tokens": {"3": "b"}}')
    async with grpc.aio.insecure_channel(served.address) as channel:
        bad = master_pb2.GenerateRequest(prompt="x", form=form)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await master_pb2_grpc.MasterStub(channel).Generate(bad).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "structural_tag is internal; a form is one of json_object, json_schema" in str(
        caught.value.details()
    )
    assert served.conductor.asked == []


async def test_a_bad_request_names_its_field_and_changes_nothing(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        bad = master_pb2.GenerateRequest(prompt="x", sampling=values_pb2.Sampling(temperature=-1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await master_pb2_grpc.MasterStub(channel).Generate(bad).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "temperature must be a number >= 0, got -1.0"
    assert served.conductor.asked == []


async def test_a_negative_seed_is_random_and_top_p_0_greedy(served: Served) -> None:
    asked = master_pb2.GenerateRequest(
        prompt="hi", seed=-1, sampling=values_pb2.Sampling(temperature=1.5, top_p=0)
    )
    async with grpc.aio.insecure_channel(served.address) as channel:
        async for _ in master_pb2_grpc.MasterStub(channel).Generate(asked):
            pass
    ((ask, *_),) = served.conductor.asked
    assert (ask.seed, ask.sampling.temperature, ask.sampling.top_p) == (None, 0, 1)


@pytest.mark.parametrize(
    ("sampling", "logprobs", "field"),
    [
        (values_pb2.Sampling(top_p=float("nan")), None, "top_p"),
        (values_pb2.Sampling(top_k=-1), None, "top_k"),
        (values_pb2.Sampling(min_p=1.5), None, "min_p"),
        (values_pb2.Sampling(repetition_penalty=0), None, "repetition_penalty"),
        (values_pb2.Sampling(presence_penalty=float("inf")), None, "presence_penalty"),
        (values_pb2.Sampling(frequency_penalty=-2.5), None, "frequency_penalty"),
        (values_pb2.Sampling(logit_bias={7: 1e9}), None, "logit_bias"),
        (None, 21, "logprobs"),
    ],
)
async def test_impossible_sampling_is_an_invalid_argument_with_its_field(
    served: Served, sampling: values_pb2.Sampling | None, logprobs: int | None, field: str
) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        bad = master_pb2.GenerateRequest(prompt="x", sampling=sampling, logprobs=logprobs)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await master_pb2_grpc.MasterStub(channel).Generate(bad).read()
    error = error_of(caught.value)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert served.conductor.asked == []


@pytest.mark.parametrize("request_id", ["x" * 129, "two\nlines"])
async def test_a_bad_request_id(served: Served, request_id: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await anext(served.client.generate(Ask(prompt="x"), request_id))
    assert caught.value.field == "request_id"


async def test_what_the_conductor_refuses(served: Served) -> None:
    served.conductor.refusal = Overloaded("64 requests are waiting already", 3.0)
    with pytest.raises(Overloaded, match="64 requests") as caught:
        await anext(served.client.generate(Ask(prompt="x")))
    assert caught.value.retry_after == 3.0


async def test_draining_lets_running_requests_finish(served: Served) -> None:
    served.conductor.hold.clear()
    events = served.client.generate(Ask(prompt="x"))
    await anext(events)
    draining = asyncio.create_task(served.desk.drain(5))
    await asyncio.sleep(0)  # its first step is to refuse
    with pytest.raises(Unavailable, match="the master is shutting down"):
        await anext(served.client.generate(Ask(prompt="y")))
    served.conductor.hold.set()
    assert [numbered.number async for numbered in events] == [1, 2]
    assert await draining


async def test_draining_ends_with_its_grace(served: Served) -> None:
    served.conductor.hold.clear()
    events = served.client.generate(Ask(prompt="x"))
    await anext(events)
    assert not await served.desk.drain(0.05)
    served.conductor.hold.set()
    assert [numbered.number async for numbered in events] == [1, 2]


async def test_a_master_that_goes_is_unavailable(served: Served) -> None:
    served.conductor.hold.clear()
    events = served.client.generate(Ask(prompt="x"))
    await anext(events)
    await served.endpoint.close(0)
    with pytest.raises(Unavailable):
        await anext(events)


def test_a_client_is_its_host() -> None:
    assert client_of("ipv4:10.0.0.7:51234") == "ipv4:10.0.0.7"
    assert client_of("ipv6:%5B::1%5D:5") == "ipv6:%5B::1%5D"
    assert client_of("unix:") == "unix:"
