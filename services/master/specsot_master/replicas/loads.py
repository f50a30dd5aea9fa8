"""Which replica takes a request: the one with the least to do.

Pure. Refuses to know rings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ReplicaLoad:
    """How much there is to do; the first difference counts.

    waiting: requests that are not in the ring yet. used: share of KV pages that somebody needs.
    """

    waiting: int
    used: float


def least_loaded(loads: Mapping[int, ReplicaLoad], familiar: int | None = None) -> int:
    """Of those that are equally little loaded the one that is `familiar` with how the request begins."""
    least = min(loads.values())
    equal = [number for number, load in loads.items() if load == least]
    return familiar if familiar in equal else equal[0]
