"""Finds on the GPU which rows a draft head computes next, from a verification result that the host has not
read.

Acceptance is that of `specsot.core.tree.accept`: the accepted path begins at the root, and continues from
each node to the child whose token is the node's target token, until there is no such child.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from collections.abc import Callable

import triton.language as tl
from torch import Tensor

from specsot_kernels.gpu.launching import (
    array_specialization,
    kernel,
    kernel_for_any,
    kind_of,
    launch,
    on_device_of,
    power_of_two,
)
from specsot_kernels.growing import DueNumbers, VerifiedTrees

# Nodes. How many nodes of a tree are compared with a target token at a time. Untuned.
NODES = 64


# Launches the kernel for one frame, see `prepare_accept_rows`. Arguments: the target after each node, int32
# [rows]; the features of the frame's rows, [rows, hidden]; the number of token ids that the head knows.
AcceptRows = Callable[[Tensor, Tensor, int], None]


def prepare_accept_rows(
    verified: VerifiedTrees, numbers: DueNumbers, features: Tensor, page_rows: int
) -> AcceptRows:
    """Return a function that verifies the trees in `verified`, writes their due rows to `numbers`, and copies
    the features of accepted rows to their slots.

    The trees of many steps lie in the same arrays. So the addresses, types and alignments of these arrays,
    which a launch needs, are looked up here once. The function may be called again after the contents of the
    arrays have changed. If one of them lies at another address or has another shape, prepare another
    function.

    Numbers of trees beyond those in `verified` keep their value. Places of due rows that a tree does not need
    get the slot -1; their other numbers keep their value.

    verified: the arrays in which the trees of a frame lie. The pages of `verified.windows` have rows for the
        largest number of due rows and the number of grown rows together, from the first due row on.
    numbers: the arrays that are written; `places` and `depths` are read.
    features: [slots, hidden], receives the features of accepted rows. For a head without features, `hidden`
        is 0; then nothing is copied, and the function takes features of any number of rows.
    page_rows: number of KV slots of a page.

    A target is negative if the node's logits are not finite numbers. A target outside of 0 .. number of token
    ids - 1 is written to `numbers.due_tokens` as it is, and to the due row's token, which is fed to the head,
    as 0.

    The kernel is compiled once for each number of rows of a window, of attending rows, and of numbers of a
    feature, each rounded up to a power of two, and once more for heads without features.

    Example: a tree [r a b c] with a and b below r and c below b, and the targets [b, x, c, y]. The accepted
        nodes are 0, 2 and 3, and the due tokens are b, c and y.
    """
    trees = verified.trees.shape[1]
    max_due = numbers.due_tokens.shape[1] - 1
    attending = numbers.leads.numel() // numbers.asked.numel()
    hidden = features.shape[1]
    num_pages = verified.windows.shape[1] - 1
    hidden_block = power_of_two(hidden) if hidden else 0
    constants = (NODES, power_of_two(num_pages * page_rows), power_of_two(attending), hidden_block)
    sizes = (
        *(trees, num_pages, page_rows, max_due, numbers.due.stride(0), numbers.grown.stride(0)),
        *(attending, numbers.depths.numel(), hidden, features.stride(0)),
    )
    # Without features, only the programs (tree, 0) have something to do.
    grid = (trees, max_due if hidden else 1, 1)
    arrays = (*verified, *numbers, features)
    kind = kind_of(*array_specialization(*arrays), *constants)
    addresses = [array.data_ptr() for array in arrays]

    def accept_rows(targets: Tensor, frame_features: Tensor, num_ids: int) -> None:
        """Launch the kernel, without waiting for it.

        targets: int32 [rows], the base model's target token after each node.
        frame_features: [rows, hidden], features of the frame's rows; with `hidden` 0, of any number of rows.
        num_ids: number of token ids that the head knows.
        """
        given = targets, frame_features
        with on_device_of(targets):
            launch(
                _accept, grid, (*array_specialization(*given), kind),
                (*given, *arrays, *sizes, frame_features.stride(0), num_ids, *constants),
                (targets.data_ptr(), frame_features.data_ptr(), *addresses), num_warps=4,
            )  # fmt: skip

    return accept_rows


@kernel_for_any(
    "num_trees",
    "num_pages",
    "page_rows",
    "max_due",
    "due_stride",
    "grown_stride",
    "attending",
    "num_grown",
    "hidden",
    "feature_stride",
    "frame_stride",
    "num_ids",
)
def _accept(
    targets, frame_features, windows, trees, tokens, parents, due, asked, leads, grown, places, depths,
    due_tokens, features,
    num_trees, num_pages, page_rows, max_due, due_stride, grown_stride, attending, num_grown, hidden,
    feature_stride, frame_stride, num_ids,
    block: tl.constexpr, rows_block: tl.constexpr, attending_block: tl.constexpr, hidden_block: tl.constexpr,
):  # fmt: skip
    """Follow one tree's accepted path. Program (tree, i) copies the feature of the i-th node of the path, the
    root being node 0. Program (tree, 0) also writes the tree's numbers. Nothing is copied if the path has
    fewer nodes, or if `hidden_block` is 0.

    targets: int32 [rows], the target token after each node.
    frame_features: [rows, hidden], features of the frame's rows.
    windows: int32 [num_trees, 1 + num_pages], a column of each tree's sequence and the pages from there on.
    trees: int32 [4, num_trees], of each tree: the first row, the number of nodes, and the number and the
        column of the sequence's first due draft row, which is fed the root's target.
    tokens: int32 [rows], the token of each node.
    parents: int32 [rows], the parent of each node within its tree.
    due: int32 [4, n], receives tokens, positions, KV slots and feature origins of the due rows, and the KV
        slots -1 of the places after them; see `DueNumbers`.
    asked: int32 [trees], receives the index in `due` of each tree's last due row.
    leads: int32 [trees, attending], receives the number of columns that each attending row sees.
    grown: int32 [3, m], receives positions, KV slots and bases of the rows that are grown afterwards.
    places: int32 [trees, num_grown], where in `grown` the rows of each tree are.
    depths: int32 [num_grown], depth of each grown row in the next tree, 0 for a child of its root.
    due_tokens: int32 [trees, 1 + max_due], receives the number of due rows of each tree, then their tokens.
    features: [slots, hidden], receives the features of accepted rows.
    num_trees: number of trees.
    num_pages: number of pages of a window; together they have rows for max_due + num_grown rows from the
        first due row on.
    page_rows: number of KV slots of a page.
    max_due: largest number of due rows of a tree.
    due_stride: elements from one row of `due` to the next.
    grown_stride: elements from one row of `grown` to the next.
    attending: number of rows of a tree that attend; the last due rows are the ones that do.
    num_grown: number of rows of a tree that are grown.
    hidden: number of elements of a feature.
    feature_stride: elements from one row of `features` to the next.
    frame_stride: elements from one row of `frame_features` to the next.
    num_ids: number of token ids that the head knows.
    block: number of nodes that are compared at a time.
    rows_block: number of rows of a window, rounded up to a power of two.
    attending_block: `attending`, rounded up to a power of two.
    hidden_block: `hidden`, rounded up to a power of two; 0 if there are no features.
    """
    tree = tl.program_id(0).to(tl.int64)
    path_row = tl.program_id(1)
    first = tl.load(trees + tree).to(tl.int64)
    count = tl.load(trees + num_trees + tree)
    first_due = tl.load(trees + 2 * num_trees + tree)
    first_column = tl.load(trees + 3 * num_trees + tree)
    window = windows + tree * (1 + num_pages)
    # Row of the window in which the first due row lies.
    first_in_window = first_column - tl.load(window)
    offset = tl.arange(0, block)
    node = 0
    num_due = 0
    own_node = -1
    continues = 1
    while continues != 0:
        own_node = tl.where(num_due == path_row, node, own_node)
        target = tl.load(targets + first + node)
        if path_row == 0:
            # The due row of an accepted node has the node's target as its token and the node's feature.
            token = tl.where((target >= 0) & (target < num_ids), target, 0)
            slot = _slot(window, first_in_window + num_due, page_rows, True)
            at = tree * max_due + num_due
            tl.store(due + at, token)
            tl.store(due + due_stride + at, first_due + num_due)
            tl.store(due + 2 * due_stride + at, slot)
            tl.store(due + 3 * due_stride + at, slot)
            tl.store(due_tokens + tree * (max_due + 1) + 1 + num_due, target)
        num_due += 1
        # The number of the child whose token is the target; `count` if there is none.
        child = count
        for start in range(0, count, block):
            in_tree = start + offset < count
            parent = tl.load(parents + first + start + offset, mask=in_tree, other=-2)
            node_token = tl.load(tokens + first + start + offset, mask=in_tree, other=-2)
            found = in_tree & (start + offset > node) & (parent == node) & (node_token == target)
            child = tl.minimum(child, tl.min(tl.where(found, start + offset, count), 0))
        continues = tl.where((child < count) & (num_due < max_due), 1, 0)
        node = child
    if path_row == 0:
        tl.store(due_tokens + tree * (max_due + 1), num_due)
        tl.store(asked + tree, (tree * max_due + num_due - 1).to(tl.int32))
        number = tl.arange(0, attending_block)
        attend = tl.minimum(num_due, attending)
        # The last `attend` due rows: row i of them sees its own column and all before it.
        lead = tl.where(number < attend, first_column + num_due - attend + number + 1, 0)
        tl.store(leads + tree * attending + number, lead, mask=number < attending)
        row = tl.arange(0, rows_block)
        # The slots of an earlier step that had more due rows must not be written again.
        is_unused = (row >= num_due) & (row < max_due)
        tl.store(due + 2 * due_stride + tree * max_due + row, -1, mask=is_unused)
        is_grown = row < num_grown
        place = tl.load(places + tree * num_grown + row, mask=is_grown, other=0)
        depth = tl.load(depths + row, mask=is_grown, other=0)
        tl.store(grown + place, first_due + num_due + depth, mask=is_grown)
        slot_of_row = _slot(window, first_in_window + num_due + row, page_rows, is_grown)
        tl.store(grown + grown_stride + place, slot_of_row, mask=is_grown)
        base = tl.full((rows_block,), 0, tl.int32) + first_column + num_due
        tl.store(grown + 2 * grown_stride + place, base, mask=is_grown)
    # The two conditions are not joined: the first one has only constants, so that Triton evaluates it when it
    # compiles the kernel. A block of 0 numbers, which Triton does not support, is then never compiled.
    if hidden_block > 0:  # noqa: SIM102
        if own_node >= 0:
            column = tl.arange(0, hidden_block)
            in_feature = column < hidden
            own_slot = _slot(window, first_in_window + path_row, page_rows, True).to(tl.int64)
            values = tl.load(
                frame_features + (first + own_node) * frame_stride + column, mask=in_feature, other=0.0
            )
            tl.store(features + own_slot * feature_stride + column, values, mask=in_feature)


@kernel
def _slot(window, row, page_rows, exists):
    """Return the KV slots of rows of a window.

    window: a column, and the numbers of the pages from that column on.
    row: numbers of the rows, from that column on.
    page_rows: number of KV slots of a page.
    exists: which of the rows lie in the window; the slots of the others are undefined.

        # pages [7 2] of 4 rows, rows [1 6] -> slots [29 10]
    """
    page = tl.load(window + 1 + row // page_rows, mask=exists, other=0)
    return page * page_rows + row % page_rows
