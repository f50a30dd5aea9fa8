"""Sampling over trees: the walk by plain counting, the exact distribution, and the walk of many coins."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from specsot.core.tree import Tree
from specsot_kernels import build_tree_structure, organize_draft_results, tree_speculative_sampling
from specsot_kernels.errors import InvalidArguments
from tests.kernels.drafting import VOCABULARY, Node, draft, lists_of, tree_of
from tests.kernels.test_trees import NEEDS_CUDA, check_found
from tests.vectors.residual_walk import residual_walk, trial_rows


class Scene:
    """A batch of random trees, target chances that favour their nodes, and coins."""

    def __init__(self, seed: int, k: int, steps: int, nodes: int, batch: int = 3) -> None:
        rng = random.Random(seed)
        self.steps, draftings = steps, [draft(rng, k, steps) for _ in range(batch)]
        self.trees = [tree_of(one, nodes) for one in draftings]
        chosen = organize_draft_results(*lists_of(draftings), nodes)
        roots, lengths = np.array([tree[0].token for tree in self.trees]), np.full(batch, 9)
        self.arrays = build_tree_structure(roots, *chosen, lengths, k, steps, nodes, 1)
        self.chances = np.array([[_chances(rng, node) for node in tree] for tree in self.trees])
        self.coins = np.array([[rng.random() for _ in tree] for tree in self.trees])
        self.last = np.array([rng.random() for _ in self.trees])

    @property
    def given(self) -> list[np.ndarray]:
        tokens = self.arrays.draft_tokens.reshape(self.coins.shape)
        return [tokens, *self.arrays[2:5], self.coins, self.last, self.chances]

    def run(self, **more: Any) -> Any:
        return tree_speculative_sampling(*self.given, **({"num_steps": self.steps} | more))


def _chances(rng: random.Random, node: Node) -> np.ndarray:
    weights = np.array([rng.random() ** 4 for _ in range(VOCABULARY)])
    for child in node.children:
        weights[child.token] += 8 * rng.random()
    return weights / weights.sum()


def counted_walk(
    tree: list[Node], chances: np.ndarray, coins: np.ndarray, steps: int, single: float, acc: float
) -> tuple[list[int], np.ndarray]:
    """The accepted nodes, and what is left of the last one's chances."""
    walk, spent = [0], np.zeros(VOCABULARY)
    while len(walk) <= steps:
        here, mass, taken = walk[-1], 0.0, None
        spent = np.zeros(VOCABULARY)
        for child in tree[here].children:
            mass += chances[here, child.token]
            if coins[here] <= (mass / acc if acc else np.inf) or chances[here, child.token] >= single:
                taken = child
                break
            spent[child.token] = chances[here, child.token]
        if taken is None:
            break
        walk.append(next(i for i, node in enumerate(tree) if node is taken))
        spent = np.zeros(VOCABULARY)
    return walk, np.maximum(chances[walk[-1]] - spent, 0)


@pytest.mark.parametrize(("single", "acc"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize(("k", "steps", "nodes"), [(1, 4, 5), (2, 3, 9), (4, 3, 16), (5, 6, 60)])
def test_walks_are_those_of_linked_nodes(single: float, acc: float, k: int, steps: int, nodes: int) -> None:
    depths: set[int] = set()
    for seed in range(12):
        scene = Scene(seed, k, steps, nodes)
        limit = steps - seed % 2
        found = scene.run(threshold_single=single, threshold_acc=acc, num_steps=limit)
        walks, bonus = [], []
        for tree, chances, coins, last in zip(scene.trees, scene.chances, scene.coins, scene.last):
            walk, left = counted_walk(tree, chances, coins, limit, single, acc)
            sums = np.cumsum(left)
            walks.append(walk)
            bonus.append(int(np.argmax(sums > last * sums[-1])))
        check_found(found, scene.trees, walks, bonus, limit)
        depths |= {len(walk) for walk in walks}
    assert len(depths) > 1, "walks of several depths"


def test_one_coin_a_node_is_the_walk_of_a_coin_a_child() -> None:
    """The one coin u as coins of the children: child i is reached with mass m before it, and its own coin
    is (u - m) / (1 - m). Then accepted nodes and what is left agree with the reference's walk.
    """
    for seed in range(30):
        scene = Scene(seed, 4, 3, 16, batch=1)
        (tree,), (chances,), (coins,) = scene.trees, scene.chances, scene.coins
        numbers = {id(node): i for i, node in enumerate(tree)}
        value = Tree(
            tuple(node.token for node in tree),
            tuple(numbers[id(node.parent)] if node.parent else 0 for node in tree),
        )
        uniforms: list[float] = []
        walk, left = counted_walk(tree, chances, coins, 3, 1.0, 1.0)
        for node in walk:
            mass = 0.0
            for child in tree[node].children:
                uniforms.append((coins[node] - mass) / (1 - mass))
                mass += chances[node, child.token]
                if numbers[id(child)] in walk:
                    break
        many = residual_walk(value, trial_rows(value), chances, uniforms)
        found = scene.run()
        assert found.accept_index[0, : len(many.accepted)].tolist() == list(many.accepted)
        assert int(found.accept_token_num[0]) == len(many.accepted) - 1
        np.testing.assert_allclose(many.final, left / left.sum(), atol=1e-12)


def test_every_token_comes_with_the_targets_probability() -> None:
    """First and second new token of many walks over one tree; chi-square, p = 1e-5."""
    rounds, rng = 15_000, np.random.default_rng(5)
    scene = Scene(3, 3, 2, 7, batch=1)
    nodes = len(scene.trees[0])
    root = scene.chances[0][0]
    given = (scene.arrays.draft_tokens.reshape(1, nodes), *scene.arrays[2:5])
    tokens, _, first, following = (np.repeat(each, rounds, axis=0) for each in given)
    arrays = (
        tokens,
        np.arange(rounds * nodes).reshape(rounds, nodes),
        first,
        following,
        rng.random((rounds, nodes)),
        rng.random(rounds),
        np.broadcast_to(scene.chances, (rounds, nodes, VOCABULARY)).copy(),
    )
    found = tree_speculative_sampling(*arrays, num_steps=2)
    predicts, index = found.predicts, found.accept_index
    seen = Counter(predicts[index[:, 0]].tolist())
    distance = sum((seen[t] - rounds * p) ** 2 / (rounds * p) for t, p in enumerate(root))
    assert distance < 89.0  # 39 degrees of freedom
    child = int(scene.trees[0][1].token)
    through = index[:, 1] % nodes == 1
    through &= index[:, 1] >= 0
    behind = Counter(predicts[index[through, 1]].tolist())
    below, count = scene.chances[0][1], int(through.sum())
    assert count == pytest.approx(rounds * root[child], rel=0.1)
    distance = sum((behind[t] - count * p) ** 2 / (count * p) for t, p in enumerate(below))
    assert distance < 89.0


def test_draft_probabilities_are_taken_off_and_left_alone() -> None:
    scene = Scene(1, 2, 2, 5, batch=2)
    scene.coins[:] = 1.0 - 1e-12  # nobody is accepted
    scene.last[:] = 0.999999
    draft_probs = scene.chances.copy()
    draft_probs[:, 0, 7] = 0.0
    for tree in scene.trees:
        assert all(child.token != 7 for child in tree[0].children)
    before = draft_probs.copy()
    found = scene.run(draft_probs=draft_probs)
    assert found.accept_token_num.tolist() == [0, 0]
    assert found.predicts.tolist()[:: len(scene.trees[0])] == [7, 7]
    assert (draft_probs == before).all()


def test_a_token_without_probability_is_never_accepted() -> None:
    scene = Scene(2, 2, 2, 5, batch=1)
    refused = scene.trees[0][0].children[0].token
    scene.chances[0, 0, refused] = 0.0
    scene.chances[0, 0] /= scene.chances[0, 0].sum()
    scene.coins[:] = 0.0
    found = scene.run()
    assert found.predicts.tolist()[0] == scene.trees[0][0].children[1].token


def test_when_nothing_is_left_the_target_itself_is_drawn_from() -> None:
    """Rounding may refuse every child although they hold all of the mass."""
    scene = Scene(2, 2, 1, 3, batch=1)
    tokens = [child.token for child in scene.trees[0][0].children]
    scene.chances[0, 0] = 0.0
    scene.chances[0, 0, tokens] = (0.4, 0.6 - 1e-9)
    scene.coins[:] = 1.0 - 1e-12
    found = scene.run(draft_probs=np.zeros_like(scene.chances))
    assert found.accept_token_num.tolist() == [0]
    assert found.predicts.tolist()[0] in tokens


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (dict(threshold_single=1.5), "threshold_single"),
        (dict(threshold_acc=-0.1), "threshold_acc"),
        (dict(num_steps=-1), "num_steps"),
        (dict(draft_probs=np.zeros((1, 5, 3))), "draft_probs"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArguments) as told:
        Scene(2, 2, 2, 5, batch=1).run(**change)
    assert told.value.field == field


def test_half_precision_and_integers_of_any_width_are_taken() -> None:
    scene = Scene(4, 4, 3, 16)
    wanted = scene.run()
    *tree, coins, last, chances = map(torch.from_numpy, scene.given)
    drawn = (coins.float(), last.float(), chances.float())
    found = tree_speculative_sampling(*(each.int() for each in tree), *drawn, num_steps=3)
    assert found.accept_index.tolist() == wanted.accept_index.tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_tensors_give_what_numpy_gives(device: str) -> None:
    scene = Scene(4, 4, 3, 16)
    arrays = [torch.from_numpy(each).to(device) for each in scene.given]
    found, wanted = tree_speculative_sampling(*arrays, num_steps=3), scene.run()
    for ours, theirs in zip(found, wanted):
        assert (ours.device.type, ours.dtype, ours.tolist()) == (device, torch.int32, theirs.tolist())
