"""Trees that a device chooses are those that the host would choose, and the step is launched with them."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from specsot.core.tree import shape_of
from specsot_drafter.core.selection import (
    Candidates,
    Floats,
    best_each,
    build_trees,
    depth_masses,
)
from specsot_drafter.overlap.device_growth import DeviceGrowth
from specsot_drafter.overlap.device_selection import MAX_CHOSEN_NODES, DeviceChoice, GrownPool, TreeChooser
from specsot_kernels.growing import CandidatePool

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 90


def grown(seed: int, trees: int, k: int, levels: int) -> Candidates:
    """As EAGLE-2 grows; coarse scores, so that some are equal."""
    rng = np.random.default_rng(seed)
    tokens, scores, parents, depths = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), list[int]()
    fed, above, first = np.zeros((trees, 1), np.int64), np.zeros((trees, 1)), 1
    for level in range(levels):
        own = above[:, :, None] - rng.integers(0, 4, (trees, fed.shape[1], k)) / 4
        parents.append(np.repeat(fed, k, 1))
        scores.append(own.reshape(trees, -1))
        tokens.append(rng.integers(0, VOCABULARY + 3, scores[-1].shape))
        depths += [level + 1] * scores[-1].shape[1]
        best = np.argsort(-scores[-1], 1, kind="stable")[:, :k]
        fed, above = first + best, np.take_along_axis(scores[-1], best, 1)
        first += scores[-1].shape[1]
    arrays = (np.concatenate(part, 1) for part in (tokens, scores, parents))
    return Candidates(*arrays, np.array(depths))


def on_device(candidates: Candidates, chooser: TreeChooser) -> GrownPool:
    tokens, parents = (torch.from_numpy(part).to(DEVICE) for part in (candidates.tokens, candidates.parents))
    scores = torch.from_numpy(candidates.scores).to(DEVICE, torch.float32)
    depths = torch.from_numpy(candidates.depths).to(DEVICE, torch.int32)
    return GrownPool(CandidatePool(tokens, scores, parents), depths, candidates.levels, chooser)


@pytest.mark.parametrize(
    ("seed", "k", "levels", "nodes"),
    [(0, 1, 4, 5), (1, 3, 4, 9), (2, 4, 3, 34), pytest.param(3, 8, 4, 64, marks=pytest.mark.full)],
)
def test_a_device_chooses_what_the_host_would(seed: int, k: int, levels: int, nodes: int) -> None:
    """Numbers, tokens, positions, and which rows each one sees; of some of the trees, in another order."""
    trees, places = 3, (2, 0)
    candidates = grown(seed, trees, k, levels)
    chooser = TreeChooser(trees, candidates.tokens.shape[1], levels, torch.device(DEVICE))
    trust: Floats = -np.sort(np.random.default_rng(seed).integers(0, 3, levels) / 4)
    early = DeviceGrowth.launched({7: (2, 1), 8: (1, 1), 9: (0, 1)}, 2, lambda: pytest.fail("nobody reads"),
                        on_device(candidates, chooser))  # fmt: skip
    chosen = early.choose((7, 9), nodes, levels, trust)
    assert isinstance(chosen, DeviceChoice)
    assert chosen.nodes == nodes
    rows, roots = len(places) * nodes, (5, 6)
    tokens, positions = (torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    bits = torch.zeros((rows + 1, 3), dtype=torch.int32, device=DEVICE)
    tokens[:rows:nodes] = torch.tensor(roots)
    positions[:rows:nodes] = torch.tensor((11, 40))
    bits[:rows:nodes, 0] = 1
    chosen.choose(tokens, positions, bits, VOCABULARY)

    parts = candidates.tokens, candidates.scores, candidates.parents
    own = Candidates(*(part[list(places)] for part in parts), candidates.depths)
    flags = best_each(own.scores + trust[own.depths - 1], nodes - 1)
    wanted = build_trees(own, roots, flags)
    found = chosen.take()
    assert found is not None
    assert found.nodes == [[list(tree.tokens[1:]), list(tree.parents[1:])] for tree in wanted]
    assert np.allclose(found.masses, depth_masses(own, flags))
    told = 0
    for tree, base in zip(wanted, (11, 40)):
        shape = shape_of(tree.parents)
        here = slice(told, told + nodes)
        assert tokens[here].tolist() == [min(token, VOCABULARY - 1) for token in tree.tokens]
        assert positions[here].tolist() == [base + depth for depth in shape.depths]
        words = bits[here].cpu().numpy().view(np.uint32).astype(object)
        assert [int(low) | int(high) << 32 for low, high, _ in words] == list(shape.ancestry)
        told += nodes
    assert tokens[rows] == positions[rows] == 0, "what is behind the trees stays"
    assert not bits[:, 2].any()


def test_what_a_device_may_not_choose() -> None:
    """Of texts that did not grow; of trees that would be too deep for one; where nothing is said of them."""
    candidates = grown(0, 1, 2, 3)
    chooser = TreeChooser(1, candidates.tokens.shape[1], 3, torch.device(DEVICE))
    pool, trust = on_device(candidates, chooser), np.zeros(3)

    def early(pool: GrownPool | None) -> DeviceGrowth:
        return DeviceGrowth.launched({7: (0, 1)}, 2, lambda: pytest.fail("nobody reads"), pool)

    assert early(pool).choose((7,), 5, 3, trust)
    assert early(pool).choose((7, 8), 5, 3, trust) is None
    assert early(pool).choose((7,), 5, 2, trust) is None
    assert early(pool).choose((7,), 1, 3, trust) is None
    assert early(None).choose((7,), 5, 3, trust) is None
    most = early(pool).choose((7,), 1000, 3, trust)
    assert most
    assert most.nodes == 1 + candidates.tokens.shape[1] < MAX_CHOSEN_NODES
