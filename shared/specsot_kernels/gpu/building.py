"""Builds draft trees in Triton: the best candidates of every request, then trees from candidates or from
known parents.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.contract import DraftResults, TreeArrays, TreeMaskMode
from specsot_kernels.gpu.launching import kernel, kernel_for_any, launch, on_device_of, power_of_two

# The layout FULL_MASK.
FULL = tl.constexpr(TreeMaskMode.FULL_MASK.value)
# The layout QLEN_ONLY_BITPACKING.
PACKED = tl.constexpr(TreeMaskMode.QLEN_ONLY_BITPACKING.value)
# (largest number of nodes, element type) of the words of QLEN_ONLY_BITPACKING.
WORDS = ((8, torch.uint8), (16, torch.uint16), (32, torch.uint32))
# Numbers from this one on need 64 bits, and a compiled form of their own.
LONG = 1 << 31
# Nodes. Largest tile: 64 x 64 nodes fit the registers of four warps.
ROWS = 64


def build_trees(
    verified: Tensor,
    parent_list: Tensor,
    selected: Tensor,
    drafts: Tensor,
    seq_lens: Tensor,
    topk: int,
    mode: TreeMaskMode,
    total: int | None,
) -> TreeArrays:
    """Return trees from the chosen candidates, as `reference.build_trees` does.

    A candidate whose parent was not chosen becomes an orphan: no node's child.

    verified: [bs], the newest token of each request.
    parent_list: [bs, k * (S - 1) + 1], the parent of each group of k candidates.
    selected: [bs, n - 1], flat numbers of the chosen candidates, ascending.
    drafts: [bs, n - 1], the tokens of these candidates.
    seq_lens: [bs], number of tokens before each request's newest token.
    topk: k, candidates below each node that was drafted from.
    mode: how the attention mask is laid out; see TreeMaskMode.
    total: sum of seq_lens; None: it is computed, for which the host waits.
    """
    batch = len(verified)
    nodes = drafts.shape[1] + 1
    rows = verified.new_empty((6, batch * nodes), dtype=torch.long)
    made = _arrays(rows, _blank_mask(batch, nodes, seq_lens, mode, total), batch)
    _build_into(made, rows[5], (verified, parent_list, selected, drafts, seq_lens), topk, mode)
    return made


def _build_into(
    results: TreeArrays, parents: Tensor, arguments: Sequence[Tensor], topk: int, mode: TreeMaskMode
) -> None:
    """Build trees into contiguous arrays; of a full mask only the trees' columns are written.

    Nothing is returned. Arguments that are not contiguous are copied first.

    parents: int64 [bs * n], scratch.
    arguments: the first five arguments of `build_trees`.
    results: the arrays that are written.
    topk: k, candidates below each node that was drafted from.
    mode: how the attention mask is laid out; see TreeMaskMode.
    """
    verified, parent_list, _, drafts, _ = arguments
    nodes, groups, (mask, *outputs) = drafts.shape[1] + 1, parent_list.shape[1], results
    inputs = [each if each.is_contiguous() else each.contiguous() for each in arguments]
    arrays = (*inputs, *outputs, parents, mask)
    size = mask.numel()
    numbers = (nodes, topk, groups)
    specialization = (
        verified.device, *[each.dtype for each in inputs], mask.dtype,
        *[each.data_ptr() % 16 == 0 for each in arrays], *numbers, size < LONG, mode.value,
    )  # fmt: skip
    with on_device_of(verified):
        launch(
            _build,
            (verified.shape[0], 1, 1),
            specialization,
            (*arrays, *numbers, size, mode.value, _tile(nodes)),
        )


def arrange_trees(
    tokens: Tensor, parents: Tensor, seq_lens: Tensor, mode: TreeMaskMode, total: int | None
) -> TreeArrays:
    """Return trees whose parents are known, as `reference.arrange_trees` does.

    A parent that does not precede its node counts as none.

    tokens: [bs, n], the token of each node, the root first.
    parents: [bs, n], the parent of each node, as a node number; -1 for none.
    seq_lens: [bs], number of tokens before each root.
    mode: how the attention mask is laid out; see TreeMaskMode.
    total: sum of seq_lens; None: it is computed, for which the host waits.
    """
    batch, nodes = tokens.shape
    rows = tokens.new_empty((6, batch * nodes), dtype=torch.long)
    rows[4].view(batch, nodes).copy_(tokens)
    mask = _blank_mask(batch, nodes, seq_lens, mode, total)
    made = _arrays(rows, mask, batch)
    with on_device_of(tokens):
        given = parents.contiguous(), seq_lens.contiguous()
        _arrange[(batch,)](*given, *made[1:5], mask, nodes, mask.numel(), mode.value, _tile(nodes))
    return made


def write_trees(arrays: Sequence[Tensor], arguments: Sequence[Tensor], topk: int, mode: TreeMaskMode) -> bool:
    """Run `build_trees` into the caller's arrays, and return whether these can be written directly.

    False is returned, with nothing written, if shapes, types or strides do not allow it. The mask must have
    the mode's type and at least as many entries as the trees' columns; positions and links must be int64 with
    bs * n entries; and all must be contiguous. A full mask is filled with true first.

    arrays: the first five arrays of a TreeArrays, which are written.
    arguments: the first five arguments of `build_trees`.
    topk: k, candidates below each node that was drafted from.
    mode: how the attention mask is laid out; see TreeMaskMode.
    """
    (mask, *others), (batch, below) = arrays, arguments[2].shape
    rows = batch * (below + 1)
    enough = rows * (1 if mode == TreeMaskMode.QLEN_ONLY_BITPACKING else below + 1)
    fits = mask.dtype == _kind_of_mask(below + 1, mode) and mask.numel() >= enough
    fits = fits and all(array.dtype == torch.long and array.numel() == rows for array in others)
    if not fits or not all(array.is_contiguous() for array in arrays):
        return False
    if mode == TreeMaskMode.FULL_MASK:
        mask.fill_(True)
    tokens = others[0].new_empty(rows)
    parents = others[0].new_empty(rows)
    _build_into(TreeArrays._make((*arrays, tokens)), parents, arguments, topk, mode)
    return True


def _tile(nodes: int) -> int:
    """Return the nodes of a tile: a power of two, at most ROWS.

    nodes: number of nodes of a tree.
    """
    return min(power_of_two(nodes), ROWS)


def _blank_mask(batch: int, nodes: int, seq_lens: Tensor, mode: TreeMaskMode, total: int | None) -> Tensor:
    """Return the mask's array; in a full mask all entries are true, in other modes they are not set yet.

    batch: number of requests.
    nodes: number of nodes of each tree.
    seq_lens: [bs], number of tokens before each root.
    mode: how the mask is laid out; see TreeMaskMode.
    total: sum of seq_lens; None: it is computed, for which the host waits.
    """
    kind = _kind_of_mask(nodes, mode)
    if mode == TreeMaskMode.FULL_MASK:
        text = int(seq_lens.sum()) if total is None else total
        return seq_lens.new_ones(nodes * text + batch * nodes * nodes, dtype=kind)
    return seq_lens.new_empty(batch * nodes * (nodes if mode == TreeMaskMode.QLEN_ONLY else 1), dtype=kind)


def _kind_of_mask(nodes: int, mode: TreeMaskMode) -> torch.dtype:
    """Return the element type of a mask: bool, or the smallest word that holds a tree.

    nodes: number of nodes of each tree.
    mode: how the mask is laid out; see TreeMaskMode.
    """
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        return next(kind for max_nodes, kind in WORDS if nodes <= max_nodes)
    return torch.bool


def _arrays(rows: Tensor, mask: Tensor, batch: int) -> TreeArrays:
    """Return the results as views of one allocation.

    rows: int64 [6, bs * n]: positions, index, children, siblings and tokens, then scratch.
    mask: the mask of all trees, which becomes a field of the result.
    batch: number of requests.
    """
    positions, index, first, following, tokens, _ = rows.unbind()
    return TreeArrays(
        mask, positions, index.view(batch, -1), first.view(batch, -1), following.view(batch, -1), tokens
    )


@kernel_for_any("size")
def _build(
    verified, parent_list, selected, drafts, seq_lens, positions, index, children, siblings, tokens, parents,
    mask, nodes, topk, groups, size, mode: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Find tokens and parents of one request's nodes, then lay out its tree.

    A candidate's parent is -1 if its group lies outside of `parent_list`, or its parent was not chosen.

    verified: [bs], the newest token of each request.
    parent_list: [bs, groups], the parent of each group of k candidates, as a flat number; -1 is the root.
    selected: [bs, n - 1], flat numbers of the chosen candidates, ascending.
    drafts: [bs, n - 1], the tokens of these candidates.
    seq_lens: [bs], number of tokens before each request's newest token.
    positions: int64 [bs * n], receives the position of each node.
    index: int64 [bs * n], receives the row of each node in the batch.
    children: int64 [bs * n], receives the first child of each node, -1 for none.
    siblings: int64 [bs * n], receives the next child of the same parent, -1 for none.
    tokens: int64 [bs * n], receives the token of each node.
    parents: int64 [bs * n], scratch: receives the parent of each node.
    mask: receives the mask.
    nodes: n, number of nodes of each tree.
    topk: k, candidates below each node that was drafted from.
    groups: number of entries of each request in `parent_list`.
    size: numbers of the mask.
    mode: layout of the mask; see `TreeMaskMode`.
    tile: number of nodes that are computed at once; the nodes of a tree are taken in runs of this length.
    """
    b = tl.program_id(0).to(tl.int64)
    tokens = tokens + b * nodes
    parents = parents + b * nodes
    # Node 1 is the first chosen candidate, so chosen + node is the address of a node's flat number.
    chosen = selected + b * (nodes - 1) - 1
    for top in range(0, nodes, tile):
        node = top + tl.arange(0, tile)
        drafted = (node > 0) & (node < nodes)
        token = tl.load(drafts + b * (nodes - 1) - 1 + node, mask=drafted, other=0).to(tl.int64)
        token = tl.where(node == 0, tl.load(verified + b).to(tl.int64), token)
        tl.store(tokens + node, token, mask=node < nodes)
        group = tl.load(chosen + node, mask=drafted, other=0).to(tl.int64) // topk
        known = drafted & (group >= 0) & (group < groups)
        wanted = tl.load(parent_list + b * groups + group, mask=known, other=-1).to(tl.int64)
        above = tl.full((tile,), -1, tl.int32)
        for left in range(1, nodes, tile):
            other = left + tl.arange(0, tile)
            flat = tl.load(chosen + other, mask=other < nodes, other=-2).to(tl.int64)
            same = flat[None, :] == wanted[:, None]
            above = tl.maximum(above, tl.max(tl.where(same, other[None, :], -1), 1))
        above = tl.where(group == 0, 0, above)
        tl.store(parents + node, tl.where(drafted, above, -1), mask=node < nodes)
    # Each thread reads parents that other threads wrote.
    tl.debug_barrier()
    _lay_out(parents, seq_lens, positions, index, children, siblings, mask, nodes, size, mode, tile)


@kernel
def _arrange(
    parents, seq_lens, positions, index, children, siblings, mask, nodes, size,
    mode: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Lay out one request's tree from given parents.

    parents: [bs, n], the parent of each node, as a node number; -1 for none.
    seq_lens: [bs], number of tokens before each root.
    positions: int64 [bs * n], receives the position of each node.
    index: int64 [bs * n], receives the row of each node in the batch.
    children: int64 [bs * n], receives the first child of each node, -1 for none.
    siblings: int64 [bs * n], receives the next child of the same parent, -1 for none.
    mask: receives the mask.
    nodes: n, number of nodes of each tree.
    size: number of entries of the mask.
    mode: layout of the mask; see `TreeMaskMode`.
    tile: nodes of a tile.
    """
    b = tl.program_id(0).to(tl.int64)
    parents += b * nodes
    _lay_out(parents, seq_lens, positions, index, children, siblings, mask, nodes, size, mode, tile)


@kernel
def _lay_out(
    parents, seq_lens, positions, index, children, siblings, mask, nodes, size,
    mode: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Derive links, positions and mask of one request's nodes from their parents, tile by tile.

    In a full mask, request b's rows begin after the rows of the requests before it, which have seq_lens + n
    columns each.

    parents: address of the request's parents.
    seq_lens: [bs], number of tokens before each root.
    positions: int64 [bs * n], receives the position of each node.
    index: int64 [bs * n], receives the row of each node in the batch.
    children: int64 [bs * n], receives the first child of each node, -1 for none.
    siblings: int64 [bs * n], receives the next child of the same parent, -1 for none.
    mask: receives the mask.
    nodes: n, number of nodes of each tree.
    size: number of entries of the mask.
    mode: layout of the mask; see `TreeMaskMode`.
    tile: nodes of a tile.
    """
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + b).to(tl.int64)
    start = b * nodes * nodes
    stride = length * 0 + nodes
    if mode == FULL:
        start = start + nodes * _sum_before(seq_lens, b) + length
        stride = length + nodes
    for top in range(0, nodes, tile):
        node = top + tl.arange(0, tile)
        own = _parent(parents, node, nodes)
        first = tl.full((tile,), nodes, tl.int32)
        following = tl.full((tile,), nodes, tl.int32)
        depth = tl.zeros((tile,), tl.int32)
        for left in range(0, nodes, tile):
            other = left + tl.arange(0, tile)
            theirs = _parent(parents, other, nodes)
            child = theirs[None, :] == node[:, None]
            first = tl.minimum(first, tl.min(tl.where(child, other[None, :], nodes), 1))
            sibling = (theirs[None, :] == own[:, None]) & (other[None, :] > node[:, None])
            sibling = sibling & (own[:, None] >= 0)
            following = tl.minimum(following, tl.min(tl.where(sibling, other[None, :], nodes), 1))
            seen = (other[None, :] == 0) | (other[None, :] == node[:, None])
            depth = (node > 0).to(tl.int32)
            at = own
            while tl.max(at, 0) > 0:
                seen = seen | (other[None, :] == at[:, None])
                depth += (at > 0).to(tl.int32)
                at = tl.where(at > 0, _parent(parents, at, nodes), -1)
            # Packed trees have at most 32 nodes, so that one tile holds whole words.
            if mode == PACKED:
                word = tl.sum(
                    tl.where(seen & (other < nodes)[None, :], 1, 0).to(tl.int64) << other[None, :], 1
                )
                tl.store(mask + b * nodes + node, word, mask=node < nodes)
            else:
                place = start + node[:, None] * stride + other[None, :]
                fits = (node < nodes)[:, None] & (other < nodes)[None, :] & (place < size)
                tl.store(mask + place, seen, mask=fits)
        row = b * nodes + node
        tl.store(positions + row, length + depth, mask=node < nodes)
        tl.store(index + row, row, mask=node < nodes)
        tl.store(children + row, tl.where(first == nodes, -1, first), mask=node < nodes)
        tl.store(siblings + row, tl.where(following == nodes, -1, following), mask=node < nodes)


@kernel
def _parent(parents, node, nodes):
    """Return the parents of a tile's nodes; -1 if a node has none, or one that does not precede it.

    parents: address of the request's parents.
    node: [tile], numbers of the nodes.
    nodes: number of nodes of the tree.
    """
    above = tl.load(parents + node, mask=(node >= 0) & (node < nodes), other=-1).to(tl.int32)
    return tl.where(above < node, above, -1)


@kernel
def _sum_before(seq_lens, b):
    """Return the summed lengths of the requests before a request.

    seq_lens: [bs], the lengths.
    b: number of the request.
    """
    total = b * 0
    for start in range(0, b, 128):
        each = start + tl.arange(0, 128)
        total += tl.sum(tl.load(seq_lens + each, mask=each < b, other=0).to(tl.int64), 0)
    return total


def organize_draft_results(
    score_list: Sequence[Tensor], token_list: Sequence[Tensor], parents_list: Sequence[Tensor], nodes: int
) -> DraftResults:
    """Return the best candidates of each request, as `reference.organize_draft_results` does.

    Of equal scores the lower number wins, and NaN ranks last. With one node, no candidate is chosen.

    score_list: cumulative scores of each level, [bs, 1, k], then [bs, k, k].
    token_list: tokens of each level, [bs, k], then [bs, k * k].
    parents_list: flat numbers of the candidates that each level keeps, [bs, k + 1], then [bs, k].
    nodes: number of nodes of each tree, the root included.
    """
    batch = len(score_list[0])
    scores = torch.cat([each.flatten(1) for each in score_list], dim=1)
    tokens = torch.cat(tuple(token_list), dim=1)
    known = torch.cat(tuple(parents_list[:-1]), dim=1) if len(parents_list) > 1 else parents_list[0][:, :1]
    selected, chosen = tokens.new_empty((2, batch, nodes - 1), dtype=torch.long).unbind()
    if nodes > 1:
        size = scores.shape[1]
        wide = scores.dtype == torch.float64
        with on_device_of(scores):
            _choose[(batch,)](scores, tokens, selected, chosen, size, nodes - 1, wide, power_of_two(size))
    return DraftResults(known.long(), selected, chosen)


@kernel
def _choose(
    scores, tokens, selected, chosen, size, wanted, wide: tl.constexpr, room: tl.constexpr
):  # fmt: skip
    """Choose the `wanted` best candidates of one request.

    A binary search finds the order of the worst one that is taken; candidates of equal order are taken by
    lower number.

    scores: [bs, size], the scores of all candidates of each request.
    tokens: [bs, size], their tokens.
    selected: int64 [bs, wanted], receives the numbers of the best candidates, ascending.
    chosen: int64 [bs, wanted], receives their tokens.
    size: number of candidates of a request.
    room: `size`, rounded up to a power of two.
    wanted: how many to choose.
    wide: whether scores are float64.
    """
    b = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, room)
    there = number < size
    score = tl.load(scores + b * size + number, mask=there, other=0.0)
    score = score.to(tl.float64) if wide else score.to(tl.float32)
    # NaN ranks last, and negative zero must equal zero.
    score = tl.where(score == score, score, float("-inf")) + 0.0
    if wide:
        order = score.to(tl.int64, bitcast=True)
        order = order ^ ((order >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        short = score.to(tl.int32, bitcast=True)
        order = (short ^ ((short >> 31) & 0x7FFFFFFF)).to(tl.int64)
    positive = tl.sum((there & (order >= 0)).to(tl.int32), 0) >= wanted
    threshold = tl.where(positive, 0, -9223372036854775808 if wide else -2147483648).to(tl.int64)
    for bit in range(62 if wide else 30, -1, -1):
        higher = threshold + (tl.full((), 1, tl.int64) << bit)
        enough = tl.sum((there & (order >= higher)).to(tl.int32), 0) >= wanted
        threshold = tl.where(enough, higher, threshold)
    above = there & (order > threshold)
    level = there & (order == threshold)
    room_left = wanted - tl.sum(above.to(tl.int32), 0)
    taken = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room_left))
    place = b * wanted + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(selected + place, number, mask=taken)
    tl.store(chosen + place, tl.load(tokens + b * size + number, mask=taken, other=0), mask=taken)
