"""Finds on the GPU which rows a draft head computes next, from a verification result that the host has not
read.

Acceptance is that of `specsot.core.tree.accept`: from the root to the child whose token is the node's target,
and on.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specsot_kernels.gpu.launching import kernel_for_any, on_device_of, power_of_two
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
    most = numbers.due_tokens.shape[1] - 1
    attending = numbers.leads.numel() // numbers.asked.numel()
    grown = numbers.depths.numel()
    hidden = fresh.shape[1]
    room = verified.slots.shape[1]
    with on_device_of(fresh):
        _accept[(trees, most)](
            *verified, *numbers, fresh, features, room, most, numbers.due.stride(0),
            numbers.grown.stride(0), attending, grown, hidden, features.stride(0), fresh.stride(0), ids,
            NODES, power_of_two(room), power_of_two(attending), power_of_two(hidden), num_warps=4,
        )  # fmt: skip


@kernel_for_any(
    "room",
    "most",
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
    targets, tokens, parents, told, slots, due, asked, leads, grown, places, below, said, fresh, features,
    room, most, from_due, from_grown, attending, many, hidden, from_feature, from_fresh, ids,
    nodes: tl.constexpr, width: tl.constexpr, across: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Follow one tree's accepted path. This program copies the features of the path's `turn`-th row; program
    0 also writes the numbers.

    targets, tokens, parents, told, slots: the fields of `VerifiedTrees`, `told` being its `trees`.
    due, asked, leads, grown, places, below, said: the fields of `DueNumbers`, of which `places` and `below`
        (its `depths`) are read; `said` is its `due_tokens`.
    fresh: [rows, hidden], features of the frame's rows.
    features: [slots, hidden], receives the features of accepted rows.
    room: KV slots of a tree.
    most: due rows of a tree at most.
    from_due, from_grown: numbers from one row of due and of grown to the next.
    attending: rows of a tree that attend.
    many: rows of a tree that are grown.
    hidden: numbers of a feature.
    from_feature, from_fresh: numbers from one row of features and of fresh to the next.
    ids: number of token ids that the head knows.
    nodes: nodes that are compared at a time.
    width, across, size: room, attending and hidden, rounded up to powers of two.
    """
    tree = tl.program_id(0).to(tl.int64)
    turn = tl.program_id(1)
    first = tl.load(told + tree * 4).to(tl.int64)
    count = tl.load(told + tree * 4 + 1)
    committed = tl.load(told + tree * 4 + 2)
    base = tl.load(told + tree * 4 + 3)
    place = tl.arange(0, nodes)
    node = 0
    taken = 0
    mine = -1
    goes = 1
    while goes != 0:
        mine = tl.where(taken == turn, node, mine)
        target = tl.load(targets + first + node)
        if turn == 0:
            # The due row of an accepted node has the node's target as its token and the node's feature.
            token = tl.where((target >= 0) & (target < ids), target, 0)
            slot = tl.load(slots + tree * room + taken)
            at = tree * most + taken
            tl.store(due + at, token)
            tl.store(due + from_due + at, committed + taken)
            tl.store(due + 2 * from_due + at, slot)
            tl.store(due + 3 * from_due + at, slot)
            tl.store(said + tree * (most + 1) + 1 + taken, target)
        taken += 1
        child = count
        for start in range(0, count, nodes):
            there = start + place < count
            above = tl.load(parents + first + start + place, mask=there, other=-2)
            held = tl.load(tokens + first + start + place, mask=there, other=-2)
            found = there & (start + place > node) & (above == node) & (held == target)
            child = tl.minimum(child, tl.min(tl.where(found, start + place, count), 0))
        goes = tl.where((child < count) & (taken < most), 1, 0)
        node = child
    if turn == 0:
        tl.store(said + tree * (most + 1), taken)
        tl.store(asked + tree, (tree * most + taken - 1).to(tl.int32))
        number = tl.arange(0, across)
        attend = tl.minimum(taken, attending)
        # The last `attend` due rows: row i of them sees its own column and all before it.
        lead = tl.where(number < attend, base + taken - attend + number + 1, 0)
        tl.store(leads + tree * attending + number, lead, mask=number < attending)
        row = tl.arange(0, width)
        held = row < many
        goal = tl.load(places + tree * many + row, mask=held, other=0)
        deep = tl.load(below + row, mask=held, other=0)
        tl.store(grown + goal, committed + taken + deep, mask=held)
        own = tl.load(slots + tree * room + taken + row, mask=held, other=-1)
        tl.store(grown + from_grown + goal, own, mask=held)
        tl.store(grown + 2 * from_grown + goal, tl.full((width,), 0, tl.int32) + base + taken, mask=held)
    if mine >= 0:
        column = tl.arange(0, size)
        live = column < hidden
        row_of = tl.load(slots + tree * room + turn).to(tl.int64)
        values = tl.load(fresh + (first + mine) * from_fresh + column, mask=live, other=0.0)
        tl.store(features + row_of * from_feature + column, values, mask=live)
