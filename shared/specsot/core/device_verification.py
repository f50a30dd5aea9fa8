"""Verification results and draft trees that are still on the GPU, and the protocol that works with them.

A drafter that runs on the thread of the verifier starts to draft before the host has read the verification.
The verifier and the drafter share one protocol: `start_drafts` returns a handle, `result` returns the drafts
that the handle stands for, and `discard` says that the drafts are for another result than the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specsot.core.frames import Drafts, Features, Payload, TreeSegment
from specsot.core.overlap import OverlapState


@dataclass(frozen=True, slots=True)
class DeviceVerification:
    """The device-side verification result of a frame whose segments are trees followed by prompt chunks.

    A colocated drafter starts to grow the next trees from this value while the host still reads the result.

    epoch: epoch of the frame.
    trees: the tree segments at the beginning of the frame.
    targets: int32 [num_tokens], the target token at each node. Negative if the node's logits are not finite.
    features: [num_tokens, width], the features of the frame's tokens, as the stages add them up for the draft
        head (`Frame.fused`). None if no drafter reads features.
    """

    epoch: int
    trees: tuple[TreeSegment, ...]
    targets: Payload
    features: Payload | None


class DeviceTrees(Protocol):
    """Draft trees on the GPU that the host has not read.

    nodes: number of nodes of each tree, its root included; all trees have equally many.
    confirmed: True once the drafter has read these trees and its drafts consist of them.
    """

    @property
    def nodes(self) -> int:
        """Number of nodes of each tree, its root included."""
        ...

    @property
    def confirmed(self) -> bool:
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


class DraftHandle(Protocol):
    """The drafts that follow one verified frame. Call `result` once, or drop the handle."""

    @property
    def state(self) -> OverlapState:
        """LAUNCHED while trees grow that follow from the verification on the GPU; IDLE if none do; DISCARDED
        if the host has found another verification result.
        """
        ...

    def select(self, segments: Sequence[TreeSegment]) -> DeviceTrees | None:
        """Return the trees that grow, so that the next step can be launched with them before the host has
        read them. `result` will return exactly these trees, if the step is launched; except that a sequence's
        first tree will be its root only.

        Returns None if it is unknown which trees `result` will return.

        segments: the next segments of all sequences that continue, with trees that are only roots.
        """
        ...

    def result(
        self, features: Sequence[Features], meanwhile: Callable[[], None]
    ) -> tuple[Drafts, ...] | None:
        """Take in features, propose trees, and return the messages for stage 0.

        Returns None if the drafter takes no features in this way now, so that they must be sent as messages.

        features: the messages with the host's verification result, in order.
        meanwhile: called once while the GPU may be computing.
        """
        ...

    def discard(self, sequence: int) -> None:
        """Declare that the host has found other target tokens for a sequence than the GPU. The trees that
        grow are not used: `result` grows all of them again.

        sequence: id of the sequence whose target tokens differ.
        """
        ...


@runtime_checkable
class ColocatedDrafter(Protocol):
    """A drafter that runs in the process and on the compute thread of the stage that verifies."""

    def start_drafts(self, verification: DeviceVerification | None = None) -> DraftHandle | None:
        """Start the drafts that follow one frame, and return their handle.

        Returns None if the drafter takes no features in this way now.

        verification: the verification result on the GPU, which the host has not read yet. Trees start to grow
            from it if possible. None: nothing grows before `DraftHandle.result`.
        """
        ...
