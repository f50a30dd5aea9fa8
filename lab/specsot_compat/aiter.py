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
        """Load the models, or keep those that are in memory.

        A target that has a method `to` is moved to `device`. For any other target `device` is passed on to
        `Eagle`, which raises InvalidRequest if the target is not a directory.

        draft_model: An EAGLE head: its directory, or a loaded head.
        target_model: A directory in the Hugging Face layout, a `Decoder` of all layers, or a Transformers
            model in memory, which is moved to `device`.
        config: Configuration of trees and sampling; None takes the defaults of `EagleConfig`.
        device: A torch device; None leaves a model in memory where it is, and loads directories on the CPU.
        dtype: Data type for directories, such as "fp16"; None is "auto".
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
        """Return the prompts followed by what was generated, and the statistics of `figures_of`, or None in
        place of the statistics if they are not wanted.

        This call's sampling does not change the object's config. Raises InvalidRequest as `Eagle.generate`
        does.

        input_ids: Token ids of the prompts, [num_tokens] or [num_sequences, num_tokens].
        max_new_tokens: Maximum number of new tokens of each sequence.
        temperature, top_p, top_k: Sampling of this call; None takes the config's value.
        return_stats: True: return the statistics, too.
        """
        call_options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        eagle_of_call = copy.copy(self.eagle)
        options = {name: value for name, value in call_options.items() if value is not None}
        eagle_of_call.config = replace(self.config, **options)
        ids, stats = eagle_of_call.generate(input_ids, max_new_tokens)
        return ids, figures_of(stats) if return_stats else None

    def benchmark(self, test_data: Sequence[Any], max_new_tokens: int = 100) -> dict[str, float]:
        """Compare with decoding of the same target without drafts; `speedup` is the median ratio of the
        speeds.

        "identical" is the number of sequences that both ways wrote alike, of "sequences". Raises
        InvalidRequest without prompts.

        test_data: Prompts as token ids, each one or several.
        max_new_tokens: Maximum number of new tokens of each answer.
        """
        measured: EagleBenchmark = self.eagle.benchmark(test_data, max_new_tokens)
        fast, plain = measured.comparison.rates
        return {
            "acceptance_rate": measured.trees.acceptance_rate,
            "mean_accept_length": measured.trees.mean_accept_length,
            "speedup": measured.ratio,
            "tokens_per_second": fast,
            "plain_tokens_per_second": plain,
            "identical": measured.identical,
            "sequences": measured.sequences,
        }


def figures_of(stats: EagleStats) -> dict[str, float]:
    """Return the statistics of a generation under AITER's names.

    The entry "speedup" is the number of target forwards that decoding without drafts would take, divided by
    the number that were run. `EAGLEInference.benchmark` measures seconds instead.

    Without sequences or steps, the speedup is 0 or the number of tokens divided by 1.

    stats: Statistics that `Eagle.generate` returned.
    """
    trees = stats.trees
    plain = max((len(sequence.tokens) for sequence in stats.sequences), default=0)
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
    """Return a function that accepts `retrieve_index` as well as `retrive_index`, since SGLang uses both
    spellings.

    Other keywords are passed on as they are.

    call: The function to wrap; its parameters are spelled `retrive_...`.
    """

    @wraps(call)
    def spelled(*arguments: Any, **keywords: Any) -> Any:
        """Call the wrapped function with every `retrieve_` in a keyword replaced by `retrive_`.

        arguments: Positional arguments.
        keywords: Keyword arguments in either spelling.
        """
        if not keywords:
            return call(*arguments)
        renamed = {name.replace("retrieve_", "retrive_"): value for name, value in keywords.items()}
        return call(*arguments, **renamed)

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

    There are bs requests, S levels of drafting, k candidates below each node that was drafted from, and n
    nodes of each tree, the root included.

    The result has the buffers themselves where they were given; they may be longer than needed, and only
    their beginning is written.

    verified_id: Newest token of each request, [bs].
    parent_list: Parent of each group of k candidates, [bs, k * (S - 1) + 1]; -1 is the root. SGLang's empty
        list [bs, 0] means that all candidates hang below the root.
    top_scores_index: Flat numbers of the chosen candidates, ascending, [bs, n - 1].
    draft_tokens: Tokens of these candidates, [bs, n - 1].
    seq_lens: Number of tokens before each request's newest token, [bs].
    seq_lens_sum: Sum of seq_lens. None: the sum of a full mask is derived from the buffer's size, so that no
        device is waited for; without a buffer it is computed from seq_lens.
    topk: Number of candidates below each node that was drafted from, k.
    spec_steps: Number of levels of drafting, S.
    num_verify_tokens: Number of nodes of each tree, the root included, n.
    tree_mask_mode: Layout of the attention mask, see `TreeMaskMode`.
    tree_mask_buf: Buffer that the mask is written to; None: a new tensor.
    position_buf: Buffer that the positions are written to; None: a new tensor.
    """
    parent_list = _known(parent_list, len(verified_id))
    if seq_lens_sum is None and tree_mask_buf is not None:
        seq_lens_sum = tree_mask_buf.numel() // num_verify_tokens - len(verified_id) * num_verify_tokens
    built_trees = build_tree_structure(
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
    return built_trees._replace(
        tree_mask=_in_buffer(tree_mask_buf, built_trees.tree_mask),
        positions=_in_buffer(position_buf, built_trees.positions),
    )


# Further name in AITER.
build_tree_kernel_efficient = build_tree_efficient_triton


def _known(parent_list: Tensor, batch: int) -> Tensor:
    """Return the parent list in the form of this package. SGLang's list for a single level is empty; [-1],
    the root, replaces it for each request.

    parent_list: Parents of the groups of candidates, [bs, groups]; groups may be 0.
    batch: Number of requests, bs.
    """
    return parent_list if parent_list.shape[1] else parent_list.new_full((batch, 1), -1)


def _in_buffer(buffer: Tensor | None, computed: Tensor) -> Tensor:
    """Return a computed tensor. If there is a buffer, the values are copied to its beginning, and the buffer
    is returned.

    Entries of the buffer beyond the computed tensor keep their values.

    buffer: A tensor that is at least as long; None: no copy is made.
    computed: The computed tensor.
    """
    if buffer is None:
        return computed
    buffer[: len(computed)].copy_(computed)
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

    There are bs requests, S levels of drafting, k candidates below each node that was drafted from, and n
    nodes of each tree. A full mask may be longer than the trees need; entries that belong to no tree become
    True.

    The keywords may also be spelled `retrieve_...`.

    parent_list: Parent of each group of k candidates, [bs, k * (S - 1) + 1], or the empty list [bs, 0].
    selected_index: Flat numbers of the chosen candidates, ascending, [bs, n - 1].
    verified_seq_len: Number of tokens before each request's newest token, [bs].
    tree_mask: Output. Attention mask of the trees, in the layout of `tree_mask_mode`.
    positions: Output. Position of each node, [bs * n].
    retrive_index: Output. Row of each node in the batch, [bs, n].
    retrive_next_token: Output. First child of each node, [bs, n]; -1: none.
    retrive_next_sibling: Output. Next child of the same parent, [bs, n]; -1: none.
    topk: Number of candidates below each node that was drafted from, k.
    depth: Number of levels of drafting, S.
    draft_token_num: Number of nodes of each tree, the root included, n.
    tree_mask_mode: Layout of the attention mask, see `TreeMaskMode`.
    """
    parents = _known(parent_list, len(verified_seq_len))
    arrays = (tree_mask, positions, retrive_index, retrive_next_token, retrive_next_sibling)
    # This function returns no tokens, so that any arrays of the right shape stand for them.
    arguments = (verified_seq_len, parents, selected_index, selected_index, verified_seq_len)
    shape = (topk, depth, draft_token_num)
    if write_tree_structure(arrays, arguments, *shape, tree_mask_mode):
        return
    built_trees = build_tree_efficient_triton(*arguments, None, *shape, tree_mask_mode, tree_mask, positions)
    for output, links in zip(arrays[2:], built_trees[2:5]):
        output.copy_(links)


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

    A path goes down as many levels as accept_index has columns, less one. There are bs requests and trees of
    n nodes.

    Entries for which nothing was accepted keep the caller's values. The keywords may also be spelled
    `retrieve_...`.

    predicts: Output. Token after each row on the accepted path, at least [bs * n].
    accept_index: Output. Rows of the accepted nodes, the root first, [bs, S + 1].
    accept_token_num: Output. Number of accepted drafts, the root not counted, [bs].
    candidates: Tokens of the nodes, the root first, [bs, n].
    retrive_index: Row of each node in the batch, [bs, n].
    retrive_next_token: First child of each node, [bs, n]; -1: none.
    retrive_next_sibling: Next child of the same parent, [bs, n]; -1: none.
    target_predict: The target's token after each node, [bs, n].
    topk: Not used; SGLang passes it.
    """
    outputs = Verified(predicts, accept_index, accept_token_num)
    links = (retrive_index, retrive_next_token, retrive_next_sibling)
    arguments = (candidates, target_predict, *links)
    if not write_tree_greedy(outputs, arguments):
        _copy(outputs, tree_functions.verify_tree_greedy(*arguments, accept_index.shape[1] - 1))
    return tuple(outputs)


# Further name in AITER.
verify_tree_greedy_triton = verify_tree_greedy_func


def sgl_verify_tree_greedy(*given: Tensor, **named: Tensor) -> None:
    """Run `verify_tree_greedy_func` without a result, as `sgl_kernel.verify_tree_greedy` does.

    given: Positional arguments of `verify_tree_greedy_func`.
    named: Keyword arguments of `verify_tree_greedy_func`, with `retrive_` or `retrieve_`.
    """
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

    There are bs requests, trees of n nodes, and V tokens in the vocabulary.

    Returns None. Entries for which nothing was accepted keep the caller's values. The keywords may also be
    spelled `retrieve_...`.

    predicts: Output. Token after each row on the accepted path, at least [bs * n].
    accept_index: Output. Rows of the accepted nodes, the root first, [bs, S + 1].
    accept_token_num: Output. Number of accepted drafts, the root not counted, [bs].
    candidates: Tokens of the nodes, the root first, [bs, n].
    retrive_index: Row of each node in the batch, [bs, n].
    retrive_next_token: First child of each node, [bs, n]; -1: none.
    retrive_next_sibling: Next child of the same parent, [bs, n]; -1: none.
    uniform_samples: One random number in [0, 1) for each node, [bs, n].
    uniform_samples_for_final_sampling: One random number in [0, 1) for each request's last token, [bs].
    target_probs: The target's probabilities after each node, [bs, n, V].
    draft_probs: The draft's probabilities after each node, [bs, n, V]. They are only read, and not used as
        scratch memory.
    threshold_single: A child with at least this probability under the target is accepted, in [0, 1].
    threshold_acc: Factor of the random numbers, in [0, 1]. Below 1, more drafts are accepted, and the result
        is not exact.
    deterministic: Not used, because the result is always deterministic.
    """
    outputs = Verified(predicts, accept_index, accept_token_num)
    tree = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    coins = (uniform_samples, uniform_samples_for_final_sampling)
    arguments = (*tree, *coins, target_probs, draft_probs)
    thresholds = (threshold_single, threshold_acc)
    if not write_tree_sampling(outputs, arguments, *thresholds):
        _copy(
            outputs,
            tree_functions.tree_speculative_sampling(*arguments, *thresholds, accept_index.shape[1] - 1),
        )


def _copy(outputs: Verified, computed: Verified) -> None:
    """Copy results into the caller's arrays, except where a result is -1; there the caller's value stays.

    `where` is used so that the device is not waited for. SGLang's predicts are one row longer than needed.

    outputs: The caller's arrays, which are written to.
    computed: The computed results; each may be shorter than its output.
    """
    for output, result in zip(outputs, computed):
        target = output[: len(result)]
        target.copy_(result.where(result >= 0, target.to(result.dtype)))


def fast_topk_torch(scores: Tensor, k: int, dim: int = -1, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return (values, indices) of torch's top-k.

    scores: Any tensor.
    k: Number of values to return, at most the dimension's size.
    dim: Dimension along which the best are chosen.
    sorted: True: the largest value comes first.
    """
    return scores.topk(k, dim=dim, sorted=sorted)


def select_top_k_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (scores, token ids) of the most likely tokens, largest first, in the last dimension.

    logits: Logits over a vocabulary of V tokens, [bs, V] or [bs, candidates, V].
    k: Number of tokens to return, at most V.
    """
    return logits.topk(k, dim=-1)


def generate_token_bitmask(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Return bool [bs, vocab_size], True at the token ids of each row.

    token_ids: Token ids, [bs, num_tokens], each below `vocab_size`.
    vocab_size: Number of tokens of the vocabulary.
    """
    return token_ids.new_zeros((len(token_ids), vocab_size)).scatter_(1, token_ids, 1).bool()


def sample_from_logits(
    logits: Tensor, temperature: float = 1.0, top_p: float | None = None, top_k: int | None = None
) -> Tensor:
    """Return one token id for each row, [bs], by torch's random numbers.

    top_k applies first. top_p keeps the fewest most likely tokens that reach it together, at least one.

    A top_k beyond the vocabulary counts as all. Rows are drawn independently, by torch's global generator.

    logits: Logits over a vocabulary of V tokens, [bs, V].
    temperature: Divisor of the logits; 0 takes the most likely token.
    top_p: Probability mass that is kept; None: all.
    top_k: Number of tokens that are kept; None or 0: all.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    ordered, tokens = (logits / temperature).topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)
    chances = ordered.softmax(dim=-1)
    if top_p is not None:
        # The mass of all likelier tokens: chances [.5 .3 .2] -> [0 .5 .8]
        mass_before = chances.cumsum(dim=-1) - chances
        cut = mass_before >= top_p
        cut[..., 0] = False
        chances = chances.masked_fill(cut, 0)
    return tokens.gather(-1, chances.multinomial(1)).squeeze(-1)


def calculate_acceptance_rate(accept_lengths: Tensor, num_draft_tokens: int) -> float:
    """Return accepted tokens divided by drafted tokens; 0 without trees.

    accept_lengths: Number of accepted drafts of each tree, [num_trees].
    num_draft_tokens: Number of drafted tokens of each tree.
    """
    proposed = num_draft_tokens * len(accept_lengths)
    return float(accept_lengths.sum()) / proposed if proposed else 0.0


def pad_to_alignment(tensor: Tensor, alignment: int, dim: int = 0, value: float = 0.0) -> Tensor:
    """Return a tensor padded at the end of a dimension; the tensor itself if its size fits already.

    The original values come first; the tensor itself is never changed.

    tensor: The tensor.
    alignment: The dimension's size becomes a multiple of this number, at least 1.
    dim: The dimension.
    value: Value of the padding.
    """
    missing = -tensor.shape[dim] % alignment
    shape = [*tensor.shape]
    shape[dim] += missing
    padded = tensor.new_full(shape, value)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded if missing else tensor


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`; 1 for 0 and for negative numbers.

    n: An integer.
    """
    return 1 << max(n - 1, 0).bit_length()
