"""The tree functions in plain NumPy, request by request: the reference for every faster version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from specsot_kernels.contract import Array, DraftResults, TreeArrays, TreeMaskMode, Verified

# (node, its children in order) -> the accepted child, or None.
Pick = Callable[[int, Iterator[int]], int | None]
# (maximum number of nodes, element type) of the words of QLEN_ONLY_BITPACKING.
WORDS = ((8, "u1"), (16, "<u2"), (32, "<u4"))


def organize_draft_results(
    score_list: Sequence[Array], token_list: Sequence[Array], parents_list: Sequence[Array], nodes: int
) -> DraftResults:
    """Return the best candidates of each request, parents before children; see
    `trees.organize_draft_results`.

    Of equal scores the lower flat number wins, so that a parent precedes a child of equal score. NaN ranks
    last.

    score_list: cumulative scores of each level, [bs, 1, k], then [bs, k, k].
    token_list: tokens of each level, [bs, k], then [bs, k * k].
    parents_list: flat numbers of the candidates that each level keeps, [bs, k + 1] (-1 first), then [bs, k].
    nodes: number of nodes of each tree, the root included; one candidate less is chosen.
    """
    batch = len(score_list[0])
    scores = np.concatenate([each.reshape(batch, -1) for each in score_list], axis=1)
    negated = -np.where(np.isnan(scores), -np.inf, scores)
    best = np.argsort(negated, axis=1, kind="stable")[:, : nodes - 1]
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

    verified: [bs], the newest token of each request.
    parent_list: [bs, k * (S - 1) + 1], the parent of each group of k candidates.
    selected: [bs, n - 1], flat numbers of the chosen candidates, ascending.
    drafts: [bs, n - 1], the tokens of these candidates.
    seq_lens: [bs], number of tokens before each request's newest token.
    topk: k, candidates below each node that was drafted from.
    mode: how the attention mask is laid out.
    total: not used here; kernels on a GPU need the sum of seq_lens.
    """
    tokens = np.concatenate((verified[:, None], drafts), axis=1)
    return arrange_trees(tokens, _find_parents(parent_list, selected, topk), seq_lens, mode, total)


def _find_parents(parent_list: Array, top_scores_index: Array, topk: int) -> Array:
    """Return int64 [bs, n]: the node number of each node's parent; -1 for the root and for an orphan.

    With topk 2, chosen [0, 1, 3] and parent_list [-1, 0, 1]: candidate 3 is in group 1, whose parent is
    candidate 0, that is node 1; parents are [-1, 0, 0, 1].

    parent_list: [bs, k * (S - 1) + 1], the parent of each group of k candidates; -1 is the root.
    top_scores_index: [bs, n - 1], flat numbers of the chosen candidates, ascending.
    topk: k, candidates below each node that was drafted from.
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

    An orphan is no node's child and attends to the root and itself.

    tokens: [bs, n], the token of each node, the root first.
    parents: [bs, n], the parent of each node, as a node number; -1 for the root and for an orphan.
    seq_lens: [bs], number of tokens before each root.
    mode: how the attention mask is laid out.
    total: not used here; kernels on a GPU need the sum of seq_lens.
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
    """Return first children and next siblings, int64 [2, n], made by prepending from the last node on; -1 for
    none.

    parents: [n], the parent of each node; -1 for the root and for an orphan.
    """
    first, following = np.full((2, len(parents)), -1, np.int64)
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent >= 0:
            following[node], first[parent] = first[parent], node
    return np.stack((first, following))


def _mask(parents: Array) -> Array:
    """Return bool [n, n]: a node sees the root, itself and its ancestors.

    parents: [n], the parent of each node, which precedes its children; -1 for the root and for an orphan.
    """
    mask = np.eye(len(parents), dtype=np.bool_)
    mask[:, 0] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def _lay_out(masks: Array, seq_lens: Array, mode: TreeMaskMode) -> Array:
    """Return the masks of all trees laid out as a mode says; see TreeMaskMode.

    The bits of QLEN_ONLY_BITPACKING are in the smallest word that holds n nodes. StopIteration is raised
    there for more than 32 nodes.

    masks: bool [bs, n, n], which nodes each node sees.
    seq_lens: [bs], number of tokens before each root, all of which are seen.
    mode: the layout of the result.
    """
    if mode == TreeMaskMode.QLEN_ONLY:
        return masks.reshape(-1)
    if mode == TreeMaskMode.FULL_MASK:
        padded = [
            np.pad(mask, ((0, 0), (int(n), 0)), constant_values=True) for mask, n in zip(masks, seq_lens)
        ]
        return np.concatenate([np.empty(0, np.bool_), *(mask.reshape(-1) for mask in padded)])
    nodes = masks.shape[-1]
    word = next(kind for max_nodes, kind in WORDS if nodes <= max_nodes)
    return (masks.reshape(-1, nodes) * (1 << np.arange(nodes, dtype=np.int64))).sum(1).astype(word)


def verify_tree_greedy(
    candidates: Array,
    target_predict: Array,
    retrieve_index: Array,
    retrieve_next_token: Array,
    retrieve_next_sibling: Array,
    steps: int,
) -> Verified:
    """Return what is accepted if a child is accepted when its token is the target's token after its parent.

    Of equal siblings the first is accepted. The token after the last accepted node is the target's.

    candidates: [bs, n], tokens of the nodes, the root first.
    target_predict: [bs, n], the target's token after each node, found by the node's retrieve_index.
    retrieve_index: [bs, n], the row of each node in the batch.
    retrieve_next_token: [bs, n], the first child of each node, -1 for none.
    retrieve_next_sibling: [bs, n], the next child of the same parent, -1 for none.
    steps: how many levels a path may go down.
    """
    targets, results = target_predict.reshape(-1), _Results(candidates, retrieve_index, steps)
    for b in range(len(candidates)):

        def pick(node: int, children: Iterator[int], b: int = b) -> int | None:
            """Return the first child whose token is the target's token after the node, or None.

            node: number of the node.
            children: numbers of the node's children, in sibling order.
            b: number of the request.
            """
            target = targets[retrieve_index[b, node]]
            return next((child for child in children if candidates[b, child] == target), None)

        walk = _walk(retrieve_next_token[b], retrieve_next_sibling[b], steps, pick)
        results.write(b, walk, int(targets[retrieve_index[b, walk[-1]]]))
    return results.arrays


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
    """Return what is accepted by one uniform number at each node, which the children divide by their
    probabilities, in sibling order.

    A child is accepted if its probability is above 0 and the sum up to it reaches the uniform number times
    `threshold_acc`, or if its own probability reaches `threshold_single`. The last token is drawn from the
    target's probabilities, less those of rejected children and of the drafter, at the last accepted node;
    from the whole of them after `steps` accepted drafts, or if nothing is left.

    candidates: [bs, n], tokens of the nodes, the root first.
    retrieve_index: [bs, n], the row of each node in the batch.
    retrieve_next_token: [bs, n], the first child of each node, -1 for none.
    retrieve_next_sibling: [bs, n], the next child of the same parent, -1 for none.
    uniform_samples: [bs, n], the uniform number of each node.
    uniform_samples_final: [bs], the uniform number with which each request's last token is drawn.
    target_probs: [bs, n, V], the target's probabilities after each node.
    draft_probs: [bs, n, V], the drafter's probabilities; None means zeros. Not changed.
    threshold_single: a child whose own probability reaches it is accepted.
    threshold_acc: factor of the uniform numbers.
    steps: how many levels a path may go down.
    """
    coins, results = uniform_samples.astype(np.float64), _Results(candidates, retrieve_index, steps)
    for b in range(len(candidates)):
        chances = target_probs[b].astype(np.float64)
        removed = np.zeros_like(chances) if draft_probs is None else draft_probs[b].astype(np.float64)

        def pick(
            node: int, children: Iterator[int], b: int = b, chances: Array = chances, removed: Array = removed
        ) -> int | None:
            """Return the child that the node's uniform number selects, or None if all children are rejected.

            The probabilities of rejected children are recorded in `removed`.

            node: number of the node.
            children: numbers of the node's children, in sibling order.
            b: number of the request.
            chances: [n, V], the target's probabilities of the request.
            removed: [n, V], what is subtracted from them before the last token is drawn; changed in place.
            """
            mass = 0.0
            for child in children:
                token = candidates[b, child]
                chance = chances[node, token]
                mass += chance
                drawn = chance > 0 and coins[b, node] * threshold_acc <= mass
                if drawn or chance >= threshold_single:
                    return child
                removed[node, token] = chance
            return None

        walk = _walk(retrieve_next_token[b], retrieve_next_sibling[b], steps, pick)
        last = walk[-1]
        rest = chances[last] if len(walk) > steps else np.maximum(chances[last] - removed[last], 0.0)
        results.write(b, walk, _draw(rest if rest.sum() > 0 else chances[last], uniform_samples_final[b]))
    return results.arrays


def _draw(chances: Array, coin: float) -> int:
    """Draw a token by inverse CDF in vocabulary order.

    chances: [V], weights of the tokens, which need not sum to 1.
    coin: the uniform number, in [0, 1).
    """
    sums = np.cumsum(chances)
    token = int(np.searchsorted(sums, float(coin) * sums[-1], side="right"))
    return min(token, int((sums < sums[-1]).sum()))


def _walk(first: Array, following: Array, steps: int, pick: Pick) -> list[int]:
    """Return the nodes from the root down, as long as `pick` accepts a child and at most `steps`
    levels deep.

    The result always begins with the root, node 0; it is the root alone if no child is accepted.

    first: [n], the first child of each node, -1 for none.
    following: [n], the next child of the same parent, -1 for none.
    steps: how many levels a path may go down.
    pick: returns the accepted one of a node's children, or None.
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

    first: [n], the first child of each node, -1 for none.
    following: [n], the next child of the same parent, -1 for none.
    node: number of the node.
    """
    child = int(first[node])
    for _ in following:
        if child < 0:
            return
        yield child
        child = int(following[child])


class _Results:
    """The result arrays of a verification, filled request by request.

    candidates: [bs, n], tokens of the nodes, the root first.
    retrieve_index: [bs, n], the row of each node in the batch.
    steps: how many levels a path may go down.
    """

    def __init__(self, candidates: Array, retrieve_index: Array, steps: int) -> None:
        """Allocate the result arrays for all requests: counts of 0, and -1 everywhere else.

        candidates: [bs, n], tokens of the nodes, the root first.
        retrieve_index: [bs, n], the row of each node in the batch.
        steps: how many levels a path may go down.
        """
        self._candidates = candidates
        self._slots = retrieve_index
        batch, nodes = candidates.shape
        self.arrays = Verified(
            np.full(batch * nodes, -1, np.int32),
            np.full((batch, steps + 1), -1, np.int32),
            np.zeros(batch, np.int32),
        )

    def write(self, b: int, walk: list[int], bonus: int) -> None:
        """Write a request's path and the token after it: tokens of the drafts on the path, then the bonus.

        Only the entries of the accepted rows are written; all others keep -1. The count leaves the root out.

        b: number of the request.
        walk: numbers of the accepted nodes, the root first.
        bonus: the token after the last accepted node.
        """
        predicts, accepted, counts = self.arrays
        slots = self._slots[b, walk]
        predicts[slots] = [*(int(self._candidates[b, node]) for node in walk[1:]), bonus]
        accepted[b, : len(walk)] = slots
        counts[b] = len(walk) - 1
