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

# Names of arguments, in the order in which the functions check them.
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

    Of equal scores the candidate with the lower flat number wins. The chosen candidates are in ascending
    order of their flat numbers.

    score_list: the first step's scores [bs, 1, k], then [bs, k, k] for each further step. Scores are
        cumulative: products of probabilities, or sums of their logarithms. NaN counts as the worst.
    token_list: [bs, k], then [bs, k * k].
    parents_list: [bs, k + 1] (-1, 0 .. k - 1), then [bs, k]: flat numbers of the k candidates that the step's
        frontier keeps. No candidate has a parent in the last entry, which is therefore not used.
    num_draft_tokens: n, the number of nodes of each tree, the root included.

    Raises InvalidArguments for lists that do not fit each other, or that offer too few candidates.
    """
    implementation, scores, tokens, parents = _prepare_lists(score_list, token_list, parents_list)
    check_candidates(scores, tokens, parents, num_draft_tokens)
    return implementation.organize_draft_results(scores, tokens, parents, num_draft_tokens)


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
    """Return trees built from the chosen candidates, each below its request's newest token.

    A candidate whose parent was not chosen is no node's child and is never accepted.

    verified_id: [bs], the newest token of each request.
    parent_list: [bs, k * (S - 1) + 1], the parent of each group of k candidates; see DraftResults.
    top_scores_index: [bs, n - 1], flat numbers of the chosen candidates, ascending; see DraftResults.
    draft_tokens: [bs, n - 1], the tokens of these candidates.
    seq_lens: [bs], number of tokens before each request's newest token.
    topk: k, candidates below each node that was drafted from.
    spec_steps: S, number of levels of drafting.
    num_draft_tokens: n, number of nodes of each tree, the root included.
    tree_mask_mode: how the attention mask is laid out; see TreeMaskMode.
    seq_lens_sum: sum of seq_lens, if the caller knows it; then building a full mask on a GPU does not wait
        for the device. None: it is computed.

    Raises InvalidArguments for shapes that do not fit each other, or a mode that cannot hold so many nodes.
    """
    arguments = (verified_id, parent_list, top_scores_index, draft_tokens, seq_lens)
    implementation, arrays, mode = _prepare_trees(
        arguments, topk, spec_steps, num_draft_tokens, tree_mask_mode
    )
    return implementation.build_trees(*arrays, topk, mode, seq_lens_sum)


def write_tree_structure(
    arrays: Sequence[Array],
    arguments: Sequence[Array],
    topk: int,
    spec_steps: int,
    num_draft_tokens: int,
    tree_mask_mode: int,
) -> bool:
    """Run `build_tree_structure` into the caller's tensors on a GPU, and return whether these could be
    written.

    Nothing is written if False is returned. False is returned for tensors that are not on a GPU, without
    Triton, and for tensors of another shape, type or layout than the kernel writes.

    arrays: the tensors that are written: tree_mask, positions, and the three links (see TreeArrays). All
        entries of a full mask that belong to the sequence rather than the tree become true.
    arguments: the first five arguments of `build_tree_structure`.
    topk: k, candidates below each node that was drafted from.
    spec_steps: S, number of levels of drafting.
    num_draft_tokens: n, number of nodes of each tree, the root included.
    tree_mask_mode: how the attention mask is laid out; see TreeMaskMode.

    Raises InvalidArguments as `build_tree_structure` does.
    """
    if not has_kernels(arrays[0].device.type):
        return False
    implementation, (*prepared, _), mode = _prepare_trees(
        (*arguments, arrays[0]), topk, spec_steps, num_draft_tokens, tree_mask_mode
    )
    return implementation.write_trees(arrays, prepared, topk, mode)


def _prepare_trees(
    arguments: Sequence[Array], topk: int, steps: int, nodes: int, mode: int
) -> tuple[Any, tuple[Array, ...], TreeMaskMode]:
    """Check the first five arrays, and return (implementation, all arrays, mode).

    The implementation is the module that computes these arrays; see `_prepare`. Arrays after the fifth are
    not checked, except that they must be on the same device.

    arguments: verified_id, parent_list, top_scores_index, draft_tokens and seq_lens, then any others.
    topk: k, candidates below each node that was drafted from.
    steps: S, number of levels of drafting.
    nodes: n, number of nodes of each tree, the root included.
    mode: how the attention mask is laid out; see TreeMaskMode.

    Raises InvalidArguments if they do not fit each other.
    """
    implementation, arrays = _prepare(*arguments)
    verified, parents, selected, drafts, lengths = arrays[:5]
    batch = verified.shape[0]
    chosen = nodes - 1
    check_nodes(topk, steps, nodes)
    check_shape("verified_id", verified, batch)
    check_shape("parent_list", parents, batch, topk * (steps - 1) + 1)
    check_shape("top_scores_index", selected, batch, chosen)
    check_shape("draft_tokens", drafts, batch, chosen)
    check_shape("seq_lens", lengths, batch)
    return implementation, arrays, check_mode(mode, nodes)


def arrange_trees(
    tokens: Array,
    parents: Array,
    seq_lens: Array,
    tree_mask_mode: int = TreeMaskMode.FULL_MASK,
    seq_lens_sum: int | None = None,
) -> TreeArrays:
    """Return trees whose parents are known, whatever drafted them.

    A node without a parent in the tree sees the root and itself, is no node's child, and is never accepted.

    seq_lens: [bs], tokens before each root.
    tokens: [bs, n], the token of each node, the root first.
    parents: [bs, n], the parent of each node, as a node number; parents come before children. It is -1 for
        the root and for a node without a parent in the tree.
    tree_mask_mode: how the attention mask is laid out; see TreeMaskMode.
    seq_lens_sum: sum of seq_lens, if the caller knows it; None: it is computed.

    Raises InvalidArguments for shapes that do not fit each other, or a mode that cannot hold so many nodes.
    """
    implementation, (nodes, above, lengths) = _prepare(tokens, parents, seq_lens)
    check_shape("parents", above, *nodes.shape)
    check_shape("seq_lens", lengths, nodes.shape[0])
    mode = check_mode(tree_mask_mode, nodes.shape[1])
    return implementation.arrange_trees(nodes, above, lengths, mode, seq_lens_sum)


def verify_tree_greedy(
    candidates: Array,
    target_predict: Array,
    retrieve_index: Array,
    retrieve_next_token: Array,
    retrieve_next_sibling: Array,
    num_steps: int | None = None,
) -> Verified:
    """Return what is accepted of each tree if a child is accepted whose token is the target's token after its
    parent.

    The walk begins at the root and ends at a node without such a child, or after `num_steps` levels; of equal
    siblings the first is accepted. The target's token after the last accepted node follows.

    candidates: [bs, n] tokens of the nodes, the root first.
    target_predict: [bs, n] the target's token after each node, found by the node's retrieve_index.
    num_steps: S, how deep a path may go; None means n - 1.
    retrieve_index: [bs, n], the row of each node in the batch; see TreeArrays.
    retrieve_next_token: [bs, n], the first child of each node, -1 for none.
    retrieve_next_sibling: [bs, n], the next child of the same parent, -1 for none.

    Raises InvalidArguments for shapes that do not fit each other.
    """
    links = (retrieve_index, retrieve_next_token, retrieve_next_sibling)
    implementation, arrays, steps = _prepare_greedy((candidates, target_predict, *links), num_steps)
    return implementation.verify_tree_greedy(*arrays, steps)


def write_tree_greedy(results: Verified, arguments: tuple[Array, ...]) -> bool:
    """Run `verify_tree_greedy` into the caller's tensors on a GPU, and return whether these could be written.

    A path goes down as many levels as accept_index has columns, less one. Entries that are not written keep
    their value. Nothing is written if False is returned. False is returned for tensors that are not on a GPU,
    without Triton, and for results that the kernel cannot write.

    results: the tensors that are written.
    arguments: the first five arguments of `verify_tree_greedy`.

    Raises InvalidArguments as `verify_tree_greedy` does.
    """
    if not has_kernels(results.predicts.device.type):
        return False
    implementation, arrays, steps = _prepare_greedy((*arguments, *results), results.accept_index.shape[1] - 1)
    if not implementation.can_hold(results, arrays[0]):
        return False
    implementation.verify_tree_greedy(*arrays[:5], steps, results)
    return True


def _prepare_greedy(
    arguments: tuple[Array, ...], num_steps: int | None
) -> tuple[Any, tuple[Array, ...], int]:
    """Check the first five arrays, and return (implementation, all arrays, number of levels).

    Arrays after the fifth are not checked, except that they must be on the same device. The implementation is
    the module that computes these arrays; see `_prepare`.

    arguments: the first five arguments of `verify_tree_greedy`, then any others.
    num_steps: how deep a path may go; None means as deep as a tree of n nodes can be.

    Raises InvalidArguments if they do not fit each other.
    """
    implementation, arrays = _prepare(*arguments)
    shape = arrays[0].shape
    for name, array in zip(GREEDY, arrays[1:5]):
        check_shape(name, array, *shape)
    return implementation, arrays, check_steps(num_steps, shape[1])


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
    """Return what is accepted of each tree by chance. With both thresholds 1, every token has exactly the
    target's probability.

    At each node one uniform number u is used. The first child is accepted at which the summed probabilities
    of the children so far reach u * threshold_acc, or whose own probability reaches threshold_single. The
    last token is drawn from what the rejected children leave of target_probs at the last accepted node;
    draft_probs are subtracted too. After S accepted drafts the last token is drawn from the whole of
    target_probs. Thresholds below 1 accept more drafts, and are not exact. A child of probability 0 is
    accepted only by a `threshold_single` of 0. If nothing is left of target_probs, the last token is drawn
    from the whole of them.

    candidates: [bs, n], tokens of the nodes, the root first.
    retrieve_index: [bs, n], the row of each node in the batch; see TreeArrays.
    retrieve_next_token: [bs, n], the first child of each node, -1 for none.
    retrieve_next_sibling: [bs, n], the next child of the same parent, -1 for none.
    uniform_samples: [bs, n], the uniform number in [0, 1) of each node.
    uniform_samples_final: [bs], the uniform number with which each request's last token is drawn.
    target_probs: [bs, n, V], the target's probabilities after each node.
    draft_probs: [bs, n, V], the drafter's probabilities, never written; None means zeros.
    threshold_single: a child whose own probability reaches it is accepted, in [0, 1].
    threshold_acc: factor of the uniform numbers, in [0, 1].
    num_steps: S, how deep a path may go; None means n - 1.

    Raises InvalidArguments for shapes that do not fit, and thresholds outside of [0, 1].
    """
    links = (retrieve_index, retrieve_next_token, retrieve_next_sibling)
    arguments = (candidates, *links, uniform_samples, uniform_samples_final, target_probs, draft_probs)
    thresholds = threshold_single, threshold_acc
    implementation, arrays, steps = _prepare_sampling(arguments, thresholds, num_steps)
    return implementation.tree_speculative_sampling(*arrays, *thresholds, steps)


def write_tree_sampling(results: Verified, arguments: tuple[Array, ...], *thresholds: float) -> bool:
    """Run `tree_speculative_sampling` into the caller's tensors on a GPU, and return whether these could be
    written.

    A path goes down as many levels as accept_index has columns, less one. Entries that are not written keep
    their value. Nothing is written if False is returned. False is returned for tensors that are not on a GPU,
    without Triton, and for results that the kernel cannot write.

    results: the tensors that are written.
    arguments: the first eight arguments of `tree_speculative_sampling`.
    thresholds: threshold_single and threshold_acc.

    Raises InvalidArguments as `tree_speculative_sampling` does.
    """
    if not has_kernels(results.predicts.device.type):
        return False
    implementation, arrays, steps = _prepare_sampling(
        (*arguments, *results), thresholds, results.accept_index.shape[1] - 1
    )
    if not implementation.can_hold(results, arrays[0]):
        return False
    implementation.tree_speculative_sampling(*arrays[:8], *thresholds, steps, results)
    return True


def _prepare_sampling(
    arguments: tuple[Array | None, ...], thresholds: tuple[float, ...], num_steps: int | None
) -> tuple[Any, tuple[Array, ...], int]:
    """Check the first eight arrays, and return (implementation, all arrays, number of levels).

    Arrays after the eighth are not checked, except that they must be on the same device. The implementation
    is the module that computes these arrays; see `_prepare`.

    arguments: the first eight arguments of `tree_speculative_sampling`, then any others.
    thresholds: threshold_single and threshold_acc.
    num_steps: how deep a path may go; None means as deep as a tree of n nodes can be.

    Raises InvalidArguments if they do not fit each other.
    """
    implementation, arrays = _prepare(*arguments)
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
    return implementation, arrays, check_steps(num_steps, nodes)


def _prepare_lists(*lists: Sequence[Array]) -> tuple[Any, list[Array], list[Array], list[Array]]:
    """Prepare all arrays of three lists together; return (implementation, list, list, list).

    The implementation is the module that computes these arrays; see `_prepare`. The lists keep their lengths.

    lists: the score, token and parent lists of one drafting.

    Raises InvalidArguments for tensors on several devices.
    """
    flat = [array for array_list in lists for array in array_list]
    implementation, prepared = _prepare(*flat)
    prepared = iter(prepared)
    scores, tokens, parents = ([next(prepared) for _ in array_list] for array_list in lists)
    return implementation, scores, tokens, parents


def _prepare(*arrays: Array | None) -> tuple[Any, tuple[Array, ...]]:
    """Return the module that computes some arrays, and the arrays in the form that it takes.

    The module is `gpu` for tensors on a GPU with Triton, `reference` if no argument is a tensor, and a
    wrapper of `reference` that returns tensors for all other devices. NumPy arrays among tensors are copied
    to the tensors' device.

    arrays: NumPy arrays, tensors, or None, which stays None.

    Raises InvalidArguments for tensors on several devices.
    """
    # If torch was never imported, no argument can be a tensor.
    torch: Any = sys.modules.get("torch")
    if torch and _on_one_gpu(torch.Tensor, arrays):
        return _gpu(), arrays
    devices = {array.device for array in arrays if torch and isinstance(array, torch.Tensor)}
    if not devices:
        return reference, tuple(None if array is None else np.asarray(array) for array in arrays)
    if len(devices) > 1:
        device_names = ", ".join(sorted(map(str, devices)))
        raise InvalidArguments(f"the tensors must be on one device, got {device_names}", "device")
    (device,) = devices
    arguments = tuple(None if array is None else torch.as_tensor(array, device=device) for array in arrays)
    if has_kernels(device.type):
        return _gpu(), arguments
    return _ReferenceForTensors(device), tuple(map(_on_host, arguments))


def _on_one_gpu(kind: type, arrays: tuple[Array | None, ...]) -> bool:
    """Return whether all arrays are plain tensors on one GPU with kernels: the usual case, in which no array
    is converted.

    False for subclasses of tensors, for NumPy arrays, without any tensor, and without Triton.

    kind: torch.Tensor, which is passed because torch is not imported here.
    arrays: arrays, tensors, or None, which is ignored.
    """
    device = None
    for array in arrays:
        if type(array) is kind:
            if device is None:
                device = array.device
            elif array.device != device:
                return False
        elif array is not None:
            return False
    return device is not None and has_kernels(device.type)


@cache
def _gpu() -> Any:
    """Return `specsot_kernels.gpu`, imported on first use because it needs Triton."""
    from specsot_kernels import gpu

    return gpu


@cache
def has_kernels(device: str) -> bool:
    """Return whether a device type is a GPU and Triton is installed.

    device: type of the device; AMD's devices are called cuda too.
    """
    return device == "cuda" and find_spec("triton") is not None


def _on_host(tensor: Any) -> Array:
    """Return a tensor as a NumPy array, or None for None; bfloat16 becomes float32, since NumPy has no
    bfloat16.

    tensor: a torch tensor on any device.
    """
    if tensor is None:
        return None
    return (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy(force=True)


class _ReferenceForTensors:
    """`reference`, with results converted to tensors on one device.

    device: the torch device of the results.
    """

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        """Return the function of `reference` with this name, with its results converted to tensors.

        Arguments must be NumPy arrays and numbers. A name that `reference` does not have raises
        AttributeError only when the function is called.

        name: name of the function.
        """
        import torch

        def converted(*arguments: Any) -> Any:
            """Run the function of `reference`, and return its results as tensors.

            arguments: the function's arguments, as NumPy arrays and numbers.
            """
            results = getattr(reference, name)(*arguments)
            return results._make(torch.from_numpy(array).to(self._device) for array in results)

        return converted
