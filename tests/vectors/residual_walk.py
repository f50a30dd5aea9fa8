"""Rejection sampling over a draft tree as in EAGLE's reference, to check recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specsot.core.tree import Tree
from tests.trees import path

Floats = NDArray[np.floating[Any]]
Rows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """Where a residual walk ended.

    accepted: node numbers, root first.
    final:    [V] distribution from which the bonus token is drawn.
    drawn:    how many uniforms were used.
    """

    accepted: tuple[int, ...]
    final: Floats
    drawn: int


def leaf_rows(tree: Tree) -> list[tuple[int, ...]]:
    """Every path from the root to a leaf as node numbers, by leaf number (`retrieve_indices`, unpadded)."""
    inner = set(tree.parents)
    return [path(tree.parents, node) for node in range(len(tree)) if node not in inner or len(tree) == 1]


def trial_rows(tree: Tree) -> list[tuple[int, ...]]:
    """The same in the order in which children are tried: smaller nodes first, ends last."""
    return sorted(leaf_rows(tree), key=lambda row: (*row, len(tree)))


def warp(logits: ArrayLike, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Floats:
    """[.., V] logits to probabilities, in the reference's order: temperature, top-p, top-k.

    temperature > 0; top_p 1 and top_k 0 mean no cut. Tokens that tie with the k-th stay.
    """
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    if 0 < top_p < 1:
        scaled = _within_mass(scaled, top_p)
    if 0 < top_k < scaled.shape[-1]:
        least = np.partition(scaled, -top_k, axis=-1)[..., -top_k, None]
        scaled = np.where(scaled < least, -np.inf, scaled)
    return _softmax(scaled)


def residual_walk(tree: Tree, rows: Rows, targets: ArrayLike, uniforms: Sequence[float]) -> Walk:
    """The sampling case of EAGLE's `evaluate_posterior`.

    A child x is accepted when its uniform is at most p(x). When it is not, p(x) becomes 0, p is scaled
    back to 1, and the next sibling is tried.

    rows:     leaf paths as node numbers, root first; children are tried in the order of these rows.
    targets:  [nodes, V] target distribution at each node.
    uniforms: one number in [0, 1) per child tried. Too few of them is a ValueError.
    """
    chances, accepted, drawn = np.asarray(targets), [0], 0
    while True:
        left, taken = chances[accepted[-1]], None
        for child in _next_nodes(rows, accepted):
            if drawn == len(uniforms):
                raise ValueError("fewer uniforms than children tried")
            drawn += 1
            if uniforms[drawn - 1] <= left[tree.tokens[child]]:
                taken = child
                break
            left = _without(left, tree.tokens[child])
        if taken is None:
            return Walk(tuple(accepted), left, drawn)
        accepted.append(taken)


def _next_nodes(rows: Rows, accepted: Sequence[int]) -> tuple[int, ...]:
    """Children of the last accepted node, in row order, each once."""
    depth = len(accepted)
    begun = (row for row in rows if len(row) > depth and list(row[:depth]) == list(accepted))
    return tuple(dict.fromkeys(row[depth] for row in begun))


def _without(chances: Floats, token: int) -> Floats:
    """Zero one token and renormalise; all zeros stay zeros."""
    left = chances.copy()
    left[token] = 0.0
    total = left.sum()
    return left / total if total > 0 else left


def _within_mass(scaled: Floats, top_p: float) -> Floats:
    """Without the least likely tokens whose mass together is at most 1 - top_p; the likeliest stays."""
    order = scaled.argsort(axis=-1, kind="stable")
    gone = _softmax(np.take_along_axis(scaled, order, -1)).cumsum(-1) <= 1 - top_p
    gone[..., -1] = False
    cut = np.zeros_like(gone)
    np.put_along_axis(cut, order, gone, -1)
    return np.where(cut, -np.inf, scaled)


def _softmax(scaled: Floats) -> Floats:
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
