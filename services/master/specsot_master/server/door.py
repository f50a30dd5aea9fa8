"""Opens the master's door: both services on one port.

Refuses to know what is behind them.
"""

from __future__ import annotations

from specsot.rpc.options import PUBLIC_BYTES, Terms
from specsot.rpc.serve import Door, open_door
from specsot.v1 import fleet_pb2_grpc, master_pb2_grpc
from specsot_master.server.fleet_service import FleetService
from specsot_master.server.master_service import MasterService

MASTER, FLEET = "specsot.v1.Master", "specsot.v1.Fleet"
_TERMS = Terms(PUBLIC_BYTES)


async def open_master_door(
    listen: str, master: MasterService, fleet: FleetService, terms: Terms = _TERMS
) -> Door:
    """Members are taken at once; "specsot.v1.Master" serves when somebody reports a complete ring."""
    door = await open_door(
        listen,
        {
            MASTER: lambda server: master_pb2_grpc.add_MasterServicer_to_server(master, server),
            FLEET: lambda server: fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server),
        },
        terms,
    )
    await door.report(FLEET, True)
    return door
