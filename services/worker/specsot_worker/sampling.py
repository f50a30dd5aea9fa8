"""Target tokens for the nodes of each sequence's tree: logit processors, grammar masks and random draws.

The target of a node is a function of (logits, seed, ordinal, position). At temperature 0 it is the argmax.
Otherwise temperature, top-k, top-p and min-p are applied, in the order of Hugging Face's `generate` (EAGLE's
own code applies top-p before top-k). Then the token id is drawn bit by bit, the highest bit first, each bit
with a counter-based random number of its own. Rounding errors can thus only move one threshold per bit, where
the cumulative distribution has one threshold per token. All tokens that tie at the edge of a truncation stay,
whatever the order of sorting.

The argmax of all rows is taken at once, on every device. On a GPU, one kernel also draws the tokens of all
nodes of all trees, and the host waits for it once. Draws on a CPU, and masks, penalties and biases on every
device, are applied along the accepted path only, one node after the other.
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

# Tokens. Top-p looks at this many of the likeliest tokens first, then at eight times more. Untuned.
NUCLEUS_CANDIDATES = 512
# Temperatures are clamped to this range, because float32 divides by them; values beyond it change nothing.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
# The smallest weight of a token that can be drawn: the smallest normal float32.
MIN_WEIGHT = torch.finfo(torch.float32).tiny
# Is called with all target tokens on the device, int32 [num_tokens], before the host has them.
Meanwhile = Callable[[torch.Tensor], None]
HAS_KERNEL = find_spec("triton") is not None


@value
class DrawRequest:
    """Request to draw the token after one node.

    sampling: Sampling parameters of the sequence. At temperature 0, the argmax is asked for.
    seed: Seed of the request, from which all its random numbers follow.
    ordinal: Number of the branch within its request, at least 0.
    position: Position in the sequence at which the drawn token will stand.
    """

    sampling: Sampling
    seed: int
    ordinal: int
    position: int

    @property
    def key(self) -> int:
        """The 53 random bits of this draw, from `draw_key`."""
        return draw_key(self.seed, self.ordinal, self.position)


# Asks for the argmax.
ARGMAX = DrawRequest(Sampling(), 0, 0, 0)


def choose_tokens(
    logits: torch.Tensor, requests: Sequence[DrawRequest], meanwhile: Meanwhile | None = None
) -> list[int | None]:
    """Return the target token id of each row of logits. None for a row whose logits are not finite.

    logits: [num_rows, vocab]. They are not changed.
    requests: How each row's token is drawn, one per row. Empty: the argmax of every row.
    meanwhile: Called with all targets on the device, int32 [num_rows], before the host waits for them; on a
        GPU only. None: nothing is called. See `find_targets`.

    Rows with temperature 0 get the argmax. On a CPU, `meanwhile` is not called.
    """
    if logits.is_cuda and HAS_KERNEL:
        from specsot_kernels.gpu.drawing import choose_tokens

        return choose_tokens(logits, [draw_setting(request) for request in requests], meanwhile)
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


def choose_on_device(logits: torch.Tensor, requests: Sequence[DrawRequest]) -> torch.Tensor:
    """Return the target token id of each row of logits, int32 [num_rows] on their device, without waiting for
    the device if that is a GPU. -1 for a row whose logits are not finite. The tokens are those of
    `choose_tokens`.

    logits: [num_rows, vocab]. They are not changed.
    requests: How each row's token is drawn, one per row. Empty: the argmax of every row.
    """
    if logits.is_cuda and HAS_KERNEL:
        from specsot_kernels.gpu import drawing

        return drawing.choose_on_device(logits, [draw_setting(request) for request in requests])
    chosen = [-1 if token is None else token for token in choose_tokens(logits, requests)]
    return torch.tensor(chosen, dtype=torch.int32, device=logits.device)


def read_tokens(tokens: torch.Tensor, meanwhile: Meanwhile | None = None) -> list[int | None]:
    """Wait for the token ids that `choose_on_device` has chosen, and return them. None for a row whose logits
    are not finite.

    tokens: int32 [num_rows], on any device; negative for None.
    meanwhile: Called with `tokens` before the host waits for them; on a GPU only, see `choose_tokens`. None:
        nothing is called.
    """
    if tokens.is_cuda and HAS_KERNEL:
        from specsot_kernels.gpu import drawing

        return drawing.read_tokens(tokens, meanwhile)
    return [token if token >= 0 else None for token in tokens.tolist()]


def compile_draws(logits: torch.Tensor) -> None:
    """Compile the GPU's sampling kernels before the first request needs them. Nothing happens on a CPU.

    logits: Any logits on the device, [1, vocab].

    Three tokens are drawn and dropped: by the argmax, without truncation, and with top-p. Within
    `compile_ahead`, the kernels are only compiled, and the drawn tokens mean nothing.
    """
    if logits.is_cuda:
        for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9)):
            choose_tokens(logits, [DrawRequest(sampling, 0, 0, 0)])


def draw_setting(request: DrawRequest) -> tuple[float, float, float, float, float]:
    """Return a request as the kernel reads it: (temperature, top_k, top_p, min_p, key). Temperature 0 stands
    for the argmax; the other values are then neutral.

    request: How the token is drawn.

    Top-k 0, top-p 1 and min-p 0 are neutral.
    """
    asked = request.sampling
    if asked.temperature == 0:
        return 0.0, 0.0, 1.0, 0.0, 0.0
    return _temperature(asked), asked.top_k, asked.top_p, asked.min_p, request.key


def _temperature(sampling: Sampling) -> float:
    """Return the sampling temperature, clamped to the range that float32 can divide by.

    sampling: Sampling parameters of the sequence.
    """
    return min(max(float(sampling.temperature), MIN_TEMPERATURE), MAX_TEMPERATURE)


def argmax_tokens(logits: torch.Tensor) -> list[int | None]:
    """Return the id of the likeliest token of each row. None for a row that holds NaN or +infinity, or only
    -infinity.

    logits: [num_rows, vocab], on any device.
    """
    # NumPy's argmax takes a sixth of the time of PyTorch's, but NumPy has no bfloat16.
    if logits.device.type == "cpu":
        held = (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy()
        tokens = held.argmax(-1)
        best = held[np.arange(len(held)), tokens].tolist()
        chosen = tokens.tolist()
    else:
        # Both are read at once, because every read waits for the device.
        best, chosen = torch.stack([each.double() for each in logits.max(dim=-1)]).tolist()
    return [int(token) if abs(top) < float("inf") else None for top, token in zip(best, chosen)]


def draw_tokens(logits: torch.Tensor, sampling: Sampling, keys: Sequence[int]) -> list[int]:
    """Draw one token for each row of logits, and return the token ids.

    logits: [num_rows, vocab]. Masked tokens have logits of -inf.
    sampling: Sampling parameters of all rows. The temperature must be above 0.
    keys: Random bits of each row's draw, from `draw_key`.

    Rows must have finite logits for at least one token.
    """
    tokens, weights = sampling_weights(logits, sampling)
    sums = weights.cumsum(-1, dtype=torch.float64).cpu().numpy()
    kept = [range(logits.shape[-1])] * len(keys) if tokens is None else tokens.tolist()
    return [_draw(*each, logits.shape[-1]) for each in zip(keys, kept, sums)]


def _draw(key: int, tokens: Sequence[int], sums: np.ndarray, size: int) -> int:
    """Draw one token id bit by bit, and return it. Only tokens with a positive weight can be drawn.

    key: Random bits of the draw, from `draw_key`.
    tokens: Ids that may be drawn, ascending.
    sums: Cumulative weights of `tokens`, float64 [len(tokens)].
    size: Size of the vocabulary, which determines the number of bits.

    Each bit halves the range of ids: it is set if its random number times the weight of the range reaches the
    weight of the lower half.

        # size 4, tokens 0..3 with weights .1 .2 .3 .4: bit 1 is set with probability .7,
        # then bit 0 with probability .4 / .7

    The sums of the weights need not end at 1.
    """
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
    """Return the token ids that may be drawn, in ascending order, and their weights, both [num_rows, n].

    Weights are the softmax after truncation; they are not normalised again, and excluded tokens among the n
    have weight 0. The ids are None if they are the whole vocabulary, so that n is its size.

    logits: [num_rows, vocab].
    sampling: Temperature, top-k, top-p and min-p of all rows.

    Without top-k and top-p, only min-p is applied, if it is above 0.
    """
    shifted = logits.float() - logits.amax(-1, keepdim=True)
    weights = shifted.div_(_temperature(sampling)).softmax(-1)
    if not sampling.top_k and sampling.top_p == 1:
        floors = sampling.min_p * weights.amax(-1, keepdim=True)
        return None, weights.masked_fill_(weights < floors, 0) if sampling.min_p else weights
    return _truncated_weights(weights, sampling)


def _truncated_weights(weights: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply top-k, top-p and min-p to the likeliest tokens only, and to more of them as long as tokens that
    stay may lie beyond. Return token ids in ascending order and their weights, both [num_rows, n]; excluded
    tokens have weight 0.

    weights: Softmax of the logits, [num_rows, vocab].
    sampling: Top-k, top-p and min-p of all rows.

    At first 2 * top_k tokens are looked at, or NUCLEUS_CANDIDATES without top-k, and eight times more each
    time.
    """
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
    """Return for each row the smallest weight of a token that stays, [num_rows, 1], as far as the given
    weights can tell.

    values: Weights of the likeliest tokens, [num_rows, n], in descending order.
    sampling: Top-k, top-p and min-p of all rows.

    For example:

        # weights .5 .3 .1 .1, top_p .7 -> sums before each next token .5 .8 .9 -> floor .3

    Top-k 0 or beyond the number of given weights, top-p 1 and min-p 0 raise no floor. The smallest floor is
    MIN_WEIGHT.
    """
    floors = torch.full_like(values[:, :1], MIN_WEIGHT)
    if 0 < sampling.top_k < values.shape[-1]:
        floors = floors.maximum(values[:, sampling.top_k - 1 : sampling.top_k])
    if sampling.top_p < 1:
        sums = values.masked_fill(values < floors, 0).cumsum(-1, dtype=torch.float64)
        whole = sums[:, -1:] if sampling.top_k else 1.0
        # True while the tokens up to here weigh less than top_p, so that a further token stays.
        before = sums[:, :-1] < sampling.top_p * whole
        floors = floors.maximum(values.gather(-1, before.sum(-1, keepdim=True)))
    return floors.maximum(sampling.min_p * values[:, :1])


# Target token at each node of a tree.
Targets = list[int | None]


class TargetQuery(NamedTuple):
    """Query for the target tokens of one segment: one target after each node of its tree.

    state: What the last stage remembers of the segment's sequence.
    row: Number of the tree's root among the rows of the frame's logits. The other nodes follow.
    tree: The tree: token id and parent of each node. The last token of a prompt is a tree of one node.
    position: Position in the sequence of the token after the root.
    masks: Grammar mask of each node: bool [vocab], True for tokens that may follow the node, or None if every
        token may. Empty if every token may follow every node.
    """

    state: DecodeState
    row: int
    tree: Tree
    position: int
    masks: Sequence[np.ndarray | None]

    @property
    def unmasked(self) -> bool:
        """True if every token is allowed after every node: no grammar mask excludes any, the sequence's
        opening bars none, and no bias lowers a token of a greedy sequence.
        """
        if self.masks and (isinstance(self.masks, TreeMasks) or any(one is not None for one in self.masks)):
            return False
        state = self.state
        return not (state.lowered or (state.bars and state.barred_tokens()))

    def allows(self, node: int, token: int | None) -> bool:
        """Return whether the node's mask allows a token: False if the mask excludes it, True where there is
        no mask.

        node: Number of the node in the tree.
        token: Token id. None, which stands for logits that are not finite, is allowed only where there is no
            mask.

        For masks that are built as needed (`TreeMasks`), None is never allowed.
        """
        if isinstance(self.masks, TreeMasks):
            return token is not None and self.masks.allows(node, token)
        mask = self.masks[node] if self.masks else None
        return mask is None or (token is not None and bool(mask[token]))

    def draw_requests(self) -> list[DrawRequest]:
        """Return how the token after each node is drawn, by node. Nodes of one depth share a request.

        The list has one request for each node of the tree, in order.
        """
        far = shape_of(self.tree.parents).depths
        by_depth = [self.draw_request(depth) for depth in range(max(far) + 1)]
        return [by_depth[depth] for depth in far]

    def draw_request(self, depth: int) -> DrawRequest:
        """Return how the token after the nodes at one depth is drawn.

        depth: Number of edges between the root and the nodes. 0: the root.
        """
        opening = self.state.opening
        return DrawRequest(opening.sampling, opening.seed, opening.ordinal, self.position + depth)


def find_targets(
    logits: torch.Tensor,
    queries: Sequence[TargetQuery],
    at_once: bool | None = None,
    meanwhile: Meanwhile | None = None,
    mispredicted: Callable[[int], None] = lambda _: None,
) -> list[Targets]:
    """Return the target token id at each node, one list for each query. Return [] without queries.

    A target is None if the node's logits are not finite, or if acceptance does not reach the node.

    logits: Logits of the nodes of all queries, [num_rows, vocab]. They are not changed.
    queries: One for each tree, see `TargetQuery`.
    at_once: Draw after every node in one call, not along accepted paths. Then the host waits for the device
        once and not per node. None: on a GPU.
    meanwhile: Called with all targets on the device, int32 [num_rows], before the host waits for them.
        Negative values stand for None. Where a grammar mask may exclude tokens, the value is the unmasked
        argmax. It is called only if every query that is walked node by node is greedy. None: nothing is
        called.
    mispredicted: Called with the id of each sequence whose targets given to `meanwhile` may be wrong, because
        a mask excluded an argmax, or because a target became an end token.

    If a sequence has a soft end, one of its targets may be replaced by an end token. On a GPU,
    `mispredicted` is called only if `meanwhile` was. On a CPU, `meanwhile` is never called, but
    `mispredicted` may be if `meanwhile` is given.
    """
    at_once = logits.is_cuda if at_once is None else at_once
    # How each row's token is drawn. Empty: the argmax of every row.
    requests = list[DrawRequest]()
    # Walks by number of the query.
    walks = dict[int, _PathWalk]()
    for number, one in enumerate(queries):
        if one.state.takes_argmax and not one.masks:
            continue
        greedy = one.state.greedy
        if not ((greedy or (at_once and not one.state.processed)) and one.unmasked):
            walks[number] = _PathWalk(one)
        elif not greedy:
            requests = requests or [ARGMAX] * logits.shape[0]
            requests[one.row : one.row + len(one.tree)] = one.draw_requests()
    greedily = [walk for walk in walks.values() if walk.query.state.greedy]
    # No row's argmax or draw is needed if every query is walked with more than the argmax.
    all_walked = len(walks) == len(queries) and not greedily
    # If other walks than greedy ones follow, the targets on the device would be wrong.
    early_work = meanwhile if len(greedily) == len(walks) else None
    best = [] if all_walked else choose_tokens(logits, requests, early_work)
    for walk in greedily:
        walk.best = best
    asked = _walk(logits, list(walks.values()))
    for walk in asked if early_work else ():
        mispredicted(walk.query.state.opening.sequence)
    found = _targets_of(best, queries)
    for number, walk in walks.items():
        found[number] = walk.targets
    _end_all_softly(queries, found, mispredicted if early_work else None)
    return found


def takes_argmax(query: TargetQuery) -> bool:
    """Return whether the argmax of each row is all that a query needs, except where a grammar mask excludes
    it: the sequence's state `takes_argmax`, and no log-probabilities are asked for.

    query: The query for the targets of one segment.
    """
    return query.state.takes_argmax and query.state.opening.logprobs is None


def read_targets(
    tokens: torch.Tensor,
    queries: Sequence[TargetQuery],
    compute_logits: Callable[[], torch.Tensor],
    meanwhile: Meanwhile | None = None,
    mispredicted: Callable[[int], None] = lambda _: None,
) -> list[Targets]:
    """Return what `find_targets` returns, from the argmax of each row instead of all logits. The function
    `takes_argmax` must return True for every query.

    tokens: The argmax of each row of logits, int32 [num_rows], see `choose_on_device`.
    queries: One for each tree.
    compute_logits: Returns the logits of the nodes of all queries, [num_rows, vocab]. It is called at most
        once, and only if a grammar mask excludes the argmax of a node that acceptance reaches, or the logits
        of a masked node are not finite.
    meanwhile: Called with `tokens` before the host waits for them; on a GPU only. None: nothing is called.
    mispredicted: See `find_targets`.
    """
    best = read_tokens(tokens, meanwhile)
    found = _targets_of(best, queries)
    walks = {number: _PathWalk(one, best) for number, one in enumerate(queries) if one.masks}
    for walk in walks.values():
        walk.follow_argmax()
    stopped = [walk for walk in walks.values() if walk.node is not None]
    if stopped:
        _walk(compute_logits(), stopped)
    for walk in stopped if meanwhile else ():
        mispredicted(walk.query.state.opening.sequence)
    for number, walk in walks.items():
        found[number] = walk.targets
    _end_all_softly(queries, found, mispredicted if meanwhile else None)
    return found


def _targets_of(best: Targets, queries: Sequence[TargetQuery]) -> list[Targets]:
    """Return the targets of each query, one for each node. Every list is empty if `best` is.

    best: Target of each row of the frame's logits.
    queries: One for each tree.

        # best [5 6 7 8], trees of 3 nodes at row 0 and of 1 node at row 3 -> [5 6 7] and [8]
    """
    return [best[row : row + len(tree.tokens)] for _, row, tree, _, _ in queries]


def _end_all_softly(
    queries: Sequence[TargetQuery], found: list[Targets], mispredicted: Callable[[int], None] | None
) -> None:
    """Replace a target by an end token for each query whose sequence ends softly now, see `end_softly`.

    queries: One for each tree.
    found: Targets of each query. The list is changed in place.
    mispredicted: Called with the id of each sequence of which a target has changed. None: nothing is called.
    """
    soft_ends = [number for number, one in enumerate(queries) if one.state.soft_end]
    for number in soft_ends:
        one = queries[number]
        softly = end_softly(one, found[number])
        # The rule returns the same list if it changes no target.
        if mispredicted and softly is not found[number]:
            mispredicted(one.state.opening.sequence)
        found[number] = softly


def end_softly(query: TargetQuery, targets: Targets) -> Targets:
    """Return the targets of a query, with an end token where the sequence's soft end wants one. Return the
    same list if no target changes.

    query: The query, whose tree is walked.
    targets: Target token id at each node.
    """
    rule = query.state.soft_end
    return targets if rule is None else rule.change(query.state.tokens, query.tree, targets)


@dataclass(slots=True)
class _PathWalk:
    """Walk along the accepted path of one tree, which finds the targets node by node.

    query: The query that is answered.
    best: Id of the likeliest token of every row of the frame's logits, without masks. None if the query needs
        more than an argmax.
    node: Number of the node whose target is wanted next. None when the walk has ended.
    trail: Token ids of the nodes below the root that the walk has passed, in order.
    targets: Target token id found so far at each node. None: not found yet, not finite, or not reached.
    _children: Numbers of the children of each node.
    """

    query: TargetQuery
    best: Targets | None = None
    node: int | None = 0
    trail: list[int] = field(default_factory=list[int])
    targets: Targets = field(init=False)
    _children: Sequence[Sequence[int]] = field(init=False)

    def __post_init__(self) -> None:
        """List the children of every node, and start without targets."""
        tree = self.query.tree
        self._children = children(tree.parents)
        self.targets = [None] * len(tree)

    def follow_argmax(self) -> None:
        """Walk on as long as the argmax of the unmasked row is allowed and not lowered by a bias, which needs
        no logits. Nothing happens if no argmax is known, or if the walk has ended.

        The walk stops before a target that the mask excludes, that is a stop token forbidden by
        `min_tokens`, or that a bias lowers.
        """
        while self.node is not None and self.best is not None:
            target = self.best[self.query.row + self.node]
            if not self.query.allows(self.node, target) or target in self._barred():
                return
            if target in self.query.state.lowered:
                return
            self.step(target)

    def apply_processors(self, logits: torch.Tensor) -> None:
        """Apply mask, barred tokens, biases and penalties to the logits of the current node, in place.
        Tokens that are not allowed get -inf.

        logits: Logits of the current node, [vocab].

        Without a mask, a ban, biases or penalties the logits stay as they are. The drafted tokens that the
        walk has passed count for penalties.
        """
        assert self.node is not None
        state = self.query.state
        masks = self.query.masks
        if masks and (mask := masks[self.node]) is not None:
            # The mask is inverted into a new array, because the mask itself is cached and read-only.
            forbidden = torch.from_numpy(~mask[: len(logits)])
            logits[forbidden.to(logits.device)] = float("-inf")
        if barred := self._barred():
            logits[torch.tensor(barred, device=logits.device)] = float("-inf")
        times = state.history.counts(self.trail) if state.history else {}
        apply_penalties(logits, state.opening.sampling, times)

    def _barred(self) -> tuple[int, ...]:
        """Return the ids of the tokens that the opening bars at the current node; () if it bars none."""
        return self.query.state.barred_tokens(len(self.trail))

    def step(self, target: int | None) -> None:
        """Record the target of the current node, and walk on to its first child with that token. The walk
        ends if there is none.

        target: Target token id. None if the node's logits are not finite, which ends the walk.
        """
        assert self.node is not None
        self.targets[self.node], tokens = target, self.query.tree.tokens
        self.node = next((child for child in self._children[self.node] if tokens[child] == target), None)
        if self.node is not None:
            self.trail.append(tokens[self.node])


def _walk(logits: torch.Tensor, walks: Sequence[_PathWalk]) -> list[_PathWalk]:
    """Run all walks together, one node of each per round, until all have ended. Return the walks for which
    the argmax did not suffice; [] if it sufficed for all.

    logits: Logits of the nodes of all queries, [num_rows, vocab].
    walks: Walks that stand at their roots. They are changed.

    Each walk's targets are recorded in the walk itself.
    """
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
