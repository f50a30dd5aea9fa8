"""Leads requests through the ring.

Refuses to know tensors, members and doors.
"""

from specsot_master.conductor.conductor import Conductor
from specsot_master.conductor.notes import Notes
from specsot_master.conductor.ring import ANYBODY, Caller, ConductorConfig, Ring, RingState

__all__ = ["ANYBODY", "Caller", "Conductor", "ConductorConfig", "Notes", "Ring", "RingState"]
