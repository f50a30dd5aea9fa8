"""`specsot bench kernels`: microseconds of the Triton kernels; of attention, beside torch.

Every result is held against the plain rule before it is timed.

called:    wall time of a public call in a row of calls, checks, Python and launches included; the device
           is waited for at the end. unchecked: without the checks.
replayed:  the same work as a captured graph: what is left where launches cost nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specsot.errors import InvalidRequest
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
from specsot_lab.bench.clock import Call, RowLog, captured, mean_seconds, median_seconds
from specsot_model.attention import attend, plan_readings

Many = tuple[Any, ...]
Row = dict[str, object]
RULE: Any = reference
KERNELS: Any = gpu

TURN = 0.04  # seconds of a measurement
SHAPES = ((4, 3, 8), (8, 5, 32), (10, 7, 60))  # k, levels, nodes
VOCABULARY = 128_256
TEXT = 1024
BATCH = 8
# Llama-3.1-8B
HEADS = 32
KV_HEADS = 8
DIM = 128
PAGE = 64


def measure(texts: Sequence[int], output: Path | None) -> int:
    """Measure all kernels and publish the table. texts: rows of text before the trees of attention. output:
    the JSON file; None: only print. Raises InvalidRequest without a GPU.
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
    log = RowLog("kernels", settings, output, "call", "shape")
    for row in _rows(texts, bandwidth):
        log.add(row)
    return 0


def _rows(texts: Sequence[int], bandwidth: float) -> Iterator[Row]:
    """Yield the rows of all shapes. bandwidth: bytes a second of a copy."""
    for shape in SHAPES:
        yield from measure_trees(*shape)
    for branches, tree in ((1, 60), (6, 32)):
        for text in texts:
            yield measure_attention(branches, tree, text, bandwidth)


def measure_trees(k: int, steps: int, nodes: int) -> list[Row]:
    """Return rows of building, verifying and sampling, and of the three calls of a greedy step together.

    k: children of a node. steps: levels. nodes: of a tree.
    """
    lists, roots, lengths = draft(k, steps)
    on_device = [[torch.from_numpy(each).cuda() for each in one] for one in lists]
    total = int(lengths.sum())
    chosen = KERNELS.organize_draft_results(*on_device, nodes)
    given: Many = (torch.from_numpy(roots).cuda(), *chosen, torch.from_numpy(lengths).cuda())
    plain: Many = RULE.organize_draft_results(*lists, nodes)
    rows: list[Row] = []
    shape = f"k={k} levels={steps} nodes={nodes}"
    for mode in TreeMaskMode:
        if mode == TreeMaskMode.QLEN_ONLY_BITPACKING and nodes > 32:
            continue
        wanted = RULE.build_trees(roots, *plain, lengths, k, mode, None)
        call = bind(KERNELS.build_trees, *given, k, mode, total)
        public = bind(build_tree_structure, *given, k, steps, nodes, mode, total)
        rows.append({"call": f"build {mode.name}", "shape": shape} | compare(call, wanted, public))
    tree = KERNELS.build_trees(*given, k, TreeMaskMode.QLEN_ONLY, None)
    linked: Many = (tree.draft_tokens.view(BATCH, nodes), *tree[2:5])
    predict = likely(linked)
    walked: Many = (linked[0], predict, *linked[1:])
    wanted = RULE.verify_tree_greedy(*numpy_of(walked), steps)
    call = bind(KERNELS.verify_tree_greedy, *walked, steps)
    public = bind(verify_tree_greedy, *walked, steps)
    rows.append({"call": "verify", "shape": shape} | compare(call, wanted, public))
    for kind in (torch.float32, torch.bfloat16):
        rows.append(
            {"call": f"sample {str(kind)[6:]}", "shape": shape} | sample(linked, predict, steps, kind)
        )

    def step() -> object:
        """Choose, build and verify without checks."""
        best = KERNELS.organize_draft_results(*on_device, nodes)
        arrays = KERNELS.build_trees(given[0], *best, given[-1], k, TreeMaskMode.QLEN_ONLY, total)
        drafts = arrays.draft_tokens.view(BATCH, nodes)
        return KERNELS.verify_tree_greedy(drafts, predict, *arrays[2:5], steps)

    public_names: Any = (organize_draft_results, build_tree_structure, verify_tree_greedy)
    organize, build, verify = public_names

    def public_step() -> object:
        """Choose, build and verify with checks, as a caller does."""
        best = organize(*on_device, nodes)
        arrays = build(given[0], *best, given[-1], k, steps, nodes, 1, total)
        return verify(arrays.draft_tokens.view(BATCH, nodes), predict, *arrays[2:5], steps)

    rows.append({"call": "organize + build + verify", "shape": shape} | compare(step, wanted, public_step))
    return rows


def draft(k: int, steps: int) -> tuple[list[list[np.ndarray[Any, Any]]], Any, Any]:
    """Return a batch of random draftings: the three lists, the roots' tokens, the texts' lengths.

    A candidate's score is its parent's times a probability of its own, so that the parent of every chosen
    candidate is chosen. k: children of a node. steps: levels.
    """
    rng = np.random.default_rng(k)
    scores = [rng.random((BATCH, 1, k), np.float32)]
    tokens = [rng.integers(0, VOCABULARY, (BATCH, k))]
    parents = [np.tile(np.arange(-1, k), (BATCH, 1))]
    fed = scores[0].reshape(BATCH, k)
    for step in range(1, steps):
        scores.append(fed[:, :, None] * rng.random((BATCH, k, k), np.float32))
        tokens.append(rng.integers(0, VOCABULARY, (BATCH, k * k)))
        level = scores[-1].reshape(BATCH, -1)
        best = np.argsort(-level, 1, kind="stable")[:, :k]
        fed = np.take_along_axis(level, best, 1)
        parents.append(k + (step - 1) * k * k + best)
    lengths = rng.integers(TEXT // 2, TEXT, BATCH)
    return [scores, tokens, parents], rng.integers(0, VOCABULARY, BATCH), lengths


def likely(linked: Sequence[Tensor]) -> Tensor:
    """Return the target's token after each node: that of its last child, if it has one."""
    tokens, _, first, following = (each.cpu() for each in linked)
    wanted = torch.zeros_like(tokens)
    for b, node in np.ndindex(*tokens.shape):
        child = int(first[b, node])
        while child >= 0:
            wanted[b, node] = tokens[b, child]
            child = int(following[b, child])
    return wanted.cuda()


def sample(linked: Sequence[Tensor], predict: Tensor, steps: int, kind: torch.dtype) -> Row:
    """Return the row of sampling, with probabilities that favour the last child of each node. linked: the
    trees. predict: [batch, nodes] tokens. steps: levels. kind: type of the probabilities.
    """
    batch, nodes = predict.shape
    torch.manual_seed(1)
    chances = torch.rand(batch, nodes, VOCABULARY, device="cuda")
    chances /= chances.sum(-1, keepdim=True) * 2
    chances.scatter_add_(2, predict[..., None], torch.full((batch, nodes, 1), 0.5, device="cuda"))
    given = (
        torch.rand(batch, nodes, device="cuda"),
        torch.rand(batch, device="cuda"),
        chances.to(kind),
        None,
    )
    plain = (*numpy_of(linked), *numpy_of(each.double() for each in given[:3]), None)
    wanted = RULE.tree_speculative_sampling(*plain, 1.0, 1.0, steps)
    call = bind(KERNELS.tree_speculative_sampling, *linked, *given, 1.0, 1.0, steps)
    return compare(call, wanted, bind(tree_speculative_sampling, *linked, *given, num_steps=steps))


def measure_copy() -> float:
    """Return the bytes a second, read and written, of a large copy."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / called(lambda: target.copy_(source)) * 1e6


def measure_attention(branches: int, tree: int, text: int, bandwidth: float) -> Row:
    """Return the row of one layer of trees after one shared text; the floor is each byte once at that
    bandwidth.

    branches: trees. tree: nodes of each. text: shared rows. bandwidth: bytes a second.
    """
    own = -(-(tree + PAGE) // PAGE)
    pages = text // PAGE
    spans: list[RowSpan] = []
    for number in range(branches):
        mine = tuple(pages + number * own + each for each in range(own))
        seen = [1]
        for row in range(1, tree):
            seen.append(seen[(row - 1) // 2] | 1 << row)
        spans.append(RowSpan(tree, text, tree, (*range(pages), *mine), tuple(seen)))
    torch.manual_seed(1)
    kv = torch.randn(2, pages + branches * own, KV_HEADS, PAGE, DIM, device="cuda", dtype=torch.bfloat16)
    layers = [kv.clone() for _ in range(max(1, int(3e8 // kv.nbytes)))]  # more than the cache holds
    q = torch.randn(branches * tree, KV_HEADS, HEADS // KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    q *= DIM**-0.5
    planned = bind(attention.plan_attention, spans, PAGE, HEADS // KV_HEADS, "cuda")
    plan: Any = planned()
    fallback = plan_readings(spans, PAGE, HEADS // KV_HEADS, "packed", q.dtype, "cuda")
    turns = itertools.cycle(layers)
    found = attention.attend(q, kv, plan)
    wanted = attend(q, kv, fallback)
    if (found - wanted).float().norm() > 0.02 * wanted.float().norm():
        raise AssertionError("attention is not the fallback's")
    read, other = (lambda: attention.attend(q, next(turns), plan)), (lambda: attend(q, next(turns), fallback))
    needed = 2 * (text + branches * tree) * KV_HEADS * DIM * 2 + 2 * q.nbytes
    return {
        "call": "attention bfloat16",
        "shape": f"branches={branches} nodes={tree} text={text} heads={HEADS}/{KV_HEADS} dim={DIM}",
        "called us": called(read),
        "replayed us": replayed(read, len(layers)),
        "torch called us": called(other),
        "torch replayed us": replayed(other, len(layers)),
        "plan us": called(planned),
        "floor us": round(needed / bandwidth * 1e6, 1),
    }


def numpy_of(arrays: Iterable[Tensor]) -> Many:
    """Return tensors as arrays of NumPy."""
    return tuple(each.cpu().numpy() for each in arrays)


def bind(function: Callable[..., object], *given: Any, **named: Any) -> Call:
    """Return a call of the function with these arguments."""
    return lambda: function(*given, **named)


def compare(call: Call, wanted: Any, public: Call) -> Row:
    """Return the microseconds of a kernel, after a check that it gives what the rule gives. call: without
    checks. wanted: the rule's result. public: the same call with checks. Raises AssertionError if a result
    differs.
    """
    for each in (call, public):
        found: Any = each()
        for name, ours, theirs in zip(wanted._fields, found, wanted):
            if ours.cpu().tolist() != theirs.tolist():
                raise AssertionError(f"{name} is not the rule's")
    return {"called us": called(public), "unchecked us": called(call), "replayed us": replayed(call)}


def called(call: Call) -> float:
    """Return the microseconds of a call, in rows of calls that take about TURN seconds each."""
    for _ in range(5):
        call()
    return round(1e6 * median_seconds(call, max(int(TURN / mean_seconds(call, 3)), 3)), 1)


def replayed(call: Call, calls: int = 1) -> float:
    """Return the microseconds of a call in a CUDA graph of so many calls."""
    return round(called(captured(call, calls)) / calls, 1)
