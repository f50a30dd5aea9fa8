"""Leads requests through the ring.

Refuses to know tensors, members and doors.
"""

from specsot_master.core.ring import ANYBODY, Caller, EngineConfig, Ring, RingState
from specsot_master.engine.engine import Engine
from specsot_master.engine.replay import RequestJournal

__all__ = ["ANYBODY", "Caller", "Engine", "EngineConfig", "RequestJournal", "Ring", "RingState"]
