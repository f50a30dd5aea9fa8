"""Who is in the ring, which layers each runs, and when an epoch begins and ends."""

from specsot_master.fleet.fleet import Fleet
from specsot_master.fleet.wishes import PlacementMode, RingConfig

__all__ = ["Fleet", "PlacementMode", "RingConfig"]
