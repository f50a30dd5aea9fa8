"""Opens the master's doors: both services on one port, or one for clients and one for members.

Refuses to know what is behind them, and what must be shown there.
"""

from __future__ import annotations

from specsot.rpc.options import PUBLIC_BYTES, Terms
from specsot.rpc.serve import Attach, Door, open_door
from specsot.v1 import fleet_pb2_grpc, master_pb2_grpc
from specsot_master.server.fleet_service import FleetService
from specsot_master.server.master_service import MasterService

MASTER_SERVICE, FLEET_SERVICE = "specsot.v1.Master", "specsot.v1.Fleet"
_TERMS = Terms(PUBLIC_BYTES)


async def open_master_port(
    listen: str, master: MasterService, fleet: FleetService | None, terms: Terms = _TERMS
) -> Door:
    """ "specsot.v1.Master" serves when somebody reports a complete ring. fleet None: members come in
    elsewhere, as they must where they or clients show who they are: gRPC for Python asks everybody at a port
    for a certificate, or nobody.
    """
    services = (
        {MASTER_SERVICE: _master(master)}
        if fleet is None
        else {MASTER_SERVICE: _master(master), FLEET_SERVICE: _fleet(fleet)}
    )
    door = await open_door(listen, services, terms)
    if fleet is not None:
        await door.report(FLEET_SERVICE, True)
    return door


async def open_fleet_port(listen: str, fleet: FleetService, terms: Terms) -> Door:
    """For members alone, who are taken at once."""
    door = await open_door(listen, {FLEET_SERVICE: _fleet(fleet)}, terms)
    await door.report(FLEET_SERVICE, True)
    return door


def _master(service: MasterService) -> Attach:
    return lambda server: master_pb2_grpc.add_MasterServicer_to_server(service, server)


def _fleet(service: FleetService) -> Attach:
    return lambda server: fleet_pb2_grpc.add_FleetServicer_to_server(service, server)
