"""The tree functions in torch, all requests at once, on the arrays' device.

No loop is longer than a tree is deep, and nothing waits for the device but the length of a full mask where
nobody told the sum of the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specsot.errors import InvalidRequest
from specsot.kernels.contract import Array, DraftResults, TreeArrays, TreeMaskMode, Verified

WORDS = ((8, torch.uint8), (16, torch.uint16), (32, torch.uint32))


def on_one_device(arrays: Sequence[Array | None]) -> tuple[Any, ...]:
    """The arrays as tensors, where those that are tensors already are. None stays None.

    Raises InvalidRequest when they are on several devices.
    """
    devices = {array.device for array in arrays if isinstance(array, Tensor)}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise InvalidRequest(f"the tensors must be on one device, got {named}", "device")
    (device,) = devices
    return tuple(None if each is None else torch.as_tensor(each, device=device) for each in arrays)


def organize_draft_results(
    score_list: Sequence[Tensor], token_list: Sequence[Tensor], parents_list: Sequence[Tensor], nodes: int
) -> DraftResults:
    """See `reference`; a stable sort, since topk leaves the order of ties open."""
    scores = torch.cat([each.flatten(1) for each in score_list], dim=1)
    usable = torch.where(scores.isnan(), -torch.inf, scores)
    best = usable.sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1]
    selected = best.sort(dim=1).values
    tokens = torch.cat(tuple(token_list), dim=1).gather(1, selected)
    known = torch.cat(tuple(parents_list[:-1]), dim=1) if len(parents_list) > 1 else parents_list[0][:, :1]
    return DraftResults(known.long(), selected, tokens.long())


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
    """See `reference`."""
    tokens = torch.cat((verified[:, None], drafts), dim=1)
    return arrange_trees(tokens, _find_parents(parent_list, selected, topk), seq_lens, mode, total)


def _find_parents(parent_list: Tensor, top_scores_index: Tensor, topk: int) -> Tensor:
    """int64 [bs, n]: see `reference`."""
    selected, groups = top_scores_index.long(), top_scores_index.long() // topk
    wanted = parent_list.long().gather(1, groups)
    place = _first(selected[:, None, :] == wanted[:, :, None])
    found = torch.where(groups == 0, 0, torch.where(place < 0, -1, place + 1))
    return pad(found, (1, 0), value=-1)


def arrange_trees(
    tokens: Tensor, parents: Tensor, seq_lens: Tensor, mode: TreeMaskMode, total: int | None
) -> TreeArrays:
    """See `reference`."""
    batch, nodes = tokens.shape
    first, following = _links(parents)
    masks, lengths = _masks(parents), seq_lens.long()
    return TreeArrays(
        _lay_out(masks, lengths, mode, total),
        (lengths[:, None] + masks.sum(2) - 1).flatten(),
        torch.arange(batch * nodes, device=tokens.device).view(batch, nodes),
        first,
        following,
        tokens.long().flatten(),
    )


def _links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """First child and next sibling of each node, both [bs, n]."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    child = parents[:, None, :] == nodes[:, None]
    sibling = (parents[:, None, :] == parents[:, :, None]) & (nodes > nodes[:, None])
    return _first(child), _first(sibling & (parents >= 0)[:, :, None])


def _first(flags: Tensor) -> Tensor:
    """Column of the first true of each row [..., columns]; -1 where there is none."""
    columns = flags.shape[-1]
    if columns == 0:
        return flags.new_full(flags.shape[:-1], -1, dtype=torch.long)
    numbers = torch.arange(columns, device=flags.device)
    least = torch.where(flags, numbers, columns).amin(-1)
    return torch.where(least == columns, -1, least)


def _masks(parents: Tensor) -> Tensor:
    """bool [bs, n, n]: the root, itself and its ancestors; each round reaches twice as far up."""
    nodes = parents.shape[1]
    own = torch.eye(nodes, dtype=torch.bool, device=parents.device)
    seen = own | (parents[:, :, None] == torch.arange(nodes, device=parents.device))
    seen[:, :, 0] = True
    for _ in range(nodes.bit_length()):
        reach = seen.float()
        seen = reach @ reach > 0
    return seen


def _lay_out(masks: Tensor, seq_lens: Tensor, mode: TreeMaskMode, total: int | None) -> Tensor:
    """bool [bs, n, n] as the mode has it."""
    if mode == TreeMaskMode.QLEN_ONLY:
        return masks.flatten()
    if mode == TreeMaskMode.FULL_MASK:
        return _full(masks, seq_lens, total)
    nodes = masks.shape[-1]
    word = next(kind for most, kind in WORDS if nodes <= most)
    bits = torch.ones((), dtype=torch.long, device=masks.device) << torch.arange(nodes, device=masks.device)
    return (masks.flatten(0, 1) * bits).sum(1).to(word)


def _full(masks: Tensor, seq_lens: Tensor, total: int | None) -> Tensor:
    """Each row's tree columns behind as many true ones as its sequence is long."""
    batch, nodes, _ = masks.shape
    widths = (seq_lens + nodes).repeat_interleave(nodes)
    ends = widths.cumsum(0)
    text = int(seq_lens.sum()) if total is None else total
    mask = torch.ones(nodes * (text + batch * nodes), dtype=torch.bool, device=masks.device)
    columns = (ends - nodes)[:, None] + torch.arange(nodes, device=masks.device)
    mask[columns] = masks.flatten(0, 1)
    return mask


def verify_tree_greedy(
    candidates: Tensor,
    target_predict: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    steps: int,
) -> Verified:
    """See `reference`."""
    targets = target_predict.reshape(-1)[retrieve_index]
    parents, ranks = _families(retrieve_next_token, retrieve_next_sibling)
    takes = candidates == targets.gather(1, parents.clamp(min=0))
    walk = _walk(parents, ranks, takes, steps)
    return _found(candidates, retrieve_index, walk, targets.gather(1, _last(walk)).squeeze(1))


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
) -> Verified:
    """See `reference`. Whether a node would be accepted by its parent depends on no other family."""
    parents, ranks = _families(retrieve_next_token, retrieve_next_sibling)
    above, tokens = parents.clamp(min=0), candidates.long()
    chances = _pick_out(target_probs, above, tokens).double()
    siblings = (parents[:, None, :] == parents[:, :, None]) & (ranks[:, None, :] <= ranks[:, :, None])
    mass = (siblings * chances[:, None, :]).sum(-1)
    coins = uniform_samples.double().gather(1, above)
    takes = ((chances > 0) & (coins * threshold_acc <= mass)) | (chances >= threshold_single)
    walk = _walk(parents, ranks, takes, steps)
    last = _last(walk)
    rest = _rest(last, parents, tokens, target_probs, draft_probs, walk[:, -1] >= 0)
    return _found(candidates, retrieve_index, walk, _draw(rest, uniform_samples_final.double()))


def _pick_out(rows: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
    """rows[b, nodes[b, i], tokens[b, i]] of [bs, n, V]."""
    batch = torch.arange(len(rows), device=rows.device)[:, None]
    return rows[batch, nodes, tokens]


def _rest(
    last: Tensor, parents: Tensor, tokens: Tensor, target: Tensor, draft: Tensor | None, whole: Tensor
) -> Tensor:
    """What is left of the target's chances [bs, V] at each walk's last node; all of them where `whole`."""
    batch = torch.arange(len(last), device=last.device)
    chances = target[batch, last[:, 0]].double()
    spent = torch.zeros_like(chances) if draft is None else draft[batch, last[:, 0]].double()
    kinds = chances.shape[1]
    refused = torch.where(parents == last, tokens, kinds)  # its children; everybody else's go nowhere
    spent = pad(spent, (0, 1)).scatter(1, refused, chances.gather(1, tokens))
    rest = (chances - spent[:, :kinds]).clamp(min=0)
    rest = torch.where(whole[:, None], chances, rest)
    return torch.where(rest.sum(1, keepdim=True) > 0, rest, chances)


def _draw(chances: Tensor, coins: Tensor) -> Tensor:
    """Inverse CDF in vocabulary order, of chances [bs, V] that need not sum to 1."""
    sums = chances.cumsum(1)
    whole = sums[:, -1:]
    tokens = torch.searchsorted(sums, coins[:, None] * whole, right=True).squeeze(1)
    return torch.minimum(tokens, (sums < whole).sum(1))


def _families(next_token: Tensor, next_sibling: Tensor) -> tuple[Tensor, Tensor]:
    """Parent of each node [bs, n] (-1: nobody's child) and its place among its siblings.

    Each node points at the sibling before it; pointing on twice as far each time finds the eldest.
    """
    batch, nodes = next_token.shape
    numbers = torch.arange(nodes, device=next_token.device).expand(batch, -1)
    eldest = _invert(next_sibling, numbers)
    ranks = (eldest != numbers).long()
    for _ in range(nodes.bit_length()):
        ranks, eldest = ranks + ranks.gather(1, eldest), eldest.gather(1, eldest)
    return _invert(next_token, torch.full_like(numbers, -1)).gather(1, eldest), ranks


def _invert(pointers: Tensor, absent: Tensor) -> Tensor:
    """Who points at each node [bs, n]; `absent` where nobody does."""
    nodes = pointers.shape[1]
    padded = pad(absent, (0, 1))
    sources = torch.arange(nodes, device=pointers.device).expand_as(pointers)
    targets = torch.where(pointers < 0, nodes, pointers.long())
    return padded.scatter(1, targets, sources)[:, :nodes]


def _walk(parents: Tensor, ranks: Tensor, takes: Tensor, steps: int) -> Tensor:
    """Nodes from the root down [bs, steps + 1]: of each node's children that are taken the first; then -1."""
    nodes = parents.shape[1]
    at = parents.new_zeros(len(parents))
    walk = [at]
    alive = torch.ones_like(at, dtype=torch.bool)
    for _ in range(steps):
        fits = takes & (parents == at[:, None]) & alive[:, None]
        rank, child = torch.where(fits, ranks, nodes).min(1)
        alive = rank < nodes
        at = torch.where(alive, child, at)
        walk.append(torch.where(alive, child, -1))
    return torch.stack(walk, dim=1)


def _last(walk: Tensor) -> Tensor:
    """The last node of each walk, [bs, 1]."""
    return walk.gather(1, (walk >= 0).sum(1, keepdim=True) - 1)


def _found(candidates: Tensor, slots: Tensor, walk: Tensor, bonus: Tensor) -> Verified:
    """A walk as the arrays of the contract."""
    there = walk >= 0
    rows = torch.where(there, slots.long().gather(1, walk.clamp(min=0)), -1)
    behind = candidates.long().gather(1, walk.clamp(min=0)).roll(-1, 1)
    counts = there.sum(1) - 1
    behind = behind.scatter(1, counts[:, None], bonus[:, None].long())
    predicts = torch.full((candidates.numel() + 1,), -1, dtype=torch.int32, device=candidates.device)
    predicts[torch.where(there, rows, candidates.numel()).flatten()] = behind.flatten().int()
    return Verified(predicts[:-1], rows.int(), counts.int())
