"""`specsot bench kernels`: the trees that it draws. What it measures needs a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from specsot_kernels import build_tree_structure, organize_draft_results

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot_lab.bench.kernels import BATCH, SHAPES, random_drafts


@pytest.mark.parametrize(("k", "steps", "nodes"), SHAPES)
def test_every_node_of_a_drawn_tree_hangs_on_a_node_of_it(k: int, steps: int, nodes: int) -> None:
    """SGLang's kernel prints a warning for each that does not, and makes it nobody's child."""
    lists, roots, lengths = random_drafts(k, steps)
    chosen = organize_draft_results(*lists, nodes)
    tree = build_tree_structure(roots, *chosen, lengths, k, steps, nodes)
    children = np.concatenate((tree.retrieve_next_token, tree.retrieve_next_sibling), axis=1)
    for b in range(BATCH):
        assert sorted(children[b][children[b] >= 0]) == [*range(1, nodes)], "a child, or a child's sibling"
    depths = tree.positions.reshape(BATCH, nodes) - lengths[:, None]
    assert depths.max() == steps, "as deep as was drafted, in one tree at least"
