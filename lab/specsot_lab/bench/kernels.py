"""`specsot bench kernels`: microseconds of the Triton kernels, and of attention also by torch.

Every result is compared with the reference rule before it is timed.

called:    Wall-clock time of a public call in a row of calls, with checks, Python and launches; the device is
    synchronized at the end.

unchecked: The same without the checks.

replayed:  The same work as a captured graph, that is, without the cost of launches.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from specsot.errors import InvalidRequest
from specsot_bench.core.tables import figure, markdown, text
from specsot_bench.results import Stopwatch, named, publish
from specsot_kernels import (
    TreeMaskMode,
    build_tree_structure,
    gpu,
    organize_draft_results,
    reference,
    tree_speculative_sampling,
    verify_tree_greedy,
)
from specsot_kernels.gpu import attention
from specsot_kernels.segments import RowSpan
from specsot_model.attention import attend, plan_readings

# A function that is measured; what it returns is ignored.
Call = Callable[[], object]
# Positional arguments of a kernel.
Arguments = tuple[Any, ...]
# Figures by name.
Row = dict[str, object]
# The reference rules on NumPy arrays; Any, because they are called with arrays of both kinds.
RULE: Any = reference
# The Triton kernels with the same names.
KERNELS: Any = gpu

# Measurements, of which the median is the result. Untuned.
TURNS: Final = 7
# Seconds. The duration of one measurement. Untuned.
MEASUREMENT_SECONDS: Final = 0.04
# Children of a node, levels, and nodes of the measured trees.
SHAPES: Final = ((4, 3, 8), (8, 5, 32), (10, 7, 60))
# Token ids of Llama-3.
VOCABULARY: Final = 128_256
# Tokens. Random sequences are at least half as long, and shorter than this.
MAX_CONTEXT: Final = 1024
# Sequences of a batch.
BATCH: Final = 8
# Query heads of Llama-3.1-8B.
HEADS: Final = 32
# KV heads of Llama-3.1-8B.
KV_HEADS: Final = 8
# Size of a head of Llama-3.1-8B.
DIM: Final = 128
# Rows of a KV page.
PAGE: Final = 64


def measure(context_lengths: Sequence[int], output: Path | None) -> int:
    """Measure all kernels, publish the table, and return the exit status 0.

    context_lengths: Numbers of shared KV rows before the trees of attention.
    output: The JSON file; None: the table is only printed.

    Raises InvalidRequest if there is no GPU.

    Also raises AssertionError if a kernel's result differs from the reference rule.
    """
    if not torch.cuda.is_available():
        raise InvalidRequest("bench kernels needs a GPU")
    bandwidth = measure_copy()
    settings = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "batch": BATCH}
    settings |= {
        "vocabulary": VOCABULARY,
        "triton": version("triton"),
        "copy TB/s": round(bandwidth / 1e12, 2),
    }
    rows = named(list(_rows(context_lengths, bandwidth)), "call", "shape")
    publish("kernels", settings, rows, markdown(COLUMNS, rows), output)
    return 0


def _rows(context_lengths: Sequence[int], bandwidth: float) -> Iterator[Row]:
    """Yield the rows of all shapes.

    context_lengths: Numbers of shared KV rows before the trees of attention.
    bandwidth: Bytes per second of a copy, read and written.

    Trees come first, one group for each of SHAPES; then attention, of one tree of 60 nodes and of six trees
    of 32, for each context length.
    """
    for shape in SHAPES:
        yield from measure_trees(*shape)
    for branches, nodes in ((1, 60), (6, 32)):
        for context_length in context_lengths:
            yield measure_attention(branches, nodes, context_length, bandwidth)


def measure_trees(top_k: int, levels: int, nodes: int) -> list[Row]:
    """Return the rows of building, verifying and sampling, and of the three calls of a greedy step together.

    top_k: Children of a node.
    levels: Levels of a tree.
    nodes: Nodes of a tree, root included. Bit-packed masks are left out for more than 32.

    Raises AssertionError if a kernel differs from the reference rule.

    There is one "build" row for each mask mode, then "verify", "sample float32", "sample bfloat16", and
    "organize + build + verify".
    """
    lists, roots, lengths = random_drafts(top_k, levels)
    on_device = [[torch.from_numpy(array).cuda() for array in arrays] for arrays in lists]
    total_length = int(lengths.sum())
    best = KERNELS.organize_draft_results(*on_device, nodes)
    arguments: Arguments = (torch.from_numpy(roots).cuda(), *best, torch.from_numpy(lengths).cuda())
    rule_drafts: Arguments = RULE.organize_draft_results(*lists, nodes)
    rows: list[Row] = []
    shape = f"k={top_k} levels={levels} nodes={nodes}"
    for mode in TreeMaskMode:
        if mode == TreeMaskMode.QLEN_ONLY_BITPACKING and nodes > 32:
            continue
        expected = RULE.build_trees(roots, *rule_drafts, lengths, top_k, mode, None)
        call = bind(KERNELS.build_trees, *arguments, top_k, mode, total_length)
        public = bind(build_tree_structure, *arguments, top_k, levels, nodes, mode, total_length)
        rows.append({"call": f"build {mode.name}", "shape": shape} | compared_row(call, expected, public))
    tree = KERNELS.build_trees(*arguments, top_k, TreeMaskMode.QLEN_ONLY, None)
    linked_trees: Arguments = (tree.draft_tokens.view(BATCH, nodes), *tree[2:5])
    targets = likely_targets(linked_trees)
    verify_arguments: Arguments = (linked_trees[0], targets, *linked_trees[1:])
    expected = RULE.verify_tree_greedy(*numpy_of(verify_arguments), levels)
    call = bind(KERNELS.verify_tree_greedy, *verify_arguments, levels)
    public = bind(verify_tree_greedy, *verify_arguments, levels)
    rows.append({"call": "verify", "shape": shape} | compared_row(call, expected, public))
    for kind in (torch.float32, torch.bfloat16):
        rows.append(
            {"call": f"sample {str(kind)[6:]}", "shape": shape}
            | sampling_row(linked_trees, targets, levels, kind)
        )

    def unchecked_step() -> object:
        """Select, build and verify trees without checks, and return the verification result."""
        best = KERNELS.organize_draft_results(*on_device, nodes)
        arrays = KERNELS.build_trees(
            arguments[0], *best, arguments[-1], top_k, TreeMaskMode.QLEN_ONLY, total_length
        )
        drafts = arrays.draft_tokens.view(BATCH, nodes)
        return KERNELS.verify_tree_greedy(drafts, targets, *arrays[2:5], levels)

    public_names: Any = (organize_draft_results, build_tree_structure, verify_tree_greedy)
    organize, build, verify = public_names

    def public_step() -> object:
        """Select, build and verify trees with checks, as a caller does, and return the verification
        result.
        """
        best = organize(*on_device, nodes)
        arrays = build(arguments[0], *best, arguments[-1], top_k, levels, nodes, 1, total_length)
        return verify(arrays.draft_tokens.view(BATCH, nodes), targets, *arrays[2:5], levels)

    rows.append(
        {"call": "organize + build + verify", "shape": shape}
        | compared_row(unchecked_step, expected, public_step)
    )
    return rows


def random_drafts(top_k: int, levels: int) -> tuple[list[list[np.ndarray[Any, Any]]], Any, Any]:
    """Return a batch of random drafts: a list with scores, tokens and parents of each level; the roots'
    tokens, [BATCH]; and the lengths of the sequences, [BATCH].

    A candidate's score is its parent's times a probability of its own, so that the parent of every selected
    candidate is selected.

    top_k: Children of a node.
    levels: Levels of a tree, at least 1.

    The same top_k and levels always give the same drafts. Scores are [BATCH, 1, top_k] at the first level and
    [BATCH, top_k, top_k] at the others, and tokens [BATCH, top_k] and [BATCH, top_k * top_k]. Parents are
    [BATCH, top_k + 1] at the first level (-1 for the root, then 0 .. top_k - 1), and [BATCH, top_k] at the
    others: the numbers, counted over all levels, of the best candidates of that level; lengths are at least
    MAX_CONTEXT // 2 and below MAX_CONTEXT.
    """
    rng = np.random.default_rng(top_k)
    scores = [rng.random((BATCH, 1, top_k), np.float32)]
    tokens = [rng.integers(0, VOCABULARY, (BATCH, top_k))]
    parents = [np.tile(np.arange(-1, top_k), (BATCH, 1))]
    fed_scores = scores[0].reshape(BATCH, top_k)
    for level_number in range(1, levels):
        scores.append(fed_scores[:, :, None] * rng.random((BATCH, top_k, top_k), np.float32))
        tokens.append(rng.integers(0, VOCABULARY, (BATCH, top_k * top_k)))
        level_scores = scores[-1].reshape(BATCH, -1)
        best = np.argsort(-level_scores, 1, kind="stable")[:, :top_k]
        fed_scores = np.take_along_axis(level_scores, best, 1)
        parents.append(top_k + (level_number - 1) * top_k * top_k + best)
    lengths = rng.integers(MAX_CONTEXT // 2, MAX_CONTEXT, BATCH)
    return [scores, tokens, parents], rng.integers(0, VOCABULARY, BATCH), lengths


def likely_targets(linked: Sequence[Tensor]) -> Tensor:
    """Return the target token after each node, [BATCH, nodes] on the GPU: that of its last child, or 0 if it
    has none.

    linked: Four tensors [BATCH, nodes]: tokens, row in the result, first child and next sibling of each node;
        -1 where there is none.

    Nodes are read on the host, so that this is not for measurements.
    """
    tokens, _, first_children, next_siblings = (tensor.cpu() for tensor in linked)
    targets = torch.zeros_like(tokens)
    for b, node in np.ndindex(*tokens.shape):
        child = int(first_children[b, node])
        while child >= 0:
            targets[b, node] = tokens[b, child]
            child = int(next_siblings[b, child])
    return targets.cuda()


def sampling_row(linked_trees: Sequence[Tensor], targets: Tensor, levels: int, dtype: torch.dtype) -> Row:
    """Return the row of sampling. Half of the probability at each node is that of its target token.

    linked_trees: Four tensors [BATCH, nodes], see `likely_targets`.
    targets: The target token after each node, [BATCH, nodes].
    levels: Levels of a tree.
    dtype: Type of the probabilities.

    The reference rule computes in double precision, from the same probabilities. Raises AssertionError if the
    kernel's result differs.
    """
    batch, nodes = targets.shape
    torch.manual_seed(1)
    probabilities = torch.rand(batch, nodes, VOCABULARY, device="cuda")
    probabilities /= probabilities.sum(-1, keepdim=True) * 2
    probabilities.scatter_add_(2, targets[..., None], torch.full((batch, nodes, 1), 0.5, device="cuda"))
    arguments = (
        torch.rand(batch, nodes, device="cuda"),
        torch.rand(batch, device="cuda"),
        probabilities.to(dtype),
        None,
    )
    rule_arguments = (*numpy_of(linked_trees), *numpy_of(tensor.double() for tensor in arguments[:3]), None)
    expected = RULE.tree_speculative_sampling(*rule_arguments, 1.0, 1.0, levels)
    call = bind(KERNELS.tree_speculative_sampling, *linked_trees, *arguments, 1.0, 1.0, levels)
    return compared_row(
        call, expected, bind(tree_speculative_sampling, *linked_trees, *arguments, num_steps=levels)
    )


def measure_copy() -> float:
    """Return the bytes per second of a large copy, where bytes read and bytes written both count.

    The copy is one of 2 GiB of fp32 numbers on the GPU.
    """
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / called_microseconds(lambda: target.copy_(source)) * 1e6


def measure_attention(branches: int, nodes: int, context_length: int, bandwidth: float) -> Row:
    """Return the row of one layer of attention over trees that share one context. The floor is the time of
    reading each byte once.

    branches: Number of trees.
    nodes: Nodes of each tree, root included.
    context_length: Number of shared KV rows, a multiple of PAGE.
    bandwidth: Bytes per second of a copy, read and written.

    Raises AssertionError if the result differs by more than 2 % from that of torch.

    The times are "called us", "replayed us", those of torch's attention ("torch called us", "torch replayed
    us"), and "plan us", in which the attention plan is made. The layers are read in turns from several copies
    that are larger than the device's cache.
    """
    own_pages = -(-(nodes + PAGE) // PAGE)
    pages = context_length // PAGE
    spans: list[RowSpan] = []
    for number in range(branches):
        branch_pages = tuple(pages + number * own_pages + page for page in range(own_pages))
        ancestors = [1]
        for row in range(1, nodes):
            ancestors.append(ancestors[(row - 1) // 2] | 1 << row)
        spans.append(RowSpan(nodes, context_length, nodes, (*range(pages), *branch_pages), tuple(ancestors)))
    torch.manual_seed(1)
    kv = torch.randn(
        2, pages + branches * own_pages, KV_HEADS, PAGE, DIM, device="cuda", dtype=torch.bfloat16
    )
    # Several copies, more than the device's cache can hold, so that every call reads memory.
    layers = [kv.clone() for _ in range(max(1, int(3e8 // kv.nbytes)))]
    q = torch.randn(branches * nodes, KV_HEADS, HEADS // KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    q *= DIM**-0.5
    make_plan = bind(attention.plan_attention, spans, PAGE, HEADS // KV_HEADS, "cuda")
    plan: Any = make_plan()
    fallback = plan_readings(spans, PAGE, HEADS // KV_HEADS, "packed", q.dtype, "cuda")
    layer_cycle = itertools.cycle(layers)
    result = attention.attend(q, kv, plan)
    expected = attend(q, kv, fallback)
    if (result - expected).float().norm() > 0.02 * expected.float().norm():
        raise AssertionError("the attention kernel differs from the fallback")

    def kernel_call() -> Tensor:
        """Run the kernel on the next copy of the KV rows."""
        return attention.attend(q, next(layer_cycle), plan)

    def fallback_call() -> Tensor:
        """Run the attention of torch on the next copy of the KV rows."""
        return attend(q, next(layer_cycle), fallback)

    needed_bytes = 2 * (context_length + branches * nodes) * KV_HEADS * DIM * 2 + 2 * q.nbytes
    sizes = f"branches={branches} nodes={nodes} text={context_length}"
    return {
        "call": "attention bfloat16",
        "shape": f"{sizes} heads={HEADS}/{KV_HEADS} dim={DIM}",
        "called us": called_microseconds(kernel_call),
        "replayed us": replayed_microseconds(kernel_call, len(layers)),
        "torch called us": called_microseconds(fallback_call),
        "torch replayed us": replayed_microseconds(fallback_call, len(layers)),
        "plan us": called_microseconds(make_plan),
        "floor us": round(needed_bytes / bandwidth * 1e6, 1),
    }


def numpy_of(arrays: Iterable[Tensor]) -> Arguments:
    """Return tensors as NumPy arrays on the host; () for none.

    arrays: The tensors.
    """
    return tuple(tensor.cpu().numpy() for tensor in arrays)


def bind(function: Callable[..., object], *positional: Any, **keywords: Any) -> Call:
    """Return a function without parameters that calls `function`.

    function: The function to call.
    positional: Its positional arguments.
    keywords: Its keyword arguments.
    """
    return lambda: function(*positional, **keywords)


def compared_row(call: Call, expected: Any, public: Call) -> Row:
    """Return the microseconds of a kernel, after a check that its result is that of the reference rule.

    call: Calls the kernel without checks.
    expected: The reference rule's result, a named tuple of arrays.
    public: The same call with checks.

    Raises AssertionError if a result differs.

    The microseconds are "called us" (with checks), "unchecked us" (without), and "replayed us" (without, as a
    captured graph). Results must be equal in every value.
    """
    for checked_call in (call, public):
        results: Any = checked_call()
        for name, result, rule_result in zip(expected._fields, results, expected):
            if result.cpu().tolist() != rule_result.tolist():
                raise AssertionError(f"{name} of the kernel differs from the reference rule")
    return {
        "called us": called_microseconds(public),
        "unchecked us": called_microseconds(call),
        "replayed us": replayed_microseconds(call),
    }


def called_microseconds(call: Call) -> float:
    """Return the microseconds of a call, measured in rows of calls that take about MEASUREMENT_SECONDS each.

    call: The function to measure; it is called five times before.

    The result is a median, rounded to one decimal place. Each row has at least three calls.
    """
    for _ in range(5):
        call()
    return round(1e6 * median_seconds(call, max(int(MEASUREMENT_SECONDS / mean_seconds(call, 3)), 3)), 1)


def median_seconds(call: Call, calls: int) -> float:
    """Return the median seconds of a call, over TURNS measurements. One call before them is not measured.

    call: The function to measure.
    calls: Number of calls in a row per measurement, whose mean counts.
    """
    call()
    return statistics.median(mean_seconds(call, calls) for _ in range(TURNS))


def mean_seconds(call: Call, calls: int) -> float:
    """Return the mean seconds of a call. The GPU is synchronized before the first call and after the last.

    call: The function to measure.
    calls: Number of calls in a row, at least 1.
    """
    torch.cuda.synchronize()
    watch = Stopwatch()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return watch.seconds / calls


def replayed_microseconds(call: Call, calls: int = 1) -> float:
    """Return the microseconds of a call that is replayed in a CUDA graph.

    call: The function to capture.
    calls: Number of calls that the graph contains.
    """
    return round(called_microseconds(captured(call, calls)) / calls, 1)


def captured(call: Call, calls: int) -> Call:
    """Return a function that launches the calls as one CUDA graph, and does not wait for the device.

    call: The function to capture. It is called once before, so that kernels are compiled outside of the
        graph.
    calls: Number of calls that the graph contains.

    The tensors of `call` stay alive as long as the function does.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    # The graph reads the tensors of the call that it was captured from, so both must live equally long.
    captured_call = graph, call
    return lambda: captured_call[0].replay()


# The columns of the table. Only attention has a time of torch's and a floor.
COLUMNS: Final = (
    text("call", "call"),
    text("shape", "shape"),
    *(
        figure(name, name, 1)
        for name in ("called us", "unchecked us", "replayed us", "torch called us", "torch replayed us")
    ),
    figure("plan us", "plan us", 1),
    figure("floor us", "floor us", 1),
)
