"""Verification results and draft trees that are still on the GPU, before the host has read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from specsot.core.frames import Payload, TreeSegment


@dataclass(frozen=True, slots=True)
class DeviceVerification:
    """The device-side verification result of a frame whose segments are trees followed by prompt chunks.

    A colocated drafter starts to grow the next trees from this value while the host still reads the result.

    epoch: epoch of the frame.
    trees: the tree segments at the beginning of the frame.
    targets: int32 [num_tokens], the target token at each node. Negative if the node's logits are not finite.
    features: [num_tokens, width], the fused features of the frame.
    astray: sequences for which the host has found another target than the device. The device-side result of
        these sequences must be discarded.
    """

    epoch: int
    trees: tuple[TreeSegment, ...]
    targets: Payload
    features: Payload
    astray: set[int] = field(default_factory=set[int], init=False)


class DeviceTrees(Protocol):
    """Draft trees on the GPU that the host has not read.

    nodes: number of nodes of each tree, its root included.
    taken: True once the drafter has read these trees and its drafts consist of them.
    """

    @property
    def nodes(self) -> int: ...

    @property
    def taken(self) -> bool: ...

    def choose(self, tokens: Payload, positions: Payload, bits: Payload, vocabulary: int) -> None:
        """Write the trees, once grown, into the tensors from which the next step reads its batch.

        See `specsot_kernels.growing.TreeRows` for the layout of `tokens`, `positions` and `bits`.
        `vocabulary` is the number of token ids. An error is not raised here, but when the drafter reads the
        trees.
        """
        ...
