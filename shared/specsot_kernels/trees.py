"""Builds and verifies EAGLE draft trees over arrays, with the function contract of AITER and SGLang.

Torch tensors on a GPU with Triton are computed by `gpu`, everything else by `reference`; tensors are copied
to the host for it. Results belong to the same library and lie on the same device as the arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from specsot_kernels import reference
from specsot_kernels.contract import (
    Array,
    DraftResults,
    TreeArrays,
    TreeMaskMode,
    Verified,
    check_candidates,
    check_mode,
    check_nodes,
    check_shape,
    check_steps,
    check_threshold,
)
from specsot_kernels.errors import InvalidArguments

LINKS = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
GREEDY = ("target_predict", *LINKS)
SAMPLED = (*LINKS, "uniform_samples")


def organize_draft_results(
    score_list: Sequence[Array],
    token_list: Sequence[Array],
    parents_list: Sequence[Array],
    num_draft_tokens: int,
) -> DraftResults:
    """Return the num_draft_tokens - 1 best candidates of each request, parents before children.

    score_list: the first step's scores [bs, 1, k], then [bs, k, k] for each further step. Scores are
        cumulative: products of probabilities, or sums of their logarithms. NaN counts as the worst.
    token_list: [bs, k], then [bs, k * k].
    parents_list: [bs, k + 1] (-1, 0 .. k - 1), then [bs, k]: flat numbers of the k candidates that the step's
        frontier keeps. No candidate has a parent in the last entry, which is therefore not used.
    Raises InvalidArguments for lists that do not fit each other, or that offer too few candidates.
    """
    rules, scores, tokens, parents = _prepare_lists(score_list, token_list, parents_list)
    check_candidates(scores, tokens, parents, num_draft_tokens)
    return rules.organize_draft_results(scores, tokens, parents, num_draft_tokens)


def build_tree_structure(
    verified_id: Array,
    parent_list: Array,
    top_scores_index: Array,
    draft_tokens: Array,
    seq_lens: Array,
    topk: int,
    spec_steps: int,
    num_draft_tokens: int,
    tree_mask_mode: int = TreeMaskMode.FULL_MASK,
    seq_lens_sum: int | None = None,
) -> TreeArrays:
    """Build trees from the chosen candidates, each below its request's newest token.

    verified_id: [bs], that newest token.
    seq_lens: [bs], tokens before it.
    topk: k. spec_steps: S. num_draft_tokens: n.
    parent_list, top_scores_index, draft_tokens: see DraftResults.
    seq_lens_sum: sum of seq_lens, if the caller knows it; then building a full mask on a GPU does not wait
        for the device.
    A candidate whose parent was not chosen is no node's child and is never accepted.
    Raises InvalidArguments for shapes that do not fit each other, or a mode that cannot hold so many nodes.
    """
    given = (verified_id, parent_list, top_scores_index, draft_tokens, seq_lens)
    rules, arrays, mode = _prepare_trees(given, topk, spec_steps, num_draft_tokens, tree_mask_mode)
    return rules.build_trees(*arrays, topk, mode, seq_lens_sum)


def write_tree_structure(
    arrays: Sequence[Array],
    given: Sequence[Array],
    topk: int,
    spec_steps: int,
    num_draft_tokens: int,
    tree_mask_mode: int,
) -> bool:
    """Run `build_tree_structure` into the caller's tensors on a GPU: tree_mask, positions, and the three
    links.

    given: the first five arguments of `build_tree_structure`.
    Entries of a full mask that belong to the sequence rather than the tree must already be true.
    Return False, with nothing written, if these tensors cannot be written directly.
    Raises InvalidArguments as `build_tree_structure` does.
    """
    if not has_kernels(arrays[0].device.type):
        return False
    rules, (*taken, _), mode = _prepare_trees(
        (*given, arrays[0]), topk, spec_steps, num_draft_tokens, tree_mask_mode
    )
    return rules.write_trees(arrays, taken, topk, mode)


def _prepare_trees(
    given: Sequence[Array], topk: int, steps: int, nodes: int, mode: int
) -> tuple[Any, tuple[Array, ...], TreeMaskMode]:
    """Check the first five arrays, and return rules, all arrays and the mode.

    Arrays after the fifth are not checked, except that they must be on the same device.
    """
    rules, arrays = _prepare(*given)
    verified, parents, selected, drafts, lengths = arrays[:5]
    batch = verified.shape[0]
    chosen = nodes - 1
    check_nodes(topk, steps, nodes)
    check_shape("verified_id", verified, batch)
    check_shape("parent_list", parents, batch, topk * (steps - 1) + 1)
    check_shape("top_scores_index", selected, batch, chosen)
    check_shape("draft_tokens", drafts, batch, chosen)
    check_shape("seq_lens", lengths, batch)
    return rules, arrays, check_mode(mode, nodes)


def arrange_trees(
    tokens: Array,
    parents: Array,
    seq_lens: Array,
    tree_mask_mode: int = TreeMaskMode.FULL_MASK,
    seq_lens_sum: int | None = None,
) -> TreeArrays:
    """Build trees whose parents are known, whatever drafted them.

    tokens, parents: [bs, n], the root first, parents before children. A parent is a node number; it is -1 for
        the root and for a node without a parent in the tree.
    seq_lens: [bs], tokens before each root.
    seq_lens_sum: see `build_tree_structure`.
    Raises InvalidArguments for shapes that do not fit each other, or a mode that cannot hold so many nodes.
    """
    rules, (nodes, above, lengths) = _prepare(tokens, parents, seq_lens)
    check_shape("parents", above, *nodes.shape)
    check_shape("seq_lens", lengths, nodes.shape[0])
    mode = check_mode(tree_mask_mode, nodes.shape[1])
    return rules.arrange_trees(nodes, above, lengths, mode, seq_lens_sum)


def verify_tree_greedy(
    candidates: Array,
    target_predict: Array,
    retrieve_index: Array,
    retrieve_next_token: Array,
    retrieve_next_sibling: Array,
    num_steps: int | None = None,
) -> Verified:
    """Walk down each tree as long as a child's token is the target's token after its parent.

    candidates: [bs, n] tokens of the nodes, the root first.
    target_predict: [bs, n] the target's token after each node, found by the node's retrieve_index.
    num_steps: S, how deep a path may go; None means n - 1.
    Raises InvalidArguments for shapes that do not fit each other.
    """
    links = (retrieve_index, retrieve_next_token, retrieve_next_sibling)
    rules, arrays, steps = _prepare_greedy((candidates, target_predict, *links), num_steps)
    return rules.verify_tree_greedy(*arrays, steps)


def write_tree_greedy(found: Verified, given: tuple[Array, ...]) -> bool:
    """Run `verify_tree_greedy` into the caller's tensors on a GPU.

    given: the first five arguments of `verify_tree_greedy`.
    A path goes down as many levels as accept_index has columns, less one. Entries that are not written keep
    their value.
    Return False, with nothing written, if these tensors cannot be written directly.
    Raises InvalidArguments as `verify_tree_greedy` does.
    """
    if not has_kernels(found.predicts.device.type):
        return False
    rules, arrays, steps = _prepare_greedy((*given, *found), found.accept_index.shape[1] - 1)
    if not rules.can_hold(found, arrays[0]):
        return False
    rules.verify_tree_greedy(*arrays[:5], steps, found)
    return True


def _prepare_greedy(given: tuple[Array, ...], num_steps: int | None) -> tuple[Any, tuple[Array, ...], int]:
    """Check the first five arrays, and return rules, all arrays and the number of levels.

    Arrays after the fifth are not checked, except that they must be on the same device.
    """
    rules, arrays = _prepare(*given)
    shape = arrays[0].shape
    for name, array in zip(GREEDY, arrays[1:5]):
        check_shape(name, array, *shape)
    return rules, arrays, check_steps(num_steps, shape[1])


def tree_speculative_sampling(
    candidates: Array,
    retrieve_index: Array,
    retrieve_next_token: Array,
    retrieve_next_sibling: Array,
    uniform_samples: Array,
    uniform_samples_final: Array,
    target_probs: Array,
    draft_probs: Array | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    num_steps: int | None = None,
) -> Verified:
    """Walk down each tree by chance. With both thresholds 1, every token has exactly the target's
    probability.

    At each node one uniform number u is used: uniform_samples [bs, n]. The first child is accepted at which
    the summed probabilities of the children so far reach u * threshold_acc, or whose own probability reaches
    threshold_single. The last token is drawn with uniform_samples_final [bs] from what the rejected children
    leave of target_probs [bs, n, V] at the last accepted node. draft_probs (same shape, never written; None
    means zeros) are subtracted too. After S accepted drafts the last token is drawn from the whole of
    target_probs. Thresholds below 1 accept more drafts, and are not exact. Raises InvalidArguments for shapes
    that do not fit.
    """
    links = (retrieve_index, retrieve_next_token, retrieve_next_sibling)
    given = (candidates, *links, uniform_samples, uniform_samples_final, target_probs, draft_probs)
    thresholds = threshold_single, threshold_acc
    rules, arrays, steps = _prepare_sampling(given, thresholds, num_steps)
    return rules.tree_speculative_sampling(*arrays, *thresholds, steps)


def write_tree_sampling(found: Verified, given: tuple[Array, ...], *thresholds: float) -> bool:
    """Run `tree_speculative_sampling` into the caller's tensors on a GPU, as `write_tree_greedy` does.

    given: the first eight arguments of `tree_speculative_sampling`. thresholds: single and acc.
    """
    if not has_kernels(found.predicts.device.type):
        return False
    rules, arrays, steps = _prepare_sampling((*given, *found), thresholds, found.accept_index.shape[1] - 1)
    if not rules.can_hold(found, arrays[0]):
        return False
    rules.tree_speculative_sampling(*arrays[:8], *thresholds, steps, found)
    return True


def _prepare_sampling(
    given: tuple[Array | None, ...], thresholds: tuple[float, ...], num_steps: int | None
) -> tuple[Any, tuple[Array, ...], int]:
    """Check the first eight arrays, and return rules, all arrays and the number of levels.

    Arrays after the eighth are not checked, except that they must be on the same device.
    """
    rules, arrays = _prepare(*given)
    shape = arrays[0].shape
    chances = arrays[6].shape
    batch, nodes = shape
    for name, array in zip(SAMPLED, arrays[1:5]):
        check_shape(name, array, *shape)
    check_shape("uniform_samples_final", arrays[5], batch)
    check_shape("target_probs", arrays[6], batch, nodes, chances[-1])
    if arrays[7] is not None:
        check_shape("draft_probs", arrays[7], *chances)
    check_threshold("threshold_single", thresholds[0])
    check_threshold("threshold_acc", thresholds[1])
    return rules, arrays, check_steps(num_steps, nodes)


def _prepare_lists(*lists: Sequence[Array]) -> tuple[Any, list[Array], list[Array], list[Array]]:
    """Prepare all arrays of three lists together; return the rules and the three lists."""
    flat = [array for each in lists for array in each]
    rules, prepared = _prepare(*flat)
    taken = iter(prepared)
    scores, tokens, parents = ([next(taken) for _ in each] for each in lists)
    return rules, scores, tokens, parents


def _prepare(*arrays: Array | None) -> tuple[Any, tuple[Array, ...]]:
    """Return the module that computes these arrays, and the arrays in the form that it takes.

    Raises InvalidArguments for tensors on several devices.
    """
    # If torch was never imported, no argument can be a tensor.
    torch: Any = sys.modules.get("torch")
    if torch and _on_one_gpu(torch.Tensor, arrays):
        return _gpu(), arrays
    devices = {each.device for each in arrays if torch and isinstance(each, torch.Tensor)}
    if not devices:
        return reference, tuple(None if each is None else np.asarray(each) for each in arrays)
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise InvalidArguments(f"the tensors must be on one device, got {named}", "device")
    (device,) = devices
    given = tuple(None if each is None else torch.as_tensor(each, device=device) for each in arrays)
    if has_kernels(device.type):
        return _gpu(), given
    return _ReferenceForTensors(device), tuple(map(_on_host, given))


def _on_one_gpu(kind: type, arrays: tuple[Array | None, ...]) -> bool:
    """Return whether all arrays are plain tensors on one GPU with kernels: the usual case, in which no array
    is converted.
    """
    device = None
    for each in arrays:
        if type(each) is kind:
            if device is None:
                device = each.device
            elif each.device != device:
                return False
        elif each is not None:
            return False
    return device is not None and has_kernels(device.type)


@cache
def _gpu() -> Any:
    """Return `specsot_kernels.gpu`, imported on first use because it needs Triton."""
    from specsot_kernels import gpu

    return gpu


@cache
def has_kernels(device: str) -> bool:
    """Return whether the device type is a GPU and Triton is installed. AMD's devices are called cuda too."""
    return device == "cuda" and find_spec("triton") is not None


def _on_host(tensor: Any) -> Array:
    """Return the tensor as a NumPy array; bfloat16 becomes float32, since NumPy has no bfloat16."""
    if tensor is None:
        return None
    return (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy(force=True)


class _ReferenceForTensors:
    """`reference`, with results converted to tensors on one device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        import torch

        def rule(*given: Any) -> Any:
            made = getattr(reference, name)(*given)
            return made._make(torch.from_numpy(each).to(self._device) for each in made)

        return rule
