"""The master's gRPC doors: Master for clients, Fleet for members.

Refuses to know how requests are led and rings are formed.
"""

from specsot_master.server.door import open_fleet_port, open_master_port
from specsot_master.server.fleet_service import FleetService
from specsot_master.server.master_service import MasterService

__all__ = ["FleetService", "MasterService", "open_fleet_port", "open_master_port"]
