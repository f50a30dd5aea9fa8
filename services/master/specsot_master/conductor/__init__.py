"""Leads requests through the ring.

Refuses to know tensors, members and doors.
"""

from specsot_master.conductor.conductor import Engine
from specsot_master.conductor.notes import RequestJournal
from specsot_master.conductor.ring import ANYBODY, Caller, EngineConfig, Ring, RingState

__all__ = ["ANYBODY", "Caller", "Engine", "EngineConfig", "RequestJournal", "Ring", "RingState"]
