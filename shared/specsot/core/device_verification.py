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
    mispredicted: ids of the sequences for which the host has found another target than the device. The
        device-side result of these sequences must be discarded. The host adds them.
    """

    epoch: int
    trees: tuple[TreeSegment, ...]
    targets: Payload
    features: Payload
    mispredicted: set[int] = field(default_factory=set[int], init=False)


class DeviceTrees(Protocol):
    """Draft trees on the GPU that the host has not read."""

    @property
    def nodes(self) -> int:
        """Number of nodes of each tree, its root included."""
        ...

    @property
    def taken(self) -> bool:
        """True once the drafter has read these trees and its drafts consist of them."""
        ...

    def choose(self, tokens: Payload, positions: Payload, bits: Payload, vocabulary: int) -> None:
        """Write the trees, once grown, into the tensors from which the next step reads its batch.

        An error is not raised here, but when the drafter reads the trees.

        tokens: int tensor that gets the token id of every node, see `specsot_kernels.growing.TreeRows`.
        positions: int tensor that gets the position of every node, see `TreeRows`.
        bits: int tensor that gets the ancestors of every node as a bit set, see `TreeRows`.
        vocabulary: number of token ids of the base model.
        """
        ...
