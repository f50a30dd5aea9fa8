"""What every endpoint has: reflection (both versions), health, limits, and plain words for bad bytes.

Knows nothing of rings and requests.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2 as refl

from specsot.errors import Unavailable
from specsot.transport.grpc_channel import Terms, probe, server_options
from specsot.transport.grpc_server import GrpcServer, open_server, split_address
from specsot.v1 import master_pb2, master_pb2_grpc

MASTER = "specsot.v1.Master"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Echo(master_pb2_grpc.MasterServicer):
    async def Cancel(self, request: Any, context: Any) -> master_pb2.CancelResponse:
        return master_pb2.CancelResponse(cancelled=bool(request.request_id))


ATTACH = {MASTER: lambda server: master_pb2_grpc.add_MasterServicer_to_server(Echo(), server)}


@pytest.fixture
async def endpoint() -> AsyncIterator[GrpcServer]:
    opened = await open_server("127.0.0.1:0", ATTACH, Terms(largest=1 << 16))
    yield opened
    await opened.close(0)


@pytest.fixture
async def channel(endpoint: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as opened:
        yield opened


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection(channel: grpc.aio.Channel, version: str) -> None:
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        refl.ServerReflectionRequest.SerializeToString,
        refl.ServerReflectionResponse.FromString,
    )
    questions = [
        refl.ServerReflectionRequest(list_services=""),
        refl.ServerReflectionRequest(file_containing_symbol=MASTER),
    ]
    listed, found = [response async for response in ask(iter(questions))]
    names = {service.name for service in listed.list_services_response.service}
    assert {MASTER, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= names
    assert b"GenerateRequest" in found.file_descriptor_response.file_descriptor_proto[0]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_all_that_it_lists(version: str) -> None:
    """As grpcurl describe, grpcui and buf curl --list-methods ask: the file of every service, and what that
    imports."""
    opened = await open_server("127.0.0.1:0", ATTACH, Terms(channelz=True))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.port}") as channel:
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            refl.ServerReflectionRequest.SerializeToString,
            refl.ServerReflectionResponse.FromString,
        )
        names = sorted(await services_of(channel))
        told = [one async for one in ask(iter([described(name) for name in names]))]
        assert [one.WhichOneof("message_response") for one in told] == ["file_descriptor_response"] * len(
            names
        )
        pool = descriptor_pool.DescriptorPool()
        for data in reversed(
            [data for one in told for data in one.file_descriptor_response.file_descriptor_proto]
        ):
            pool.AddSerializedFile(data)
        methods = {name: [one.name for one in pool.FindServiceByName(name).methods] for name in names}
        assert methods["grpc.reflection.v1.ServerReflection"] == ["ServerReflectionInfo"]
        assert "Generate" in methods[MASTER]
    await opened.close(0)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_finds_methods_and_fields(channel: grpc.aio.Channel, version: str) -> None:
    """As `grpcurl describe specsot.v1.Master.Generate` asks."""
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        refl.ServerReflectionRequest.SerializeToString,
        refl.ServerReflectionResponse.FromString,
    )
    known = f"{MASTER}.Generate", "grpc.health.v1.Health.Check", "specsot.v1.GenerateRequest.prompt"
    unknown = f"{MASTER}.Degenerate", f"{MASTER}.", "Generate", "", f"{MASTER}.Generate.Generate"
    told = [one async for one in ask(iter([described(name) for name in (*known, *unknown)]))]
    found = [one.WhichOneof("message_response") for one in told]
    assert found == ["file_descriptor_response"] * len(known) + ["error_response"] * len(unknown)
    files = [one.file_descriptor_response.file_descriptor_proto[0] for one in told[:2]]
    assert b"GenerateRequest" in files[0]
    assert b"HealthCheckRequest" in files[1]


def described(name: str) -> Any:
    return refl.ServerReflectionRequest(file_containing_symbol=name)


class Waiting(master_pb2_grpc.MasterServicer):
    """Answers when it may."""

    def __init__(self) -> None:
        self.may, self.asked = asyncio.Event(), asyncio.Event()

    async def Cancel(self, request: Any, context: Any) -> master_pb2.CancelResponse:
        self.asked.set()
        await self.may.wait()
        return master_pb2.CancelResponse(cancelled=True)


async def test_messages_of_calls_under_way_have_one_budget_and_give_it_back() -> None:
    waiting = Waiting()
    attach = {MASTER: lambda server: master_pb2_grpc.add_MasterServicer_to_server(waiting, server)}
    opened = await open_server("127.0.0.1:0", attach, Terms(held=1500))
    large, small = (master_pb2.CancelRequest(request_id="x" * count) for count in (1000, 100))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.port}") as channel:
        stub: Any = master_pb2_grpc.MasterStub(channel)
        first = asyncio.ensure_future(stub.Cancel(large))
        await waiting.asked.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Cancel(large)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "take all memory" in str(caught.value.details())
        second = asyncio.ensure_future(stub.Cancel(small))
        waiting.may.set()
        assert all(one.cancelled for one in await asyncio.gather(first, second))
        for _ in range(3):
            assert (await stub.Cancel(large)).cancelled
    await opened.close(0)


async def test_a_stream_holds_one_message_at_a_time() -> None:
    """A member's lasts for days: what it had ever said filled the budget, and it was cut, as clients were."""
    opened = await open_server("127.0.0.1:0", ATTACH, Terms(held=1500))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.port}") as channel:
        ask = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            refl.ServerReflectionRequest.SerializeToString,
            refl.ServerReflectionResponse.FromString,
        )
        told = [one async for one in ask(iter([described("x" * 1000)] * 5))]
        assert [one.error_response.error_message for one in told] == ["not found"] * 5
    await opened.close(0)


def test_a_connection_has_only_so_many_calls_at_a_time() -> None:
    assert ("grpc.max_concurrent_streams", 2) in server_options(Terms(streams=2))


async def test_reflection_and_channelz_are_served_only_if_enabled(endpoint: GrpcServer) -> None:
    """Connections are told about, and services listed, only where that is wanted."""
    curious, shy = Terms(channelz=True), Terms(reflection=False)
    told = {terms: await open_server("127.0.0.1:0", ATTACH, terms) for terms in (curious, shy)}
    for terms, opened in told.items():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{opened.port}") as channel:
            stub: Any = channelz_pb2_grpc.ChannelzStub(channel)
            call = stub.GetServers(channelz_pb2.GetServersRequest())
            if terms.channelz:
                (server,) = [one for one in (await call).server if one.data.calls_started]
                assert server.data.calls_started == 1
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                    await call
            names = services_of(channel)
            if terms.reflects:
                assert {MASTER, "grpc.channelz.v1.Channelz"} <= await names
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                    await names
        await opened.close(0)


async def services_of(channel: grpc.aio.Channel) -> set[str]:
    ask = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        refl.ServerReflectionRequest.SerializeToString,
        refl.ServerReflectionResponse.FromString,
    )
    (listed,) = [one async for one in ask(iter([refl.ServerReflectionRequest(list_services="")]))]
    return {service.name for service in listed.list_services_response.service}


async def test_health_by_service(channel: grpc.aio.Channel, endpoint: GrpcServer) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)

    async def state(service: str) -> int:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    assert await state("") == SERVING
    assert await state(MASTER) == NOT_SERVING
    await endpoint.report(MASTER, True)
    assert await state(MASTER) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await state("specsot.v1.Nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_is_watched(channel: grpc.aio.Channel, endpoint: GrpcServer) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watching = stub.Watch(health_pb2.HealthCheckRequest(service=MASTER))
    assert (await watching.read()).status == NOT_SERVING
    await endpoint.report(MASTER, True)
    assert (await watching.read()).status == SERVING
    watching.cancel()


@pytest.mark.parametrize(
    ("method", "style"),
    [
        (f"/{MASTER}/Cancel", "unary_unary"),
        (f"/{MASTER}/Generate", "unary_stream"),
        ("/grpc.health.v1.Health/Check", "unary_unary"),
        ("/grpc.health.v1.Health/Watch", "unary_stream"),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "stream_stream"),
    ],
)
async def test_malformed_protobuf(channel: grpc.aio.Channel, method: str, style: str) -> None:
    call = getattr(channel, style)(method)
    bad = b"\x0a\xff\xff"
    sent = call(iter([bad])) if style.startswith("stream") else call(bad)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (sent if style == "unary_unary" else sent.read())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the message does not parse"


@pytest.mark.parametrize(("name", "note"), [(1 << 17, 0), (1, 1 << 15)], ids=["message", "metadata"])
async def test_more_than_allowed(channel: grpc.aio.Channel, name: int, note: int) -> None:
    stub, asked = master_pb2_grpc.MasterStub(channel), master_pb2.CancelRequest(request_id="x" * name)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Cancel(asked, metadata=(("note", "x" * note),), timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.Cancel(master_pb2.CancelRequest(request_id="x"))).cancelled


async def test_an_unknown_method(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{MASTER}/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_in_use_is_one_clear_line(endpoint: GrpcServer) -> None:
    with pytest.raises(Unavailable) as caught:
        await open_server(f"127.0.0.1:{endpoint.port}", ATTACH)
    assert str(caught.value) == f"cannot listen at 127.0.0.1:{endpoint.port}: address already in use"


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:port", "127.0.0.1:65536", "127.0.0.1"])
async def test_no_address_at_all(listen: str) -> None:
    with pytest.raises(Unavailable, match=f"{listen} is not an address; write host:port"):
        await open_server(listen, ATTACH)


async def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(
        Unavailable, match=r"cannot listen at 192\.0\.2\.1:1: cannot assign requested address"
    ):
        await open_server("192.0.2.1:1", ATTACH)


@pytest.mark.parametrize(
    ("path", "why"),
    [("none/of/these.sock", "no such file or directory"), ("a" * 120, "AF_UNIX path too long")],
)
async def test_a_unix_socket_that_cannot_be_made_says_why(tmp_path: Path, path: str, why: str) -> None:
    with pytest.raises(Unavailable, match=rf"cannot listen at unix:.*: {why}$"):
        await open_server(f"unix:{tmp_path}/{path}", ATTACH)


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]", "nowhere"])
def test_an_address_without_a_port_is_called_none(address: str) -> None:
    """gRPC would ask at port 443, and nobody would know."""
    assert probe(address) == "no process answers (it is no HOST:PORT)"


def test_addresses() -> None:
    assert split_address("host:1") == ("host", 1)
    assert split_address("[::1]:50") == ("::1", 50)


async def test_a_unix_socket_is_only_an_address(tmp_path: Path) -> None:
    endpoint = await open_server(f"unix:{tmp_path}/endpoint", ATTACH)
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/endpoint") as channel:
        answer = await master_pb2_grpc.MasterStub(channel).Cancel(master_pb2.CancelRequest(request_id="x"))
    assert answer.cancelled
    await endpoint.close(0)


async def test_the_probe(endpoint: GrpcServer) -> None:
    address = f"127.0.0.1:{endpoint.port}"
    assert await asyncio.to_thread(probe, address) == "SERVING"
    assert await asyncio.to_thread(probe, address, MASTER) == "NOT_SERVING"
    assert await asyncio.to_thread(probe, address, "a.Service") == "there is no a.Service here"


def test_a_probe_of_an_unused_port_finds_no_process() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert probe(f"127.0.0.1:{port}", timeout=60) == "no process answers"


async def test_a_probe_of_a_silent_process_times_out() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        answer = await asyncio.to_thread(probe, f"127.0.0.1:{mute.getsockname()[1]}", "", 0.2)
    assert answer == "no answer in time"
