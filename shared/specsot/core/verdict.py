"""What a device has found out of a frame before its host knows."""

from __future__ import annotations

from dataclasses import dataclass

from specsot.core.frames import Payload, TreeSegment


@dataclass(frozen=True, slots=True)
class UnreadVerdict:
    """Of a frame of these trees alone, on a device whose host has not read it.

    targets:  int32 [rows], the token behind each node; negative: its logits are not numbers.
    features: [rows, width].
    """

    epoch: int
    trees: tuple[TreeSegment, ...]
    targets: Payload
    features: Payload
