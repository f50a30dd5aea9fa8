"""What a device has found out of a frame before its host knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from specsot.core.frames import Payload, TreeSegment


@dataclass(frozen=True, slots=True)
class UnreadVerdict:
    """Of a frame that begins with these trees, and has prompts behind them, on a device whose host has not
    read it.

    targets:  int32 [rows], the token behind each node; negative: its logits are not numbers.
    features: [rows, width].
    astray:   sequences of whom the host has found out that it is another one.
    """

    epoch: int
    trees: tuple[TreeSegment, ...]
    targets: Payload
    features: Payload
    astray: set[int] = field(default_factory=set[int], init=False)


class UnreadTrees(Protocol):
    """Trees of `nodes` nodes each, roots included, that a device has, or grows, and its host has not read.

    taken: by now its drafter has, and drafts are those.
    """

    @property
    def nodes(self) -> int: ...

    @property
    def taken(self) -> bool: ...

    def choose(self, tokens: Payload, positions: Payload, bits: Payload, vocabulary: int) -> None:
        """Write what a lap reads of them, once they are grown: see `specsot_kernels.growing.TreeRows`. What
        goes wrong is told to the drafter, when it would take them.
        """
        ...
