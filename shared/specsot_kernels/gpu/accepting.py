"""Finds on the GPU which rows a draft head computes next, from a verification result that the host has not
read.

Acceptance is that of `specsot.core.tree.accept`: from the root to the child whose token is the node's target,
and on.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specsot_kernels.gpu.launching import kernel_for_any, kinds_of, launch, on_device_of, power_of_two
from specsot_kernels.growing import DueNumbers, VerifiedTrees

# Nodes. How many of a tree are compared at a time. Untuned.
NODES = 64


def accept_rows(
    verified: VerifiedTrees, numbers: DueNumbers, fresh: Tensor, features: Tensor, ids: int
) -> None:
    """Write the numbers of all trees in `verified`, and copy features of accepted rows to their slots.

    Numbers of trees beyond those in `verified` keep their value.

    fresh: [rows, hidden], features of the frame's rows.
    features: [slots, hidden], receives the features of accepted rows.
    ids: number of token ids that the head knows; another token is reported as it is, and fed as 0.
    verified: the trees of a frame, with their targets.
    numbers: the arrays that are written.

    The kernel is compiled once for every width of `slots`.

    A tree [r a b c] with a and b below r and c below b, whose targets are [b, x, c, y]: accepted nodes are 0,
    2 and 3, and the due tokens are b, c, y.
    """
    trees = verified.trees.shape[0]
    max_due = numbers.due_tokens.shape[1] - 1
    attending = numbers.leads.numel() // numbers.asked.numel()
    grown = numbers.depths.numel()
    hidden = fresh.shape[1]
    room = verified.slots.shape[1]
    arrays = (*verified, *numbers, fresh, features)
    constants = (NODES, power_of_two(room), power_of_two(attending), power_of_two(hidden))
    with on_device_of(fresh):
        launch(
            _accept, (trees, max_due, 1), (*kinds_of(*arrays), *constants),
            (*arrays, room, max_due, numbers.due.stride(0), numbers.grown.stride(0), attending, grown, hidden,
             features.stride(0), fresh.stride(0), ids, *constants), num_warps=4,
        )  # fmt: skip


@kernel_for_any(
    "room",
    "max_due",
    "from_due",
    "from_grown",
    "attending",
    "many",
    "hidden",
    "from_feature",
    "from_fresh",
    "ids",
)
def _accept(
    targets, tokens, parents, trees, slots, due, last_due, leads, grown, places, depths, due_tokens, fresh,
    features,
    room, max_due, from_due, from_grown, attending, many, hidden, from_feature, from_fresh, ids,
    nodes: tl.constexpr, width: tl.constexpr, across: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Follow one tree's accepted path. This program copies the features of the path's `turn`-th row; program
    0 also writes the numbers.

    targets: int32 [rows], the target token after each node; see `VerifiedTrees`.
    tokens: int32 [rows], the token of each node.
    parents: int32 [rows], the parent of each node within its tree.
    trees: int32 [trees, 3], first row, number of nodes and number of tokens before the root of each tree.
    slots: int32 [trees, room], KV slots of each sequence's draft rows.
    due: int32 [4, n], receives tokens, positions, KV slots and feature origins of the due rows; see
        `DueNumbers`.
    last_due: int32 [trees], receives the place of each tree's last due row.
    leads: int32 [trees, attending], receives how many columns each attending row sees.
    grown: int32 [3, m], receives positions, KV slots and bases of the rows that are grown afterwards.
    places: int32 [trees, many], where in `grown` the rows of each tree are.
    depths: int32 [many], how far below the root's child each grown row is.
    due_tokens: int32 [trees, 1 + max_due], receives the number of due rows of each tree, then their tokens.
    fresh: [rows, hidden], features of the frame's rows.
    features: [slots, hidden], receives the features of accepted rows.
    room: KV slots of a tree.
    max_due: largest number of due rows of a tree.
    from_due: numbers from one row of `due` to the next.
    from_grown: numbers from one row of `grown` to the next.
    attending: rows of a tree that attend.
    many: rows of a tree that are grown.
    hidden: numbers of a feature.
    from_feature: numbers from one row of `features` to the next.
    from_fresh: numbers from one row of `fresh` to the next.
    ids: number of token ids that the head knows.
    nodes: nodes that are compared at a time.
    width: `room`, rounded up to a power of two.
    across: `attending`, rounded up to a power of two.
    size: `hidden`, rounded up to a power of two.
    """
    tree = tl.program_id(0).to(tl.int64)
    turn = tl.program_id(1)
    first = tl.load(trees + tree * 4).to(tl.int64)
    count = tl.load(trees + tree * 4 + 1)
    committed = tl.load(trees + tree * 4 + 2)
    base = tl.load(trees + tree * 4 + 3)
    place = tl.arange(0, nodes)
    node = 0
    taken = 0
    own_node = -1
    continues = 1
    while continues != 0:
        own_node = tl.where(taken == turn, node, own_node)
        target = tl.load(targets + first + node)
        if turn == 0:
            # The due row of an accepted node has the node's target as its token and the node's feature.
            token = tl.where((target >= 0) & (target < ids), target, 0)
            slot = tl.load(slots + tree * room + taken)
            at = tree * max_due + taken
            tl.store(due + at, token)
            tl.store(due + from_due + at, committed + taken)
            tl.store(due + 2 * from_due + at, slot)
            tl.store(due + 3 * from_due + at, slot)
            tl.store(due_tokens + tree * (max_due + 1) + 1 + taken, target)
        taken += 1
        child = count
        for start in range(0, count, nodes):
            there = start + place < count
            above = tl.load(parents + first + start + place, mask=there, other=-2)
            held = tl.load(tokens + first + start + place, mask=there, other=-2)
            found = there & (start + place > node) & (above == node) & (held == target)
            child = tl.minimum(child, tl.min(tl.where(found, start + place, count), 0))
        continues = tl.where((child < count) & (taken < max_due), 1, 0)
        node = child
    if turn == 0:
        tl.store(due_tokens + tree * (max_due + 1), taken)
        tl.store(last_due + tree, (tree * max_due + taken - 1).to(tl.int32))
        number = tl.arange(0, across)
        attend = tl.minimum(taken, attending)
        # The last `attend` due rows: row i of them sees its own column and all before it.
        lead = tl.where(number < attend, base + taken - attend + number + 1, 0)
        tl.store(leads + tree * attending + number, lead, mask=number < attending)
        row = tl.arange(0, width)
        held = row < many
        goal = tl.load(places + tree * many + row, mask=held, other=0)
        deep = tl.load(depths + row, mask=held, other=0)
        tl.store(grown + goal, committed + taken + deep, mask=held)
        own = tl.load(slots + tree * room + taken + row, mask=held, other=-1)
        tl.store(grown + from_grown + goal, own, mask=held)
        tl.store(grown + 2 * from_grown + goal, tl.full((width,), 0, tl.int32) + base + taken, mask=held)
    if own_node >= 0:
        column = tl.arange(0, size)
        live = column < hidden
        row_of = tl.load(slots + tree * room + turn).to(tl.int64)
        values = tl.load(fresh + (first + own_node) * from_fresh + column, mask=live, other=0.0)
        tl.store(features + row_of * from_feature + column, values, mask=live)
