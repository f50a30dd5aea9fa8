"""How two members agree on a link that is not gRPC's: a hello over gRPC, answered with a place to connect to.

Refuses to know what is spoken at that place. What protects members' gRPC protects the keys named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from grpc.aio import AioRpcError

from specsot.errors import WireError
from specsot.members import PROTOCOL, Kind
from specsot.rpc.dial import DIAL_SECONDS, reach
from specsot.rpc.peers import Peer
from specsot.rpc.statuses import error_of
from specsot.rpc.tls import PLAIN, Tls
from specsot.v1 import ring_pb2, ring_pb2_grpc


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port of the host that was asked, and the public key shown there; or a path of this machine."""

    port: int | None = None
    path: str | None = None
    key: bytes = b""


class LinkHost(Protocol):
    """Opens places for links to one member."""

    async def expect(self, peer: Peer, key: bytes) -> Endpoint:
        """A place for one link of this peer, who shows this public key. Raises WireError, Overloaded."""
        ...


class RowsHost(Protocol):
    """Receives what frames leave out, where links have channels for that."""

    def expect(self, peer: Peer) -> Endpoint:
        """A place for one channel of this peer. Raises Overloaded."""
        ...

    def take(self, peer: Peer, message: Any) -> Any:
        """A message by this peer, told where its rows are. Raises WireError: no channel is there."""
        ...

    def part(self, peer: Peer) -> None:
        """This peer's link is over."""
        ...


def encode_endpoint(name: str, place: Endpoint) -> ring_pb2.MeetResponse:
    return ring_pb2.MeetResponse(name=name, port=place.port, path=place.path, key=place.key)


async def negotiate(
    address: str,
    sender: str,
    epoch: int,
    key: bytes,
    kind: Kind,
    patience: float = DIAL_SECONDS,
    tls: Tls = PLAIN,
    rows: bool = False,
) -> tuple[str, Endpoint]:
    """The peer's name, and where it waits. rows: for the channel of a link that stands already.

    Raises Unavailable, Refused, WireError.
    """
    channel = await reach(address, patience, tls=tls, name=kind)
    try:
        hello = ring_pb2.Hello(sender=sender, epoch=epoch, protocol=PROTOCOL)
        request = ring_pb2.MeetRequest(hello=hello, key=key, rows=rows)
        response = await ring_pb2_grpc.RingStub(channel).Meet(request, timeout=patience)
    except AioRpcError as failure:
        raise error_of(failure) from None
    finally:
        await channel.close()
    return response.name or address, _endpoint(response)


def _endpoint(response: ring_pb2.MeetResponse) -> Endpoint:
    match response.WhichOneof("place"):
        case "port":
            return Endpoint(port=response.port, key=response.key)
        case "path":
            return Endpoint(path=response.path)
        case _:
            raise WireError(f"{response.name} names no place for a link")
