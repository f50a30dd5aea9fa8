"""Tree frames that stages reject: those of which several would be in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsot.core.frames import Frame, Opening, ParentNode, PromptChunk, TreeSegment
from specsot.core.pages import PageTable
from specsot.core.tree import chain
from specsot.errors import WireError
from specsot_model.core.kv_plan import plan_frame


@pytest.mark.parametrize(
    "identity",
    [{"parent": ParentNode(1, 2)}, {"scratch": 3}, {"freed": (1,)}],
    ids=["parent", "scratch", "freed"],
)
def test_stages_reject_a_second_tree_frame_in_flight(identity: dict[str, object]) -> None:
    """They would write its nodes over those of the frame that it grows from."""
    table = PageTable(4, 4)
    plan_frame(table, Frame(1, 1, (Opening(1, 2, limit=9),), (PromptChunk(1, 0, (5, 6), True),)))
    tree = TreeSegment(1, 2, 2, (), chain((7, 8)))
    with pytest.raises(WireError, match="draft round 2 of sequence 1 is one of several in flight"):
        plan_frame(table, Frame(1, 2, segments=(replace(tree, **identity),)))  # type: ignore[arg-type]
    assert plan_frame(table, Frame(1, 2, segments=(tree,))).positions == (2, 3)
