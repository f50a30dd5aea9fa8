"""Offers AITER's and SGLang's names and in-place arguments for EAGLE's tree functions, over
`specsot_kernels`.

`EAGLEInference` and `EAGLEConfig` correspond to `Eagle` and `EagleConfig` of `specsot.eagle`; the other
functions take torch tensors on any device. Shapes and element types are those of `specsot_kernels.contract`.
Arrays that the caller passes as outputs keep their values where no token was accepted, so fill them with -1
(accept_index) beforehand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from specsot import eagle
from specsot_bench import tree_functions
from specsot_bench.tree_functions import (
    TreeArrays,
    TreeMaskMode,
    Verified,
    build_tree_structure,
    compute_tree_statistics,
    organize_draft_results,
    verify_tree_greedy,
    write_tree_greedy,
    write_tree_sampling,
    write_tree_structure,
)

if TYPE_CHECKING:
    from specsot.eagle import EagleBenchmark, EagleStats
    from specsot.eagle import EagleConfig as EAGLEConfig

__all__ = [
    "EAGLEConfig",
    "EAGLEInference",
    "TreeMaskMode",
    "build_tree_efficient_triton",
    "build_tree_kernel_efficient",
    "build_tree_structure",
    "calculate_acceptance_rate",
    "compute_tree_statistics",
    "fast_topk_torch",
    "generate_token_bitmask",
    "next_power_of_2",
    "organize_draft_results",
    "pad_to_alignment",
    "sample_from_logits",
    "select_top_k_tokens",
    "sgl_build_tree_kernel_efficient",
    "sgl_verify_tree_greedy",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
    "verify_tree_greedy_func",
    "verify_tree_greedy_triton",
]

# A torch.Tensor. This module does not import torch, since a caller with a tensor has.
Tensor = Any
Call = TypeVar("Call", bound=Callable[..., Any])


def __getattr__(name: str) -> Any:
    if name == "EAGLEConfig":
        return eagle.EagleConfig
    raise AttributeError(f"module 'specsot.aiter' has no attribute {name!r}")


class EAGLEInference:
    """`Eagle` with AITER's arguments and with statistics as mappings."""

    def __init__(
        self,
        draft_model: Any,
        target_model: Any,
        config: EAGLEConfig | None = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        """Load or take the models.

        draft_model: An EAGLE head.
        target_model: As in `Eagle`; a model in memory is moved to `device`.
        dtype: For directories, such as "fp16".
        Raises ModelError, HeadMismatch, InvalidRequest.
        """
        if device is not None and hasattr(target_model, "to"):
            target_model = target_model.to(device)
            device = None
        self.config = config or eagle.EagleConfig()
        self.eagle = eagle.Eagle(draft_model, target_model, self.config, dtype=dtype, device=device)

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 100,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        return_stats: bool = True,
    ) -> tuple[Tensor, dict[str, float] | None]:
        """Return the prompts followed by what was generated, and the statistics of `figures_of` (None without
        return_stats).

        temperature, top_p, top_k: For this call; None takes the config's.
        """
        given: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        once = copy.copy(self.eagle)
        once.config = replace(self.config, **{name: one for name, one in given.items() if one is not None})
        ids, stats = once.generate(input_ids, max_new_tokens)
        return ids, figures_of(stats) if return_stats else None

    def benchmark(self, test_data: Sequence[Any], max_new_tokens: int = 100) -> dict[str, float]:
        """Compare with decoding of the same target without drafts; `speedup` is the median ratio of the
        speeds.
        """
        found: EagleBenchmark = self.eagle.benchmark(test_data, max_new_tokens)
        fast, plain = found.comparison.rates
        return {
            "acceptance_rate": found.trees.acceptance_rate,
            "mean_accept_length": found.trees.mean_accept_length,
            "speedup": found.ratio,
            "tokens_per_second": fast,
            "plain_tokens_per_second": plain,
            "identical": found.identical,
            "sequences": found.sequences,
        }


def figures_of(stats: EagleStats) -> dict[str, float]:
    """Return the statistics under AITER's names.

    speedup: target forwards that decoding without drafts would take, divided by those that were run.
    `EAGLEInference.benchmark` measures seconds instead.
    """
    trees = stats.trees
    plain = max((len(one.tokens) for one in stats.sequences), default=0)
    speedup = plain / max(stats.steps, 1)
    return {
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_rate": stats.acceptance_rate,
        "mean_accept_length": stats.mean_accept_length,
        "speedup": speedup,
        "speedup_ratio": speedup,
        "total_tokens_generated": stats.new_tokens,
        "total_draft_tokens": trees.total_proposed,
        "total_accepted_tokens": trees.total_accepted,
        "total_target_forward": stats.steps,
        "tokens_per_second": stats.tokens_per_second,
    }


def either_spelling(call: Call) -> Call:
    """Accept `retrieve_index` as well as `retrive_index`, since SGLang uses both spellings."""

    @wraps(call)
    def spelled(*given: Any, **named: Any) -> Any:
        if not named:
            return call(*given)
        return call(*given, **{name.replace("retrieve_", "retrive_"): one for name, one in named.items()})

    return spelled  # type: ignore[return-value]


def build_tree_efficient_triton(
    verified_id: Tensor,
    parent_list: Tensor,
    top_scores_index: Tensor,
    draft_tokens: Tensor,
    seq_lens: Tensor,
    seq_lens_sum: int | None,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int = TreeMaskMode.FULL_MASK,
    tree_mask_buf: Tensor | None = None,
    position_buf: Tensor | None = None,
) -> TreeArrays:
    """Run `specsot_kernels.build_tree_structure`; mask and positions are written to the buffers, if given.

    Without seq_lens_sum, the sum of a full mask is derived from its buffer's size, so that no device is
    waited for.
    """
    parent_list = _known(parent_list, len(verified_id))
    if seq_lens_sum is None and tree_mask_buf is not None:
        seq_lens_sum = tree_mask_buf.numel() // num_verify_tokens - len(verified_id) * num_verify_tokens
    made = build_tree_structure(
        verified_id,
        parent_list,
        top_scores_index,
        draft_tokens,
        seq_lens,
        topk,
        spec_steps,
        num_verify_tokens,
        tree_mask_mode,
        seq_lens_sum,
    )
    return made._replace(
        tree_mask=_in_buffer(tree_mask_buf, made.tree_mask),
        positions=_in_buffer(position_buf, made.positions),
    )


build_tree_kernel_efficient = build_tree_efficient_triton


def _known(parent_list: Tensor, batch: int) -> Tensor:
    """Return the parent list; SGLang's list for a single level is empty, and becomes [-1] for each request."""
    return parent_list if parent_list.shape[1] else parent_list.new_full((batch, 1), -1)


def _in_buffer(buffer: Tensor | None, made: Tensor) -> Tensor:
    """Return what was computed, copied to the buffer if there is one."""
    if buffer is None:
        return made
    buffer[: len(made)].copy_(made)
    return buffer


@either_spelling
def sgl_build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Write what `sgl_kernel.build_tree_kernel_efficient` writes into the caller's arrays.

    A full mask may be longer than the trees need; entries that belong to no tree become True.
    """
    parents = _known(parent_list, len(verified_seq_len))
    arrays = (tree_mask, positions, retrive_index, retrive_next_token, retrive_next_sibling)
    # This function returns no tokens, so that any arrays of the right shape stand for them.
    given = (verified_seq_len, parents, selected_index, selected_index, verified_seq_len)
    shape = (topk, depth, draft_token_num)
    if write_tree_structure(arrays, given, *shape, tree_mask_mode):
        return
    made = build_tree_efficient_triton(*given, None, *shape, tree_mask_mode, tree_mask, positions)
    for out, one in zip(arrays[2:], made[2:5]):
        out.copy_(one)


@either_spelling
def verify_tree_greedy_func(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, ...]:
    """Run `specsot_kernels.verify_tree_greedy` into the first three arrays, and return them.

    A path goes down as many levels as accept_index has columns, less one. topk is ignored.
    """
    outputs = Verified(predicts, accept_index, accept_token_num)
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    given = (candidates, target_predict, *links)
    if not write_tree_greedy(outputs, given):
        _copy(outputs, tree_functions.verify_tree_greedy(*given, accept_index.shape[1] - 1))
    return tuple(outputs)


verify_tree_greedy_triton = verify_tree_greedy_func


def sgl_verify_tree_greedy(*given: Tensor, **named: Tensor) -> None:
    """Run `verify_tree_greedy_func` without a result, as `sgl_kernel.verify_tree_greedy` does."""
    verify_tree_greedy_func(*given, **named)


@either_spelling
def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Run `specsot_kernels.tree_speculative_sampling` into the first three arrays.

    draft_probs is only read, and not used as scratch memory. The result is always deterministic.
    """
    outputs = Verified(predicts, accept_index, accept_token_num)
    tree = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    coins = (uniform_samples, uniform_samples_for_final_sampling)
    given = (*tree, *coins, target_probs, draft_probs)
    thresholds = (threshold_single, threshold_acc)
    if not write_tree_sampling(outputs, given, *thresholds):
        _copy(
            outputs, tree_functions.tree_speculative_sampling(*given, *thresholds, accept_index.shape[1] - 1)
        )


def _copy(outputs: Verified, found: Verified) -> None:
    """Copy results that are not -1.

    `where` is used so that the device is not waited for. SGLang's predicts are one row longer than needed.
    """
    for out, one in zip(outputs, found):
        row = out[: len(one)]
        row.copy_(one.where(one >= 0, row.to(one.dtype)))


def fast_topk_torch(scores: Tensor, k: int, dim: int = -1, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return torch's top-k."""
    return scores.topk(k, dim=dim, sorted=sorted)


def select_top_k_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores and ids of the k most likely tokens of logits [bs, V] or [bs, candidates, V]."""
    return logits.topk(k, dim=-1)


def generate_token_bitmask(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Return bool [bs, V], true at the ids of each row of token_ids [bs, n]."""
    return token_ids.new_zeros((len(token_ids), vocab_size)).scatter_(1, token_ids, 1).bool()


def sample_from_logits(
    logits: Tensor, temperature: float = 1.0, top_p: float | None = None, top_k: int | None = None
) -> Tensor:
    """Return one id for each row of logits [bs, V], by torch's random numbers; temperature 0 takes the most
    likely id.

    top_k applies first. top_p keeps the fewest most likely tokens that reach it together, at least one.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    ordered, tokens = (logits / temperature).topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)
    chances = ordered.softmax(dim=-1)
    if top_p is not None:
        before = chances.cumsum(dim=-1) - chances
        cut = before >= top_p
        cut[..., 0] = False
        chances = chances.masked_fill(cut, 0)
    return tokens.gather(-1, chances.multinomial(1)).squeeze(-1)


def calculate_acceptance_rate(accept_lengths: Tensor, num_draft_tokens: int) -> float:
    """Return accepted tokens divided by drafted tokens, num_draft_tokens for each tree; 0 without trees."""
    proposed = num_draft_tokens * len(accept_lengths)
    return float(accept_lengths.sum()) / proposed if proposed else 0.0


def pad_to_alignment(tensor: Tensor, alignment: int, dim: int = 0, value: float = 0.0) -> Tensor:
    """Return the tensor, padded with `value` at the end of a dimension to a multiple of `alignment`."""
    missing = -tensor.shape[dim] % alignment
    shape = [*tensor.shape]
    shape[dim] += missing
    padded = tensor.new_full(shape, value)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded if missing else tensor


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()
