"""Invariant 13, who may come in: without a known token every call is UNAUTHENTICATED, streams and reflection
included; members without a certificate do not even get a connection. Health is open, and says so little.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import product

import grpc
import pytest
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2 as refl

from specsot.errors import Refused, SpecsotError, Unauthenticated, Unavailable
from specsot.params import Ask
from specsot.transport.grpc_channel import probe
from specsot.transport.grpc_client import connect
from specsot.transport.grpc_status import TRAILER
from specsot.transport.links import Inbox
from specsot.transport.security import PLAIN
from specsot.transport.uplink import join
from specsot.v1 import master_pb2, master_pb2_grpc
from tests.rpc.test_uplink import WORKER
from tests.security.endpoints import SHOWN, TOKEN, Endpoints, guarded
from tests.security.members import listening
from tests.security.tls_files import Authority, shown

pytestmark = pytest.mark.timeout(60)

MASTER = "specsot.v1.Master"
REFLECTION = [
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")
]
METHODS = [
    *(f"/{MASTER}/{method.name}" for method in master_pb2.DESCRIPTOR.services_by_name["Master"].methods),
    *REFLECTION,
    "/grpc.channelz.v1.Channelz/GetServers",
    f"/{MASTER}/Nothing",
    "/nothing.at.All/Nothing",
]
WRONG = {
    "none": (),
    "wrong": shown("a-guess"),
    "half": shown(TOKEN[:-1]),
    "longer": shown(TOKEN + "x"),
    "another scheme": (("authorization", f"Basic {TOKEN}"),),
    "bare": (("authorization", TOKEN),),
    "twice": (*SHOWN, *SHOWN),
    "elsewhere": (("x-api-key", TOKEN),),
}


@pytest.fixture
async def endpoints(authority: Authority) -> AsyncIterator[Endpoints]:
    async with guarded(authority, reflection=True, channelz=True) as opened:
        yield opened


@pytest.mark.parametrize("style", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_invariant_13_no_call_without_a_known_token(endpoints: Endpoints, style: str) -> None:
    """What unary calls send does not even parse: that would be told to those who may come in."""
    async with endpoints.channel() as channel:
        for method, metadata in product(METHODS, WRONG.values()):
            sent = () if style.startswith("stream") else (b"\xff\xff",)
            call = getattr(channel, style)(method)(*sent, metadata=metadata, timeout=100)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, method
            assert await call.details() in (
                "a token is needed: authorization: Bearer ...",
                "this token is not known here",
            )
            told = status_pb2.Status.FromString(dict(await call.trailing_metadata())[TRAILER])
            assert told.code == grpc.StatusCode.UNAUTHENTICATED.value[0]
            assert b"Traceback" not in told.SerializeToString()
    assert endpoints.conductor.asked == []


async def test_invariant_13_with_a_token_everything_is_as_ever(endpoints: Endpoints) -> None:
    client = await connect(endpoints.address, tls=endpoints.known, token=TOKEN)
    assert (await client.info()).ready
    assert await client.cancel("r1")
    events = [numbered async for numbered in client.generate(Ask(prompt="hi"))]
    assert len(events) == 3
    await client.close()


async def test_invariant_13_a_token_that_was_taken_away(endpoints: Endpoints) -> None:
    """From the next call on; what runs goes on."""
    endpoints.conductor.hold.clear()
    client = await connect(endpoints.address, tls=endpoints.known, token=TOKEN)
    running = client.generate(Ask(prompt="hi"))
    first = await anext(running)
    endpoints.tokens.write_text("another\n")
    with pytest.raises(Unauthenticated, match="this token is not known here"):
        await client.info()
    endpoints.conductor.hold.set()
    assert [first, *[numbered async for numbered in running]][-1].number == 2
    await client.close()


async def test_invariant_13_health_is_open(endpoints: Endpoints) -> None:
    address, known = endpoints.address, endpoints.known
    assert await asyncio.to_thread(probe, address, "", 5.0, known) == "SERVING"
    assert await asyncio.to_thread(probe, address, MASTER, 5.0, known) == "NOT_SERVING"
    async with endpoints.channel() as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()


@pytest.mark.parametrize("method", REFLECTION)
async def test_invariant_13_reflection_is_off_unless_asked_for(authority: Authority, method: str) -> None:
    async with guarded(authority) as endpoints, endpoints.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_services(channel, method)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("method", REFLECTION)
async def test_invariant_13_reflection_for_those_who_may(endpoints: Endpoints, method: str) -> None:
    """What `grpcurl -cacert ca.pem -H "authorization: Bearer ..." HOST:PORT list` does."""
    async with endpoints.channel() as channel:
        assert MASTER in await list_services(channel, method)


async def list_services(channel: grpc.aio.Channel, method: str) -> set[str]:
    ask = channel.stream_stream(
        method, refl.ServerReflectionRequest.SerializeToString, refl.ServerReflectionResponse.FromString
    )
    questions = iter([refl.ServerReflectionRequest(list_services="")])
    (listed,) = [one async for one in ask(questions, metadata=SHOWN)]
    return {service.name for service in listed.list_services_response.service}


async def test_invariant_13_who_does_not_trust_the_master_sends_nothing(
    endpoints: Endpoints, authority: Authority
) -> None:
    other = Authority.at(authority.folder / "other").known
    with pytest.raises(Unavailable, match="its certificate is not vouched for by --tls-ca"):
        await connect(endpoints.address, tls=other, token=TOKEN)
    with pytest.raises(Unavailable, match="one side speaks TLS and the other does not"):
        await connect(endpoints.address, token=TOKEN)
    elsewhere = endpoints.address.replace("127.0.0.1", "127.0.0.2")
    assert "no process answers" in await asyncio.to_thread(probe, elsewhere, "", 5.0, endpoints.known)


async def test_invariant_13_a_member_with_its_certificate(endpoints: Endpoints, authority: Authority) -> None:
    uplink = await join(endpoints.fleet_address, WORKER, Inbox(), tls=authority.issue("worker"))
    assert endpoints.fleet.downlinks.keys() == {"w0"}
    await uplink.close()


async def test_invariant_13_no_certificate_no_connection(endpoints: Endpoints, authority: Authority) -> None:
    """None, one that another CA gave, one that is too old, none of this in the clear: not even health."""
    other = Authority.at(authority.folder / "other").issue("worker")
    tls_files = {
        "none": authority.known,
        "of another CA": replace(other, ca=authority.file),
        "expired": authority.issue("worker", into="old", expired=True),
        "in the clear": PLAIN,
    }
    for what, tls in tls_files.items():
        with pytest.raises(Unavailable, match="no process answers"):
            await join(endpoints.fleet_address, WORKER, Inbox(), tls=tls)
        assert "no process answers" in await asyncio.to_thread(
            probe, endpoints.fleet_address, "", 5.0, tls
        ), what
    assert endpoints.fleet.downlinks == {}
    assert endpoints.fleet.gone.empty()


@pytest.mark.parametrize(
    ("names", "kind", "complaint"),
    [
        (("drafter",), "worker", "w0 shows a certificate for drafter, localhost; worker is needed"),
        (("worker",), "drafter", "drafter is needed"),
        (("master",), "worker", "worker is needed"),
        (("worker.example",), "worker", "worker is needed"),
        ((), "worker", "worker is needed"),
    ],
)
async def test_invariant_13_a_certificate_for_something_else(
    endpoints: Endpoints, authority: Authority, names: tuple[str, ...], kind: str, complaint: str
) -> None:
    tls = authority.issue(*names, into="mine")
    with pytest.raises(Refused, match=complaint):
        await join(endpoints.fleet_address, replace(WORKER, kind=kind), Inbox(), tls=tls)
    assert endpoints.fleet.downlinks == {}


async def test_invariant_13_a_master_that_is_none(endpoints: Endpoints, authority: Authority) -> None:
    """A worker's certificate does not make a master: members hang up before they say a word."""
    async with listening(authority.issue("worker")) as address:
        with pytest.raises(Unavailable, match="its certificate is for another name"):
            await join(address, WORKER, Inbox(), tls=authority.issue("worker", into="mine"))


async def test_invariant_13_clients_have_no_business_at_the_members_endpoint(
    endpoints: Endpoints, authority: Authority
) -> None:
    """Nor members at that of the clients, whatever they show.

    (A stream that is refused while its first word is being written may end as an internal error of gRPC's.)
    """
    worker = authority.issue("worker")
    with pytest.raises(SpecsotError):
        await join(endpoints.address, WORKER, Inbox(), tls=worker)
    client = await connect(endpoints.fleet_address, tls=worker, token=TOKEN)
    with pytest.raises(Unavailable, match="Method not found"):
        await client.info()
    await client.close()


async def test_invariant_13_a_request_is_its_tokens(endpoints: Endpoints) -> None:
    """What the conductor is told of whose call it is: the same by every endpoint, never the token."""
    endpoints.tokens.write_text(f"another\n{TOKEN}\n")
    owners: list[list[str]] = []
    async with endpoints.channel() as channel:
        stub = master_pb2_grpc.MasterStub(channel)
        for token in (TOKEN, "another"):
            endpoints.conductor.owners.clear()
            ask = master_pb2.GenerateRequest(prompt="hi", request_id="mine")
            later = master_pb2.GenerateRequest(request_id="mine", resume_from=1)
            for request in (ask, later):
                async for _ in stub.Generate(request, metadata=shown(token)):
                    pass
            await stub.Cancel(master_pb2.CancelRequest(request_id="mine"), metadata=shown(token))
            owners.append(list(endpoints.conductor.owners))
    (mine,), (others,) = map(set, owners)
    assert mine != others
    assert len(owners[0]) == 3
    assert TOKEN not in mine
    assert endpoints.conductor.asked[-1][2] == others, "one token is one client, wherever it comes from"


async def test_invariant_13_a_ring_is_shared_out_anew_for_administrators(endpoints: Endpoints) -> None:
    request = master_pb2.RebalanceRequest()
    async with endpoints.channel() as channel:
        stub = master_pb2_grpc.MasterStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Rebalance(request, metadata=shown(TOKEN))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "administrator" in (caught.value.details() or "")
        for text in (f"another\n{TOKEN} admin\n", f"{TOKEN}\n"):
            endpoints.tokens.write_text(text)
            await stub.Rebalance(request, metadata=shown(TOKEN))
