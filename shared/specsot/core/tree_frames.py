"""Which tree frames stages run: one of a sequence at a time.

A *tree frame* is one draft round of a sequence on its way through the stages. It is identified by the number
of its draft round. The protocol has room for several tree frames of one sequence in flight, each of which
grows from a node of an earlier one whose result has not arrived:

    verified root --- round 4: a -> (b, c) --- node 2 (c) --- round 5: d -> (e)
                                          \\-- node 1 (b) --- round 6: f

Until a node is accepted, its KV lies in a *scratch slot* of its sequence. Scratch slots are numbered from 0.
A tree frame names the first slot of its nodes, so that no stage has to count:

    round 4, scratch 0: nodes [a b c] in slots [0 1 2]
    round 5, scratch 3: nodes [d e]   in slots [3 4]
    round 6, scratch 5: nodes [f]     in slots [5]

A result would verify one tree frame and name the frames that it drops: those that grew from a node that was
not accepted. Stages do not run such frames: every tree frame grows from the verified root, has its nodes in
the scratch slots from 0 on, and no result drops any frame. A tree may travel in parts instead
(`specsot.core.tree_parts`).
"""

from __future__ import annotations

from specsot.core.frames import TreeSegment
from specsot.errors import WireError


def check_supported(segment: TreeSegment) -> None:
    """Raise WireError for a tree frame that the stages of this version cannot run: one that grows from an
    unverified node, that has its nodes elsewhere than in the scratch slots from 0 on, or that frees the
    scratch slots of rounds by name.

    segment: the tree of one draft round, as it was received.
    """
    if segment.parent is not None or segment.scratch or segment.freed:
        raise WireError(
            f"draft round {segment.draft_round} of sequence {segment.sequence} is one of several in flight; "
            "the stages of this version run 1 tree frame of a sequence at a time"
        )
