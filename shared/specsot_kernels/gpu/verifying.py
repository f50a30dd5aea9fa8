"""Verifies draft trees in Triton: greedily, and by rejection sampling with the final draw."""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.contract import Verified
from specsot_kernels.gpu.launching import kernel, kernel_of_any, launch, on_device_of, power_of_two

# Arguments of the kernels that describe the trees.
TREE = ("candidates", "slots", "first", "following")
# Arguments of the kernels that receive the results.
FOUND = ("predicts", "accepted", "counts")


def empty_results(candidates: Tensor, steps: int) -> Verified:
    """Return result arrays filled with -1, in one allocation.

    The counts are -1 too until a kernel writes them.

    candidates: [bs, n], for their shape and device.
    steps: how many levels a path may go down.
    """
    batch, nodes = candidates.shape
    rows = batch * nodes
    longest = batch * (steps + 1)
    whole = candidates.new_full((rows + longest + batch,), -1, dtype=torch.int32)
    # `as_strided` costs less than `split` and `view`.
    return Verified(
        whole.as_strided((rows,), (1,)),
        whole.as_strided((batch, steps + 1), (steps + 1, 1), rows),
        whole.as_strided((batch,), (1,), rows + longest),
    )


def can_hold(results: Verified, candidates: Tensor) -> bool:
    """Return whether the kernels can write directly into the caller's arrays; `predicts` may be longer than
    needed.

    They can if all arrays are int32 and contiguous, `predicts` and the counts have one dimension, and there
    is an entry for every row or request.

    results: the caller's arrays.
    candidates: [bs, n], for the sizes.
    """
    (predicts, accepted, counts) = results
    (batch, nodes) = candidates.shape
    return (
        predicts.dtype == accepted.dtype == counts.dtype == torch.int32
        and predicts.dim() == counts.dim() == 1
        and predicts.numel() >= batch * nodes
        and accepted.shape[0] >= batch
        and counts.numel() >= batch
        and predicts.is_contiguous()
        and accepted.is_contiguous()
        and counts.is_contiguous()
    )


def verify_tree_greedy(
    candidates: Tensor,
    target_predict: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    steps: int,
    into: Verified | None = None,
) -> Verified:
    """Return what is accepted of trees that are verified greedily, as `reference.verify_tree_greedy` does.

    candidates: [bs, n], tokens of the nodes, the root first.
    target_predict: [bs, n], the target's token after each node, found by the node's retrieve_index.
    retrieve_index: [bs, n], the row of each node in the batch.
    retrieve_next_token: [bs, n], the first child of each node, -1 for none.
    retrieve_next_sibling: [bs, n], the next child of the same parent, -1 for none.
    steps: how many levels a path may go down.
    into: arrays that pass `can_hold`; entries that are not on a path keep their value. None: new arrays.
    """
    found = into or empty_results(candidates, steps)
    arrays = tuple(
        each if each.is_contiguous() else each.contiguous()
        for each in (candidates, target_predict, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    )
    batch, nodes = candidates.shape
    specialization = (candidates.device, *[each.dtype for each in arrays])
    with on_device_of(candidates):
        launch(_verify, (batch, 1, 1), specialization, (*arrays, *found, nodes, steps), num_warps=1)
    return found


@kernel_of_any(*TREE, *FOUND, "targets", numbers=("nodes", "steps"))
def _verify(candidates, targets, slots, first, following, predicts, accepted, counts, nodes, steps):
    """Walk down one tree. A walk looks at no more children than the tree has nodes, so that circular links
    end.

    Entries off the path are not written. Row numbers outside the batch are read as -1 and not written to.

    candidates: [bs, n], tokens of the nodes, the root first.
    targets: [bs, n], the target's token after each node.
    slots: [bs, n], the row of each node in the batch.
    first: [bs, n], the first child of each node, -1 for none.
    following: [bs, n], the next child of the same parent, -1 for none.
    predicts: int32 [bs * n], receives the token after each row on the path; see `Verified`.
    accepted: int32 [bs, levels + 1], receives the rows of the accepted nodes.
    counts: int32 [bs], receives the number of accepted drafts.
    nodes: number of nodes of each tree.
    steps: how many levels a path may go down.
    """
    b = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0) * nodes
    row = b * nodes
    taken = tl.full((), 0, tl.int64)
    looked = tl.full((), 0, tl.int64)
    slot = number_at(slots + row, taken, nodes)
    wanted = number_at(targets, slot, rows)
    tl.store(accepted + b * (steps + 1), slot)
    child = number_at(first + row, taken, nodes)
    while (child >= 0) & (child < nodes) & (taken < steps) & (looked < nodes):
        looked += 1
        if number_at(candidates + row, child, nodes) == wanted:
            put_at(predicts, slot, rows, wanted)
            slot = number_at(slots + row, child, nodes)
            wanted = number_at(targets, slot, rows)
            taken += 1
            tl.store(accepted + b * (steps + 1) + taken, slot)
            child = number_at(first + row, child, nodes)
        else:
            child = number_at(following + row, child, nodes)
    put_at(predicts, slot, rows, wanted)
    tl.store(counts + b, taken)


@kernel
def number_at(array, place, size):
    """Return array[place] as int64, or -1 if the place is outside the array.

    array: address of the array's first number.
    place: the index; it may lie outside the array.
    size: length of the array.
    """
    return tl.load(array + place, mask=(place >= 0) & (place < size), other=-1).to(tl.int64)


@kernel
def put_at(array, place, size, value):
    """Set array[place] = value; do nothing if the place is outside the array.

    array: address of the array's first number.
    place: the index; it may lie outside the array.
    size: length of the array.
    value: the new value.
    """
    tl.store(array + place, value, mask=(place >= 0) & (place < size))


# Tokens. Range of the vocabulary that one program reduces. Untuned.
PART = 2048


def tree_speculative_sampling(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_final: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    threshold_single: float,
    threshold_acc: float,
    steps: int,
    into: Verified | None = None,
) -> Verified:
    """Return what is accepted of trees that are verified by chance, as `reference.tree_speculative_sampling`
    does.

    Every program of a request walks the same path; the first one writes it.

    candidates: [bs, n], tokens of the nodes, the root first.
    retrieve_index: [bs, n], the row of each node in the batch.
    retrieve_next_token: [bs, n], the first child of each node, -1 for none.
    retrieve_next_sibling: [bs, n], the next child of the same parent, -1 for none.
    uniform_samples: [bs, n], the uniform number of each node.
    uniform_samples_final: [bs], the uniform number with which each request's last token is drawn.
    target_probs: [bs, n, V], the target's probabilities after each node.
    draft_probs: [bs, n, V], the drafter's probabilities; None means zeros.
    threshold_single: a child whose own probability reaches it is accepted.
    threshold_acc: factor of the uniform numbers.
    steps: how many levels a path may go down.
    into: arrays that pass `can_hold`; entries that are not on a path keep their value. None: new arrays.
    """
    batch, nodes, kinds = target_probs.shape
    parts = -(-kinds // PART)
    drafted = draft_probs is not None
    found = into or empty_results(candidates, steps)
    ends = torch.empty(batch * (1 + parts), 2, dtype=torch.float64, device=target_probs.device)
    drafts = target_probs if draft_probs is None else draft_probs
    *tree, coins, last, target, draft = (
        each if each.is_contiguous() else each.contiguous()
        for each in (
            candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, uniform_samples,
            uniform_samples_final, target_probs, drafts,
        )
    )  # fmt: skip
    single = float(threshold_single)
    acc = float(threshold_acc)
    types = [each.dtype for each in (*tree, coins, last, target, draft)]
    aligned = (target.data_ptr() % 16 == 0, draft.data_ptr() % 16 == 0)
    specialization = (candidates.device, *types, *aligned, kinds, drafted)
    before = (*tree, coins, target, draft, *found, ends)
    later_arguments = (nodes, steps, kinds)
    with on_device_of(candidates):
        launch(
            _weigh,
            (batch, parts, 1),
            (*specialization, single, acc),
            (*before, *later_arguments, single, acc, drafted, PART),
        )
        room = power_of_two(parts)
        launch(
            _draw, (batch, 1, 1), specialization,
            (*tree, last, target, draft, *found, ends, *later_arguments, parts, drafted, PART, room),
        )  # fmt: skip
    return found


@kernel_of_any(*TREE, *FOUND, "coins", "ends", numbers=("nodes", "steps"))
def _weigh(
    candidates, slots, first, following, coins, target, draft, predicts, accepted, counts, ends,
    nodes, steps, kinds, single: tl.constexpr, acc: tl.constexpr, drafted: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """Walk one tree, and sum the probability mass of one range of the vocabulary after the path's last node.

    ends: float64 [bs * (1 + parts), 2]: first each request's last node and its row; then each range's mass
        that the rejected children leave, and its whole mass.
    candidates: [bs, n], tokens of the nodes, the root first.
    slots: [bs, n], the row of each node in the batch.
    first: [bs, n], the first child of each node, -1 for none.
    following: [bs, n], the next child of the same parent, -1 for none.
    coins: [bs, n], uniform numbers.
    target: [bs, n, kinds], the target's probabilities after each node.
    draft: [bs, n, kinds], the drafter's probabilities, if `drafted`.
    predicts: int32 [bs * n], receives the token after each row on the path; see `Verified`.
    accepted: int32 [bs, levels + 1], receives the rows of the accepted nodes.
    counts: int32 [bs], receives the number of accepted drafts.
    nodes: number of nodes of each tree.
    steps: how many levels a path may go down.
    kinds: tokens of the vocabulary.
    single: a child whose own probability reaches it is accepted.
    acc: factor of the uniform numbers.
    drafted: whether there are draft probabilities.
    part: tokens of one range.
    """
    b = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1)
    rows = tl.num_programs(0) * nodes
    row = b * nodes
    writes = number == 0
    nothing = tl.full((), 0, tl.int64)
    taken = nothing
    looked = nothing
    at = nothing
    enough = tl.full((), single, tl.float64)
    share = tl.full((), acc, tl.float64)
    slot = number_at(slots + row, at, nodes)
    tl.store(accepted + b * (steps + 1), slot, mask=writes)
    coin = _chance(coins + row) * share
    mass = tl.full((), 0.0, tl.float64)
    child = number_at(first + row, at, nodes)
    while (child >= 0) & (child < nodes) & (taken < steps) & (looked < nodes):
        looked += 1
        token = number_at(candidates + row, child, nodes)
        chance = _chances(target + (row + at) * kinds, token, (token >= 0) & (token < kinds))
        mass += chance
        if ((chance > 0) & (coin <= mass)) | (chance >= enough):
            put_at(predicts, slot, tl.where(writes, rows, 0), token)
            slot = number_at(slots + row, child, nodes)
            taken += 1
            tl.store(accepted + b * (steps + 1) + taken, slot, mask=writes)
            at = child
            mass = mass * 0
            coin = _chance(coins + row + at) * share
            child = number_at(first + row, child, nodes)
        else:
            child = number_at(following + row, child, nodes)
    tl.store(counts + b, taken, mask=writes)
    tl.store(ends + 2 * b, at.to(tl.float64), mask=writes)
    tl.store(ends + 2 * b + 1, slot.to(tl.float64), mask=writes)
    tokens = number * part + tl.arange(0, part)
    left, whole = _left(
        candidates + row, first + row, following + row, target, draft, row, at, taken == steps,
        tokens, nodes, kinds, drafted,
    )  # fmt: skip
    place = ends + (tl.num_programs(0) + b * tl.num_programs(1) + number) * 2
    tl.store(place, tl.sum(left, 0))
    tl.store(place + 1, tl.sum(whole, 0))


@kernel_of_any(*TREE, *FOUND, "coins", "ends", numbers=("nodes", "steps", "parts"))
def _draw(
    candidates, slots, first, following, coins, target, draft, predicts, accepted, counts, ends,
    nodes, steps, kinds, parts, drafted: tl.constexpr, part: tl.constexpr, room: tl.constexpr,
):  # fmt: skip
    """Draw the final token of one request: first the range of the vocabulary, then a token in this range.

    If the rejected children leave nothing, the token is drawn from the target's whole probabilities.

    candidates: [bs, n], tokens of the nodes, the root first.
    slots: [bs, n], the row of each node in the batch.
    first: [bs, n], the first child of each node, -1 for none.
    following: [bs, n], the next child of the same parent, -1 for none.
    coins: [bs], uniform numbers of the last draw.
    target: [bs, n, kinds], the target's probabilities after each node.
    draft: [bs, n, kinds], the drafter's probabilities, if `drafted`.
    predicts: int32 [bs * n], receives the token after each row on the path; see `Verified`.
    accepted: int32 [bs, levels + 1], receives the rows of the accepted nodes.
    counts: int32 [bs], receives the number of accepted drafts.
    ends: what `_weigh` found.
    nodes: number of nodes of each tree.
    steps: how many levels a path may go down.
    kinds: tokens of the vocabulary.
    parts: number of ranges of the vocabulary.
    room: `parts`, rounded up to a power of two.
    drafted: whether there are draft probabilities.
    part: tokens of one range.
    """
    b = tl.program_id(0).to(tl.int64)
    row = b * nodes
    at = tl.load(ends + 2 * b).to(tl.int64)
    slot = tl.load(ends + 2 * b + 1).to(tl.int64)
    numbers = tl.arange(0, room)
    places = ends + (tl.num_programs(0) + b * parts + numbers) * 2
    rest = tl.load(places, mask=numbers < parts, other=0.0)
    rest_there = tl.sum(rest, 0) > 0
    weights = tl.where(rest_there, rest, tl.load(places + 1, mask=numbers < parts, other=0.0))
    goal = _chance(coins + b) * tl.sum(weights, 0)
    number = reach(weights, numbers, goal, room)
    tokens = number * part + tl.arange(0, part)
    left, whole = _left(
        candidates + row, first + row, following + row, target, draft, row, at, tl.load(counts + b) == steps,
        tokens, nodes, kinds, drafted,
    )  # fmt: skip
    passed = tl.sum(tl.where(numbers < number, weights, 0.0), 0)
    token = reach(tl.where(rest_there, left, whole), tokens, goal - passed, kinds)
    put_at(predicts, slot, tl.num_programs(0) * nodes, token)


@kernel
def reach(weights, numbers, goal, size):
    """Return the first number at which the cumulative weight exceeds the goal; the result always has a
    positive weight.

    weights [0.2, 0, 0.3], goal 0.2 -> 2. If rounding leaves the goal unreached, return the last one with a
    weight.

    weights: [n], not negative.
    numbers: int [n], the numbers that the weights belong to, ascending.
    goal: what the cumulative weight has to exceed.
    size: larger than every number.
    """
    there = weights > 0
    passed = there & (tl.cumsum(weights, 0) > goal)
    reached = tl.min(tl.where(passed, numbers, size), 0)
    return tl.where(reached < size, reached, tl.maximum(tl.max(tl.where(there, numbers, 0), 0), 0))


@kernel
def _left(
    candidates, first, following, target, draft, row, at, whole, tokens, nodes, kinds, drafted: tl.constexpr
):
    """Return the tokens' probabilities after node `at`: what the rejected children leave (all of it if
    `whole`), and all.

    candidates: address of the request's tokens.
    first: address of the first child of each of its nodes.
    following: address of the next sibling of each of its nodes.
    target: the target's probabilities of all rows.
    draft: the drafter's probabilities of all rows, if `drafted`.
    row: row of the request's root.
    at: number of the node.
    whole: whether nothing is subtracted in the first result.
    tokens: [part], token ids.
    nodes: number of nodes of the tree.
    kinds: tokens of the vocabulary.
    drafted: whether there are draft probabilities.
    """
    start = (row + at) * kinds
    chance = _chances(target + start, tokens, tokens < kinds)
    left = chance
    if drafted:
        left = tl.maximum(chance - _chances(draft + start, tokens, tokens < kinds), 0.0)
    child = number_at(first, at, nodes)
    looked = at * 0
    # The path ended at this node, so all of its children were rejected.
    while (child >= 0) & (looked < nodes):
        looked += 1
        left = tl.where(tokens == number_at(candidates, child, nodes), 0.0, left)
        child = number_at(following, child, nodes)
    return tl.where(whole, chance, left), chance


@kernel
def _chances(array, tokens, there):
    """Load probabilities as float64.

    array: address of a node's probabilities.
    tokens: token ids.
    there: which of them exist; the others become 0.
    """
    return tl.load(array + tokens, mask=there, other=0.0).to(tl.float64)


@kernel
def _chance(place):
    """Load one number as float64.

    place: address of the number.
    """
    return tl.load(place).to(tl.float64)
