"""A master's endpoints with TLS, one for clients and one for members, in front of fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from specsot.core.info import Info, Rebalanced
from specsot.transport.grpc_channel import PUBLIC_BYTES, Terms
from specsot.transport.grpc_server import GrpcServer
from specsot.transport.security import Tls, Tokens
from specsot_master.grpc_api import FleetService, MasterService, open_fleet_port, open_master_port
from specsot_master.master import RequestCounter
from tests.rpc.test_master_service import INFO, FakeConductor
from tests.rpc.test_uplink import FakeFleet
from tests.security.tls_files import Authority, shown

TOKEN = "the-one-that-counts"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """known: what a client needs to trust the master."""

    clients: GrpcServer
    members: GrpcServer
    conductor: FakeConductor
    fleet: FakeFleet
    known: Tls
    tokens: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.clients.port}"

    @property
    def fleet_address(self) -> str:
        return f"127.0.0.1:{self.members.port}"

    def channel(self) -> grpc.aio.Channel:
        """A stranger's: it trusts the master, and shows nothing."""
        assert self.known.ca is not None
        return grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(self.known.ca.read_bytes()))


async def rebalanced() -> Rebalanced:
    return Rebalanced(True, 1, "")


@asynccontextmanager
async def guarded(authority: Authority, **more: bool) -> AsyncIterator[Endpoints]:
    """`more` goes to the terms of the clients' endpoint."""
    own, file = authority.issue("master"), authority.folder / "tokens"
    file.write_text(f"another\n{TOKEN}\n")
    conductor, fleet = FakeConductor(), FakeFleet()
    desk = RequestCounter(conductor, lambda: INFO)
    tokens = Tokens(file)
    terms = Terms(PUBLIC_BYTES, tls=replace(own, ca=None), tokens=tokens, **more)
    service = MasterService(desk, info, rebalance=rebalanced, tokens=tokens)
    clients = await open_master_port("127.0.0.1:0", service, None, terms)
    members = await open_fleet_port("127.0.0.1:0", FleetService(fleet), Terms(PUBLIC_BYTES, tls=own))
    try:
        yield Endpoints(clients, members, conductor, fleet, authority.known, file)
    finally:
        await members.close(0)
        await clients.close(0)


def info() -> Info:
    return INFO


SHOWN = shown(TOKEN)
