"""Target tokens: processors, constraints and draws for the nodes of each sequence's tree.

The target of a node is a function of (logits, seed, ordinal, position): argmax at temperature 0, otherwise
temperature, top-k, top-p, min-p (the order of Hugging Face generate; EAGLE's own code cuts by top-p before
top-k), then its bits, the highest first, each by a counter-based uniform number of its own: rounding shifts
an edge for each bit, where a CDF has one for each token. Ties at an edge of a cut all stay, whatever sorts.

On a GPU one kernel judges all nodes of all trees, and the host waits for it once. On a CPU, and where masks
or penalties differ from node to node, what costs more than an argmax is done along the accepted path alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch

from specsot.core.tree import Tree, children, shape_of
from specsot.params import Sampling
from specsot.values import value
from specsot_worker.core.accept import DecodeState, TreeMasks, draw_key, uniform
from specsot_worker.penalties import apply_penalties

# Tokens among which a nucleus is looked for first, then eight times more; not measured.
NUCLEUS_CANDIDATES = 512
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30  # float32 divides by these; beyond them nothing changes
MIN_WEIGHT = torch.finfo(torch.float32).tiny
Meanwhile = Callable[[torch.Tensor], None]
HAS_KERNEL = find_spec("triton") is not None


@value
class DrawRequest:
    """How one row's token is drawn; `position` is where the drawn token will stand."""

    sampling: Sampling
    seed: int
    ordinal: int
    position: int

    @property
    def key(self) -> int:
        return draw_key(self.seed, self.ordinal, self.position)


ARGMAX = DrawRequest(Sampling(), 0, 0, 0)


def choose_tokens(
    logits: torch.Tensor, requests: Sequence[DrawRequest], meanwhile: Meanwhile | None = None
) -> list[int | None]:
    """Target token of each row of `logits` [rows, V]; None where a row's logits are not numbers.

    requests: one for each row; none at all: every row's argmax. meanwhile: see `find_targets`.
    """
    if logits.is_cuda and HAS_KERNEL:
        from specsot_kernels.gpu.drawing import choose

        return choose(logits, [draw_setting(request) for request in requests], meanwhile)
    chosen = argmax_tokens(logits)
    by_sampling: dict[Sampling, list[int]] = {}
    for row, request in enumerate(requests):
        if request.sampling.temperature > 0 and chosen[row] is not None:
            by_sampling.setdefault(request.sampling, []).append(row)
    for sampling, rows in by_sampling.items():
        picked = logits if len(rows) == len(requests) else logits[rows]
        for row, token in zip(rows, draw_tokens(picked, sampling, [requests[row].key for row in rows])):
            chosen[row] = token
    return chosen


def compile_draws(logits: torch.Tensor) -> None:
    """A GPU's kernels compile when they are called first; that should be no client's call. logits: [1, V]."""
    if logits.is_cuda:
        for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9)):
            choose_tokens(logits, [DrawRequest(sampling, 0, 0, 0)])


def draw_setting(request: DrawRequest) -> tuple[float, float, float, float, float]:
    """As the kernel has it."""
    asked = request.sampling
    if asked.temperature == 0:
        return 0.0, 0.0, 1.0, 0.0, 0.0
    return _temperature(asked), asked.top_k, asked.top_p, asked.min_p, request.key


def _temperature(sampling: Sampling) -> float:
    return min(max(float(sampling.temperature), MIN_TEMPERATURE), MAX_TEMPERATURE)


def argmax_tokens(logits: torch.Tensor) -> list[int | None]:
    """The argmax of each row [rows, V]; None where a row holds NaN, infinity, or nothing but -infinity."""
    if logits.device.type == "cpu":  # NumPy's takes a sixth of the time of PyTorch's; it has no bfloat16
        held = (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy()
        tokens = held.argmax(-1)
        best = held[np.arange(len(held)), tokens].tolist()
        chosen = tokens.tolist()
    else:  # read once: each read awaits the device
        best, chosen = torch.stack([each.double() for each in logits.max(dim=-1)]).tolist()
    return [int(token) if abs(top) < float("inf") else None for top, token in zip(best, chosen)]


def draw_tokens(logits: torch.Tensor, sampling: Sampling, keys: Sequence[int]) -> list[int]:
    """One token for each row [rows, V] by its key. Masked tokens carry -inf. The temperature must be > 0."""
    tokens, weights = sampling_weights(logits, sampling)
    sums = weights.cumsum(-1, dtype=torch.float64).cpu().numpy()
    kept = [range(logits.shape[-1])] * len(keys) if tokens is None else tokens.tolist()
    return [_draw(*each, logits.shape[-1]) for each in zip(keys, kept, sums)]


def _draw(key: int, tokens: Sequence[int], sums: np.ndarray, size: int) -> int:
    """One of `size`, bit by bit, that weighs something. tokens: which may, ascending; sums: of weights."""
    token = 0
    first = 0
    end = len(tokens)
    before = 0.0
    upto = sums.item(-1)
    for bit in reversed(range((size - 1).bit_length())):
        middle = bisect_left(tokens, token + (1 << bit), first, end)
        parted = sums.item(middle - 1) if middle > first else before
        if upto > parted and uniform(key, 1 << bit) * (upto - before) >= parted - before:
            token = token + (1 << bit)
            first = middle
            before = parted
        else:
            end = middle
            upto = parted
    return token


def sampling_weights(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Tokens that may be drawn, ascending, and their weights, both [rows, n]; the weights are what is
    left of a softmax, so they need not sum to 1. Tokens None: the whole vocabulary.
    """
    shifted = logits.float() - logits.amax(-1, keepdim=True)
    weights = shifted.div_(_temperature(sampling)).softmax(-1)
    if not sampling.top_k and sampling.top_p == 1:
        floors = sampling.min_p * weights.amax(-1, keepdim=True)
        return None, weights.masked_fill_(weights < floors, 0) if sampling.min_p else weights
    return _truncated_weights(weights, sampling)


def _truncated_weights(weights: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Look only at the likeliest, and at more of them while tokens that stay may lie beyond."""
    size = weights.shape[-1]
    candidates = 2 * sampling.top_k or NUCLEUS_CANDIDATES
    while True:
        candidates = min(candidates, size)
        values, tokens = weights.topk(candidates)
        floors = _weight_floors(values, sampling)
        if candidates == size or bool((values[:, -1:] < floors).all()):
            break
        candidates *= 8
    tokens, order = tokens.sort(-1)
    values = values.gather(-1, order)
    return tokens, values.masked_fill_(values < floors, 0)


def _weight_floors(values: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The least weight [rows, 1] that stays, as far as these weights [rows, n], descending, can tell."""
    floors = torch.full_like(values[:, :1], MIN_WEIGHT)
    if 0 < sampling.top_k < values.shape[-1]:
        floors = floors.maximum(values[:, sampling.top_k - 1 : sampling.top_k])
    if sampling.top_p < 1:
        sums = values.masked_fill(values < floors, 0).cumsum(-1, dtype=torch.float64)
        whole = sums[:, -1:] if sampling.top_k else 1.0
        before = sums[:, :-1] < sampling.top_p * whole  # what more is wanted behind each
        floors = floors.maximum(values.gather(-1, before.sum(-1, keepdim=True)))
    return floors.maximum(sampling.min_p * values[:, :1])


Targets = list[int | None]


class TargetQuery(NamedTuple):
    """What one segment wants to know.

    row:   of its root in the logits; the other nodes follow. A prompt's last row is a tree of one node.
    position: of the token after the root.
    masks: allowed tokens behind each node, or None where anything goes; none at all: so it does everywhere.
    """

    state: DecodeState
    row: int
    tree: Tree
    position: int
    masks: Sequence[np.ndarray | None]

    @property
    def unmasked(self) -> bool:
        """Anything goes, behind every node."""
        if self.masks and (isinstance(self.masks, TreeMasks) or any(one is not None for one in self.masks)):
            return False
        return not self.state.must_go_on()

    def allows(self, node: int, token: int | None) -> bool:
        """Whether its mask lets a token follow a node."""
        if isinstance(self.masks, TreeMasks):
            return token is not None and self.masks.allows(node, token)
        mask = self.masks[node] if self.masks else None
        return mask is None or (token is not None and bool(mask[token]))

    def draw_requests(self) -> list[DrawRequest]:
        """One for each node."""
        far = shape_of(self.tree.parents).depths
        by_depth = [self.draw_request(depth) for depth in range(max(far) + 1)]
        return [by_depth[depth] for depth in far]

    def draw_request(self, depth: int) -> DrawRequest:
        """Behind a node so far below the root."""
        opening = self.state.opening
        return DrawRequest(opening.sampling, opening.seed, opening.ordinal, self.position + depth)


def find_targets(
    logits: torch.Tensor,
    queries: Sequence[TargetQuery],
    at_once: bool | None = None,
    meanwhile: Meanwhile | None = None,
    astray: Callable[[int], None] = lambda _: None,
) -> list[Targets]:
    """For each question the target at each node. logits: [rows, V], left as they are.

    None: the node's logits are not numbers, or acceptance does not come by.
    at_once: draw behind every node, not along paths: a device is then waited for once, not node by node.
    meanwhile: called with all targets before the device is waited for: int32 [rows], there; negative for
    None. What masks have a say in is believed to be the argmax. astray: called with each sequence of whom
    it was not.
    """
    at_once = logits.is_cuda if at_once is None else at_once
    # by number in `queries`
    requests = [ARGMAX] * len(logits)
    walks = dict[int, _PathWalk]()
    drawn = False
    for number, one in enumerate(queries):
        greedy = one.state.greedy
        if not ((greedy or (at_once and not one.state.processed)) and one.unmasked):
            walks[number] = _PathWalk(one)
        elif not greedy:
            requests[one.row : one.row + len(one.tree)], drawn = one.draw_requests(), True
    greedily = [walk for walk in walks.values() if walk.query.state.greedy]
    known = len(walks) == len(queries) and not greedily
    alone = meanwhile if len(greedily) == len(walks) else None
    best = [] if known else choose_tokens(logits, requests if drawn else (), alone)
    for walk in greedily:
        walk.best = best
    asked = _walk(logits, list(walks.values()))
    for walk in asked if alone else ():
        astray(walk.query.state.opening.sequence)
    return [
        walks[number].targets if number in walks else best[one.row : one.row + len(one.tree.tokens)]
        for number, one in enumerate(queries)
    ]


@dataclass(slots=True)
class _PathWalk:
    """Acceptance in one tree, step by step. node: the current one; None when it is over.

    best:  the argmax of every row of the frame, without masks; None where more than that is asked for.
    trail: tokens of the nodes below the root it came through.
    """

    query: TargetQuery
    best: Targets | None = None
    node: int | None = 0
    trail: list[int] = field(default_factory=list[int])
    targets: Targets = field(init=False)
    _children: Sequence[Sequence[int]] = field(init=False)

    def __post_init__(self) -> None:
        tree = self.query.tree
        self._children = children(tree.parents)
        self.targets = [None] * len(tree)

    def follow_argmax(self) -> None:
        """As far as the argmax of whole rows is allowed: that needs no logits."""
        while self.node is not None and self.best is not None:
            target = self.best[self.query.row + self.node]
            if not self.query.allows(self.node, target) or target in self._barred():
                return
            self.step(target)

    def apply_processors(self, logits: torch.Tensor) -> None:
        """Everything that comes before drawing, on its node's row [V], in place."""
        assert self.node is not None
        state = self.query.state
        masks = self.query.masks
        if masks and (mask := masks[self.node]) is not None:
            forbidden = torch.from_numpy(~mask[: len(logits)])  # the cached mask itself is read-only
            logits[forbidden.to(logits.device)] = float("-inf")
        if barred := self._barred():
            logits[torch.tensor(barred, device=logits.device)] = float("-inf")
        times = state.history.counts(self.trail) if state.history else {}
        apply_penalties(logits, state.opening.sampling, times)

    def _barred(self) -> tuple[int, ...]:
        """Stop tokens, where it is too early for one."""
        state = self.query.state
        return state.opening.stop_ids if state.must_go_on(len(self.trail)) else ()

    def step(self, target: int | None) -> None:
        """The target at its node is known: on to the first of its children that is it."""
        assert self.node is not None
        self.targets[self.node], tokens = target, self.query.tree.tokens
        self.node = next((child for child in self._children[self.node] if tokens[child] == target), None)
        if self.node is not None:
            self.trail.append(tokens[self.node])


def _walk(logits: torch.Tensor, walks: Sequence[_PathWalk]) -> list[_PathWalk]:
    """All walks side by side, one node of each at a time. Returns those whom argmaxes did not bring home."""
    for walk in walks:
        walk.follow_argmax()
    asked = [walk for walk in walks if walk.node is not None]
    while going := [walk for walk in asked if walk.node is not None]:
        rows = logits[[walk.query.row + (walk.node or 0) for walk in going]].float()
        for walk, row in zip(going, rows):
            walk.apply_processors(row)
        for walk, target in zip(
            going, choose_tokens(rows, [walk.query.draw_request(len(walk.trail)) for walk in going])
        ):
            walk.step(target)
            walk.follow_argmax()
    return asked
