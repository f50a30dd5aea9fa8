"""What came before the Configuration of its epoch: kept until that comes, and never more than so much.

Refuses to know what the messages are for.
"""

from __future__ import annotations

import structlog

from specsot.transport.links import Arrival

log = structlog.get_logger()

MAX_EARLY_ARRIVALS, MAX_EARLY_BYTES = (
    64,
    1 << 30,
)  # arrivals: taps, which come by other links than Configurations


class EarlyArrivals:
    """Arrivals of epochs to come, in order. What does not fit is dropped: the barrier has a deadline."""

    def __init__(self, max_arrivals: int = MAX_EARLY_ARRIVALS, max_bytes: int = MAX_EARLY_BYTES) -> None:
        self._max_arrivals, self._max_bytes = max_arrivals, max_bytes
        self._held: list[tuple[int, Arrival]] = []
        self._bytes = self._past_epoch = 0

    def hold(self, epoch: int, arrival: Arrival) -> None:
        """Unless its epoch is past."""
        size = tensor_bytes(arrival.message)
        if epoch <= self._past_epoch:
            return
        if len(self._held) >= self._max_arrivals or self._bytes + size > self._max_bytes:
            log.warning("too much comes before its epoch", sender=arrival.sender, epoch=epoch)
            return
        self._bytes += size
        self._held.append((epoch, arrival))

    def release(self, epoch: int) -> list[Arrival]:
        """What came for this epoch, which begins now; those before it are over."""
        taken = [arrival for number, arrival in self._held if number == epoch]
        self._held = [one for one in self._held if one[0] > epoch]
        self._bytes = sum(tensor_bytes(arrival.message) for _, arrival in self._held)
        self._past_epoch = epoch
        return taken


def tensor_bytes(message: object) -> int:
    """Bytes of the tensors in it."""
    tensors = (getattr(message, name, None) for name in ("weight", "hidden", "fused", "rows"))
    return sum(int(getattr(tensor, "nbytes", 0)) for tensor in tensors)
