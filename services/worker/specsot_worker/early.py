"""What came before the Configuration of its epoch: kept until that comes, and never more than so much.

Refuses to know what the messages are for.
"""

from __future__ import annotations

import structlog

from specsot.links import Arrival

log = structlog.get_logger()

MOST, MOST_BYTES = 64, 1 << 30  # arrivals: taps, which come by other links than Configurations


class Early:
    """Arrivals of epochs to come, in order. What does not fit is dropped: the barrier has a deadline."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: list[tuple[int, Arrival]] = []
        self._bytes = self._passed = 0

    def keep(self, epoch: int, arrival: Arrival) -> None:
        """Unless its epoch is past."""
        size = size_of(arrival.message)
        if epoch <= self._passed:
            return
        if len(self._kept) >= self._most or self._bytes + size > self._most_bytes:
            log.warning("too much comes before its epoch", sender=arrival.sender, epoch=epoch)
            return
        self._bytes += size
        self._kept.append((epoch, arrival))

    def take(self, epoch: int) -> list[Arrival]:
        """What came for this epoch, which begins now; those before it are over."""
        taken = [arrival for number, arrival in self._kept if number == epoch]
        self._kept = [one for one in self._kept if one[0] > epoch]
        self._bytes = sum(size_of(arrival.message) for _, arrival in self._kept)
        self._passed = epoch
        return taken


def size_of(message: object) -> int:
    """Bytes of the tensors in it."""
    tensors = (getattr(message, name, None) for name in ("weight", "hidden", "fused", "rows"))
    return sum(int(getattr(tensor, "nbytes", 0)) for tensor in tensors)
