"""EAGLE's generation over plain models, as its reference does it, everything recomputed every time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from tests.vectors.plain import (
    Base,
    Head,
    causal,
    features,
    head_logits,
    recorded_states,
    run_base,
    run_head,
    target_ids,
)


@dataclass(frozen=True)
class Setting:
    total_token: int
    depth: int
    top_k: int


@dataclass
class Candidate:
    """A node of the pool. parent: number in the pool, None below the root. rows: head rows of itself and its
    ancestors, once fed."""

    token: int
    score: float
    parent: int | None
    depth: int
    feature: Tensor
    rows: tuple[int, ...] = ()


@dataclass
class Grown:
    """A tree of the reference, its nodes in its order, and the frontier of every step."""

    tokens: list[int]
    parents: list[int]
    depth: list[int]
    rank_gap: float
    select_gap: float
    steps: list[dict[str, Tensor]] = field(default_factory=list)


def best(scores: list[float], k: int) -> tuple[list[int], float]:
    """Numbers of the k largest, largest first, and the smallest difference that decided it."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    ranked = [scores[i] for i in order[: k + 1]]
    return order[:k], min((a - b for a, b in pairwise(ranked)), default=1.0)


class Drafter:
    """A head behind one text: tokens so far (root included), true features of all but the root."""

    def __init__(self, base: Base, head: Head, tokens: list[int], given: Tensor) -> None:
        self.base, self.head, self.given, self.n = base, head, given, len(tokens) - 1
        self.fed, self.target = tokens[1:], target_ids(head)
        self.gap = 1.0

    def pass_over(self, extra: list[Candidate]) -> Tensor:
        """Outputs of all true rows and of drafted rows behind them."""
        tokens = self.fed + [one.token for one in extra]
        given = torch.cat([self.given, *(one.feature[None] for one in extra)])
        positions = torch.tensor([*range(self.n), *(self.n - 1 + one.depth for one in extra)])
        seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        seen[: self.n, : self.n] = causal(self.n)
        for row, one in enumerate(extra, start=self.n):
            seen[row, : self.n] = True
            seen[row, list(one.rows)] = True
        return run_head(self.head, self.base, tokens, given, positions, seen)

    def followers(
        self, output: Tensor, above: Candidate | None, number: int | None, k: int
    ) -> list[Candidate]:
        chances = head_logits(self.head, self.base, output[None])[0].log_softmax(-1).tolist()
        chosen, gap = best(chances, k)
        self.gap = min(self.gap, gap)
        score, depth = (above.score, above.depth) if above else (0.0, 0)
        return [Candidate(self.target(i), score + chances[i], number, depth + 1, output) for i in chosen]

    def grow(self, root: int, setting: Setting) -> Grown:
        k, steps = setting.top_k, []
        pool = self.followers(self.pass_over([])[-1], None, None, k)
        frontier, fed = list(range(k)), list[Candidate]()
        for _ in range(setting.depth):
            ours = [pool[number] for number in frontier]
            for one in ours:
                above = pool[one.parent].rows if one.parent is not None else ()
                one.rows = (*above, self.n + len(fed))
                fed.append(one)
            outputs = self.pass_over(fed)[-k:]
            steps.append(
                {
                    "input_ids": torch.tensor([one.token for one in ours]),
                    "position_ids": torch.tensor([self.n - 1 + one.depth for one in ours]),
                    "hidden_in": torch.stack([one.feature for one in ours]),
                    "hidden": outputs.clone(),
                }
            )
            first = len(pool)
            for number, output in zip(frontier, outputs):
                pool += self.followers(output, pool[number], number, k)
            chosen, gap = best([one.score for one in pool[first:]], k)
            self.gap = min(self.gap, gap)
            frontier = [first + number for number in chosen]
        chosen, _ = best([one.score for one in pool], setting.total_token - 1)
        left = sorted((one.score for one in pool), reverse=True)[
            setting.total_token - 2 : setting.total_token
        ]
        picked = sorted(chosen)
        numbers = {None: 0} | {number: node for node, number in enumerate(picked, start=1)}
        return Grown(
            [root, *(pool[number].token for number in picked)],
            [-1, *(numbers[pool[number].parent] for number in picked)],
            [0, *(pool[number].depth for number in picked)],
            self.gap,
            left[0] - left[1] if len(left) == 2 else 1.0,
            steps,
        )


def leaf_rows(tree: Grown, sampling: bool) -> list[list[int]]:
    """retrieve_indices, padded with -1."""
    rows = []
    for node in range(len(tree.tokens)):
        if node not in tree.parents:
            row = [node]
            while row[0]:
                row.insert(0, tree.parents[row[0]])
            rows.append(row)
    longest = max(len(row) for row in rows)
    rows = [row + [-1] * (longest - len(row)) for row in rows]
    return sorted(rows, key=lambda row: [n if n >= 0 else 10**6 for n in row]) if sampling else rows


def verify(base: Base, text: list[int], tree: Grown) -> Tensor:
    """Logits at the nodes of a tree behind a text; a node sees the text, its ancestors and itself."""
    n, nodes = len(text), len(tree.tokens)
    seen = causal(n + nodes)
    seen[n:, n:] = False
    for node in range(nodes):
        walk = node
        while walk >= 0:
            seen[n + node, n + walk] = True
            walk = tree.parents[walk]
    positions = torch.tensor([*range(n), *(n + depth for depth in tree.depth)])
    return run_base(base, text + tree.tokens, positions, seen)[2][n:]


def states_of(base: Base, head: Head, text: list[int]) -> Tensor:
    return recorded_states(base, head, text, torch.arange(len(text)), causal(len(text)))


def next_logits(base: Base, text: list[int]) -> Tensor:
    """The same texts are read when prompts are chosen, when a head is trained, and when it is recorded."""
    if (known := base.known.get(tuple(text))) is None:
        known = run_base(base, text, torch.arange(len(text)), causal(len(text)))[2][-1]
        base.known[tuple(text)] = known
    return known


def plain_greedy(base: Base, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Greedy text, and the smallest gap between its best two logits."""
    text, gap = list(prompt), float("inf")
    for _ in range(count):
        top = next_logits(base, text).topk(2)
        gap = min(gap, float(top.values[0] - top.values[1]))
        text.append(int(top.indices[0]))
    return text[len(prompt) :], gap


@dataclass
class Round:
    """One round. path: accepted node numbers, root first; left: what the bonus is drawn from."""

    text: list[int]
    tree: Grown
    rows: list[list[int]]
    path: list[int]
    best: int
    bonus: int
    logits: Tensor
    uniforms: list[float] = field(default_factory=list)
    left: Tensor | None = None


def propose(base: Base, head: Head, text: list[int], root: int, setting: Setting) -> Grown:
    given = features(head, states_of(base, head, text))
    return Drafter(base, head, [*text, root], given).grow(root, setting)


def greedy_round(base: Base, head: Head, text: list[int], root: int, setting: Setting) -> Round:
    """The row that agrees longest with the argmax at its own nodes."""
    tree = propose(base, head, text, root, setting)
    logits, rows = verify(base, text, tree), leaf_rows(tree, sampling=False)
    wanted, lengths = logits.argmax(-1).tolist(), []
    for row in rows:
        length = 0
        while length + 1 < len(row) and row[length + 1] >= 0:
            if tree.tokens[row[length + 1]] != wanted[row[length]]:
                break
            length += 1
        lengths.append(length)
    chosen = lengths.index(max(lengths))
    path = rows[chosen][: max(lengths) + 1]
    return Round(text, tree, rows, path, chosen, wanted[path[-1]], logits)


def warp(logits: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Temperature, top-p, top-k, over one row."""
    logits = logits / temperature
    if top_p < 1:
        order = logits.sort()
        gone = order.indices[order.values.softmax(-1).cumsum(-1) <= 1 - top_p]
        logits = logits.index_fill(0, gone[gone != logits.argmax()], -torch.inf)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return logits.softmax(-1)


def sampled_round(
    base: Base, head: Head, text: list[int], root: int, setting: Setting, wish: dict, dice: random.Random
) -> Round:
    """Children are tried in row order; a rejected one's probability is taken away."""
    tree = propose(base, head, text, root, setting)
    logits, rows = verify(base, text, tree), leaf_rows(tree, sampling=True)
    wished = (wish["temperature"], wish.get("top_p", 1.0), wish.get("top_k", 0))
    path, chosen, uniforms = [0], 0, list[float]()
    while True:
        left, taken = warp(logits[path[-1]], *wished), None
        tried: set[int] = set()
        for number, row in enumerate(rows):
            if row[: len(path)] != path or len(row) == len(path) or row[len(path)] in {-1, *tried}:
                continue
            child = row[len(path)]
            tried.add(child)
            uniforms.append(dice.random())
            if uniforms[-1] <= left[tree.tokens[child]]:
                taken, chosen = child, number
                break
            left = left.index_fill(0, torch.tensor([tree.tokens[child]]), 0.0)
            left = left / left.sum()
        if taken is None:
            break
        path.append(taken)
    bonus = dice.choices(range(len(left)), left.tolist())[0]
    return Round(text, tree, rows, path, chosen, bonus, logits, uniforms, left)
