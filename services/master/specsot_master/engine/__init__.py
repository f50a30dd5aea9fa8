"""The engine: runs the requests of one ring from arrival to the last event.

This package must not import tensors, fleet members, gRPC or HTTP.
"""

from specsot_master.core.ring.ring_state import ANONYMOUS, Caller, EngineConfig, Ring, RingState
from specsot_master.engine.engine import Engine
from specsot_master.journal import RequestJournal

__all__ = ["ANONYMOUS", "Caller", "Engine", "EngineConfig", "RequestJournal", "Ring", "RingState"]
