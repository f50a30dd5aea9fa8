"""The tree functions in plain NumPy, request by request: the reference for every faster version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from specsot_kernels.contract import Array, DraftResults, TreeArrays, TreeMaskMode, Verified

# (node, its children in order) -> the accepted child, or None.
Pick = Callable[[int, Iterator[int]], int | None]
# (most nodes, element type) of the words of QLEN_ONLY_BITPACKING.
WORDS = ((8, "u1"), (16, "<u2"), (32, "<u4"))


def organize_draft_results(
    score_list: Sequence[Array], token_list: Sequence[Array], parents_list: Sequence[Array], nodes: int
) -> DraftResults:
    """Return the `nodes` - 1 best candidates of each request; see `trees.organize_draft_results`.

    Of equal scores the lower flat number wins, so that a parent precedes a child of equal score. NaN ranks
    last.
    """
    batch = len(score_list[0])
    scores = np.concatenate([each.reshape(batch, -1) for each in score_list], axis=1)
    falling = -np.where(np.isnan(scores), -np.inf, scores)
    best = np.argsort(falling, axis=1, kind="stable")[:, : nodes - 1]
    selected = np.sort(best, axis=1).astype(np.int64)
    tokens = np.take_along_axis(np.concatenate(token_list, axis=1), selected, axis=1)
    known = np.concatenate(parents_list[:-1], axis=1) if len(parents_list) > 1 else parents_list[0][:, :1]
    return DraftResults(known.astype(np.int64), selected, tokens.astype(np.int64))


def build_trees(
    verified: Array,
    parent_list: Array,
    selected: Array,
    drafts: Array,
    seq_lens: Array,
    topk: int,
    mode: TreeMaskMode,
    total: int | None,
) -> TreeArrays:
    """Return trees from the chosen candidates; see `trees.build_tree_structure`.

    A candidate whose parent was not chosen becomes an orphan; see `arrange_trees`.
    """
    tokens = np.concatenate((verified[:, None], drafts), axis=1)
    return arrange_trees(tokens, _find_parents(parent_list, selected, topk), seq_lens, mode, total)


def _find_parents(parent_list: Array, top_scores_index: Array, topk: int) -> Array:
    """Return int64 [bs, n]: the node number of each node's parent; -1 for the root and for an orphan.

    With topk 2, chosen [0, 1, 3] and parent_list [-1, 0, 1]: candidate 3 is in group 1, whose parent is
    candidate 0, that is node 1; parents are [-1, 0, 0, 1].
    """
    batch, chosen = top_scores_index.shape
    parents = np.full((batch, chosen + 1), -1, np.int64)
    for b in range(batch):
        places = {int(flat): node for node, flat in enumerate(top_scores_index[b], start=1)}
        for flat, node in places.items():
            group = flat // topk
            parents[b, node] = places.get(int(parent_list[b, group]), -1) if group else 0
    return parents


def arrange_trees(
    tokens: Array, parents: Array, seq_lens: Array, mode: TreeMaskMode, total: int | None
) -> TreeArrays:
    """Return trees whose parents are known; see `trees.arrange_trees`.

    An orphan is no node's child and attends to the root and itself. total: unused here; kernels on a GPU need
    it.
    """
    batch, nodes = tokens.shape
    links = np.full((2, batch, nodes), -1, np.int64)
    masks = np.zeros((batch, nodes, nodes), np.bool_)
    for b in range(batch):
        links[:, b] = _links(parents[b])
        masks[b] = _mask(parents[b])
    depths = masks.sum(2) - 1
    return TreeArrays(
        _lay_out(masks, seq_lens, mode),
        (seq_lens.astype(np.int64)[:, None] + depths).reshape(-1),
        np.arange(batch * nodes, dtype=np.int64).reshape(batch, nodes),
        links[0],
        links[1],
        tokens.astype(np.int64).reshape(-1),
    )


def _links(parents: Array) -> Array:
    """Return first children and next siblings, [2, n], made by prepending from the last node on."""
    first, following = np.full((2, len(parents)), -1, np.int64)
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent >= 0:
            following[node], first[parent] = first[parent], node
    return np.stack((first, following))


def _mask(parents: Array) -> Array:
    """Return bool [n, n]: a node sees the root, itself and its ancestors; a parent's row must precede its
    children's.
    """
    mask = np.eye(len(parents), dtype=np.bool_)
    mask[:, 0] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def _lay_out(masks: Array, seq_lens: Array, mode: TreeMaskMode) -> Array:
    """Return the masks, bool [bs, n, n], laid out as the mode says."""
    if mode == TreeMaskMode.QLEN_ONLY:
        return masks.reshape(-1)
    if mode == TreeMaskMode.FULL_MASK:
        wide = [np.pad(mask, ((0, 0), (int(n), 0)), constant_values=True) for mask, n in zip(masks, seq_lens)]
        return np.concatenate([np.empty(0, np.bool_), *(mask.reshape(-1) for mask in wide)])
    nodes = masks.shape[-1]
    word = next(kind for most, kind in WORDS if nodes <= most)
    return (masks.reshape(-1, nodes) * (1 << np.arange(nodes, dtype=np.int64))).sum(1).astype(word)


def verify_tree_greedy(
    candidates: Array,
    target_predict: Array,
    retrieve_index: Array,
    retrieve_next_token: Array,
    retrieve_next_sibling: Array,
    steps: int,
) -> Verified:
    """Accept a child if and only if its token is the target's token after its parent; of equal siblings the
    first.
    """
    targets, found = target_predict.reshape(-1), _Found(candidates, retrieve_index, steps)
    for b in range(len(candidates)):

        def pick(node: int, children: Iterator[int], b: int = b) -> int | None:
            wanted = targets[retrieve_index[b, node]]
            return next((child for child in children if candidates[b, child] == wanted), None)

        walk = _walk(retrieve_next_token[b], retrieve_next_sibling[b], steps, pick)
        found.write(b, walk, int(targets[retrieve_index[b, walk[-1]]]))
    return found.arrays


def tree_speculative_sampling(
    candidates: Array,
    retrieve_index: Array,
    retrieve_next_token: Array,
    retrieve_next_sibling: Array,
    uniform_samples: Array,
    uniform_samples_final: Array,
    target_probs: Array,
    draft_probs: Array | None,
    threshold_single: float,
    threshold_acc: float,
    steps: int,
) -> Verified:
    """Draw one uniform number at each node; the children divide it by their probabilities, in
    sibling order.
    """
    coins, found = uniform_samples.astype(np.float64), _Found(candidates, retrieve_index, steps)
    for b in range(len(candidates)):
        chances = target_probs[b].astype(np.float64)
        spent = np.zeros_like(chances) if draft_probs is None else draft_probs[b].astype(np.float64)

        def pick(
            node: int, children: Iterator[int], b: int = b, chances: Array = chances, spent: Array = spent
        ) -> int | None:
            mass = 0.0
            for child in children:
                token = candidates[b, child]
                chance = chances[node, token]
                mass += chance
                drawn = chance > 0 and coins[b, node] * threshold_acc <= mass
                if drawn or chance >= threshold_single:
                    return child
                spent[node, token] = chance
            return None

        walk = _walk(retrieve_next_token[b], retrieve_next_sibling[b], steps, pick)
        last = walk[-1]
        rest = chances[last] if len(walk) > steps else np.maximum(chances[last] - spent[last], 0.0)
        found.write(b, walk, _draw(rest if rest.sum() > 0 else chances[last], uniform_samples_final[b]))
    return found.arrays


def _draw(chances: Array, coin: float) -> int:
    """Draw a token by inverse CDF in vocabulary order; `chances` need not sum to 1."""
    sums = np.cumsum(chances)
    token = int(np.searchsorted(sums, float(coin) * sums[-1], side="right"))
    return min(token, int((sums < sums[-1]).sum()))


def _walk(first: Array, following: Array, steps: int, pick: Pick) -> list[int]:
    """Return the nodes from the root down, as long as `pick` accepts a child and at most `steps`
    levels deep.
    """
    walk = [0]
    while len(walk) <= steps:
        child = pick(walk[-1], _children(first, following, walk[-1]))
        if child is None:
            break
        walk.append(child)
    return walk


def _children(first: Array, following: Array, node: int) -> Iterator[int]:
    """Yield a node's children in sibling order; links that form a circle end after as many children as there
    are nodes.
    """
    child = int(first[node])
    for _ in following:
        if child < 0:
            return
        yield child
        child = int(following[child])


class _Found:
    """The result arrays of a verification, filled request by request."""

    def __init__(self, candidates: Array, retrieve_index: Array, steps: int) -> None:
        self._candidates = candidates
        self._slots = retrieve_index
        batch, nodes = candidates.shape
        self.arrays = Verified(
            np.full(batch * nodes, -1, np.int32),
            np.full((batch, steps + 1), -1, np.int32),
            np.zeros(batch, np.int32),
        )

    def write(self, b: int, walk: list[int], bonus: int) -> None:
        """Write request b's path and the token after it: tokens of the drafts on the path, then the bonus."""
        predicts, accepted, counts = self.arrays
        slots = self._slots[b, walk]
        predicts[slots] = [*(int(self._candidates[b, node]) for node in walk[1:]), bonus]
        accepted[b, : len(walk)] = slots
        counts[b] = len(walk) - 1
