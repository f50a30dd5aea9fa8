"""Selection against brute force: the best ancestor-closed sets, and trees that say what they should."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from specsot.core.tree import Tree, chain, single
from specsot_drafter.core.selection import (
    Candidates,
    acceptance_chances,
    best_each,
    best_overall,
    build_trees,
    depth_masses,
    falling,
    graft,
    keep_best,
    limit_depths,
    merge_trees,
    pad_rows,
)
from tests.conftest import seeds
from tests.trees import path


def random_offer(rng: random.Random, trees: int, top_k: int = 2, expansions: int = 2) -> Candidates:
    """An offer in growth order: k, then k * k more for the k best of each level."""
    columns = [_random_tree(rng, top_k, expansions) for _ in range(trees)]
    depths = [1] * top_k + [d + 2 for d in range(expansions) for _ in range(top_k * top_k)]
    tokens, scores, parents = (np.array([column[i] for column in columns]) for i in range(3))
    return Candidates(tokens, scores, parents, np.array(depths))


def _random_tree(rng: random.Random, k: int, expansions: int) -> tuple[list[int], list[float], list[int]]:
    scores = sorted((-rng.expovariate(1) for _ in range(k)), reverse=True)
    parents, frontier = [0] * k, list(range(k))
    for _ in range(expansions):
        first = len(scores)
        for node in frontier:
            scores += sorted((scores[node] - rng.expovariate(1) for _ in range(k)), reverse=True)
            parents += [node + 1] * k
        frontier = sorted(range(first, len(scores)), key=lambda i: -scores[i])[:k]
    return [rng.randrange(100, 10**6) for _ in scores], scores, parents


def closed(offer: Candidates, row: int, chosen: frozenset[int]) -> bool:
    return all(offer.parents[row, node] == 0 or offer.parents[row, node] - 1 in chosen for node in chosen)


@pytest.mark.parametrize("seed", seeds(6, quick=3))
def test_the_budget_goes_to_the_best_closed_set(seed: int) -> None:
    """No ancestor-closed set of the same size, over all trees together, is worth more."""
    rng = random.Random(seed)
    offer = random_offer(rng, trees=2, expansions=1)
    values = acceptance_chances(offer, np.array([0.9, 0.7]))
    nodes = [(row, node) for row in range(2) for node in range(values.shape[1])]
    for count in range(1, 6):
        best = max(
            sum(values[row, node] for row, node in chosen)
            for chosen in itertools.combinations(nodes, count)
            if all(closed(offer, row, frozenset(n for r, n in chosen if r == row)) for row in range(2))
        )
        flags = best_overall(values, count)
        assert flags.sum() == count
        assert values[flags].sum() == pytest.approx(best)
        assert all(closed(offer, row, frozenset(np.flatnonzero(flags[row]).tolist())) for row in range(2))


def test_no_tree_gets_more_than_its_room() -> None:
    values = np.array([[0.9, 0.8, 0.7], [0.3, 0.2, 0.1]])
    flags = best_overall(keep_best(values, 2), 4)
    assert flags.tolist() == [[True, True, False], [True, True, False]]
    assert falling(keep_best(values, 2)).tolist() == [0.9, 0.8, 0.3, 0.2]


def test_equals_keep_ancestors_first() -> None:
    """A certain child is worth as much as its parent, which still comes first."""
    offer = Candidates(np.array([[1, 2, 3]]), np.zeros((1, 3)), np.array([[0, 1, 2]]), np.array([1, 2, 3]))
    for count in range(4):
        assert best_each(offer.scores, count).tolist() == [[node < count for node in range(3)]]


def test_the_best_are_those_that_a_stable_sort_puts_first() -> None:
    dice = np.random.default_rng(5)
    for count in range(12):
        values = dice.integers(-3, 3, (4, 9)).astype(float)
        values[values == -3] = -np.inf
        first = [sorted(range(9), key=lambda node: -row[node])[:count] for row in values]
        wanted = [
            [node in some and bool(np.isfinite(row[node])) for node in range(9)]
            for some, row in zip(first, values)
        ]
        assert best_each(values, count).tolist() == wanted


def test_trees_repeat_the_paths_of_the_offer() -> None:
    rng = random.Random(3)
    offer = random_offer(rng, trees=3)
    flags = best_overall(acceptance_chances(offer, np.ones(3)), 15)
    for row, tree in enumerate(build_trees(offer, [11, 12, 13], flags)):
        assert tree.tokens[0] == 11 + row
        wanted = {offer_path(offer, row, node) for node in np.flatnonzero(flags[row]).tolist()}
        found = {tuple(tree.tokens[i] for i in path(tree.parents, node)[1:]) for node in range(1, len(tree))}
        assert found == wanted


def offer_path(offer: Candidates, row: int, node: int) -> tuple[int, ...]:
    tokens: list[int] = []
    while node >= 0:
        tokens.append(int(offer.tokens[row, node]))
        node = int(offer.parents[row, node]) - 1
    return tuple(reversed(tokens))


def test_depths_beyond_a_tree_s_limit_are_never_chosen() -> None:
    offer = limit_depths(random_offer(random.Random(5), trees=2), [1, 3])
    flags = best_each(offer.scores, 99)
    assert offer.depths[flags[0]].max() == 1
    assert offer.depths[flags[1]].max() == 3
    values = acceptance_chances(offer, np.ones(3))
    assert best_overall(values, 999).sum() == len(falling(values)) == flags.sum()


def test_masses_add_up_per_depth() -> None:
    offer = Candidates(
        np.array([[1, 2, 3]]), np.log([[0.5, 0.25, 0.125]]), np.array([[0, 0, 1]]), np.array([1, 1, 2])
    )
    assert depth_masses(offer, np.array([[True, True, True]])).tolist() == [pytest.approx([0.75, 0.125])]
    assert depth_masses(offer, np.array([[True, False, False]])).tolist() == [pytest.approx([0.5, 0.0])]


@pytest.mark.parametrize(
    ("tree", "tokens", "grafted"),
    [
        (single(1), (), single(1)),
        (single(1), (2, 3), chain((1, 2, 3))),
        (chain((1, 2)), (2, 3), chain((1, 2, 3))),
        (chain((1, 2)), (3, 4), Tree((1, 2, 3, 4), (0, 0, 0, 2))),
        (Tree((1, 2, 3), (0, 0, 0)), (3, 5), Tree((1, 2, 3, 5), (0, 0, 0, 2))),
    ],
)
def test_a_chain_is_grafted_along_what_is_there(tree: Tree, tokens: tuple[int, ...], grafted: Tree) -> None:
    assert graft(tree, tokens) == grafted


def worths_by_path(offer: Candidates, values: np.ndarray, row: int) -> dict[tuple[int, ...], float]:
    """What every path of tokens is worth; of two ways to write the same, the better one."""
    known: list[tuple[int, ...]] = [()]
    found: dict[tuple[int, ...], float] = {}
    for token, parent, value in zip(offer.tokens[row], offer.parents[row], values[row]):
        known.append((*known[parent], int(token)))
        if np.isfinite(value):
            found[known[-1]] = max(float(value), found.get(known[-1], -np.inf))
    return found


@pytest.mark.parametrize("seed", seeds(30, quick=8))
def test_a_joined_offer_holds_every_path_of_both_at_its_better_worth(seed: int) -> None:
    rng = random.Random(seed)
    offer = random_offer(rng, trees=2)
    values = np.exp(offer.scores)
    chains = np.zeros((2, 4), np.int64)
    worths = np.full((2, 4), -np.inf)
    wanted = [worths_by_path(offer, values, row) for row in range(2)]
    for row in range(2):
        known = max(wanted[row], key=len) if rng.random() < 0.7 else ()
        shared = known[: rng.randrange(len(known) + 1)]
        tokens = [*shared, *(rng.randrange(200, 300) for _ in range(4))][: rng.randrange(0, 5)]
        chances = sorted((rng.random() for _ in tokens), reverse=True)
        chains[row, : len(tokens)], worths[row, : len(tokens)] = tokens, chances
        for depth, chance in enumerate(chances):
            path_ = tuple(tokens[: depth + 1])
            wanted[row][path_] = max(wanted[row].get(path_, -np.inf), chance)
    line = Candidates(
        chains, np.log(np.maximum(worths, 1e-9)), np.tile(np.arange(4), (2, 1)), np.arange(1, 5)
    )
    joined, joint = merge_trees(offer, values, line, worths)
    for row in range(2):
        found = worths_by_path(joined, joint, row)
        assert found.keys() == wanted[row].keys()
        assert all(abs(found[one] - wanted[row][one]) < 1e-12 for one in found)
        depth = {one: len(one) for one in found}
        assert max(depth.values(), default=0) <= joined.levels
    for count in (1, 3, 6, 12):
        chosen = best_overall(joint, count)
        for tree in build_trees(joined, [1, 2], chosen):
            assert len(
                {tuple(tree.tokens[i] for i in path(tree.parents, n)) for n in range(len(tree))}
            ) == len(tree)


def test_an_offer_for_all_leaves_the_absent_without_candidates() -> None:
    offer = random_offer(random.Random(3), trees=2)
    whole = pad_rows(offer, [True, False, True])
    assert len(whole) == 3
    assert np.array_equal(whole.tokens[[0, 2]], offer.tokens)
    assert not np.isfinite(whole.scores[1]).any()
    assert pad_rows(offer, [True, True]) is offer
