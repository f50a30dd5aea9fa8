"""The time in which an EAGLE-3 head of the published shape grows one tree, by depth, on one GPU.

The head's weights are made up, so the tokens of its trees are meaningless.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Final

import torch

from specsot.checkpoint.config import ModelConfig
from specsot.members import Quantization
from specsot_drafter.eagle_kv import DraftPages, DueRows
from specsot_drafter.heads.checkpoint import HeadShape
from specsot_drafter.heads.eagle import Eagle3Head, HeadLayers, SummedTaps
from specsot_drafter.heads.fused import FusedHead
from specsot_drafter.overlap.graph_growth import GraphInput, TreeGraphs
from specsot_lab.bench.clock import call_seconds
from specsot_lab.bench.gpu_steps import Speeds, floor_of_draft, kernels_of
from specsot_lab.bench.synthetic_models import MadeUp
from specsot_model.cuda_graphs import GraphCapture
from specsot_model.decoder import Decoder
from specsot_model.layers import Norm
from specsot_model.linear import Linear
from specsot_model.rotary import Rotary
from specsot_model.weights import Fetch

# Token ids of the published head.
VOCABULARY: Final = 32_000
# Children of a node in the published trees.
TOP_K: Final = 10
# Depths of the trees that are measured.
DEPTHS: Final = (4, 5, 6, 7)
# Tokens that were accepted since the last draft. Untuned.
DUE: Final = 6
# Measurements, of which the median is the result. Untuned.
TURNS: Final = 40
# Rows of a KV page.
PAGE: Final = 64


def measure_drafts(
    decoder: Decoder, context_length: int, baseline_seconds: float, speeds: Speeds
) -> Iterator[dict[str, object]]:
    """Yield the milliseconds from DUE accepted tokens to all candidates of a tree on the host, for a head in
    bf16 and one in fp8.

    decoder: The whole base model.
    context_length: Number of tokens of the sequence.
    baseline_seconds: Seconds that a step without drafts takes on the device.
    speeds: The measured speeds of the device.
    """
    for kind in (None, "fp8"):
        yield from _measure_head(decoder, context_length, baseline_seconds, speeds, kind)


def _measure_head(
    decoder: Decoder, context_length: int, baseline_seconds: float, speeds: Speeds, kind: Quantization | None
) -> Iterator[dict[str, object]]:
    """Yield the rows of one head, and one with its kernels.

    decoder: The whole base model.
    context_length: Number of tokens of the sequence.
    baseline_seconds: Seconds that a step without drafts takes on the device.
    speeds: The measured speeds of the device.
    kind: The head's quantization; None: bf16.

    There is a row for each of DEPTHS, then one with "us", the microseconds by kernel, of the deepest tree.
    "floor ms" is the shortest possible time, and "of a plain step %" compares with `baseline_seconds`.
    """
    shape = head_shape(decoder.config)
    graphs, graph_input = graphs_after(made_up_head(decoder, shape, kind), context_length)
    precision = kind or "bf16"
    for depth in DEPTHS:
        seconds = statistics.median(call_seconds(partial(graphs.run, [graph_input], depth + 1), TURNS))
        yield {
            "what": f"draft, called, head in {precision}",
            "depth": depth,
            "ms": round(seconds * 1e3, 3),
            "of a plain step %": round(100 * seconds / baseline_seconds, 1),
            "floor ms": round(1e3 * floor_of_draft(shape, speeds, depth + 1, 1 if kind else 2), 3),
        }
    kernels = kernels_of(lambda: graphs.run([graph_input], max(DEPTHS) + 1))
    yield {"what": f"profile of a draft, head in {precision}", "depth": max(DEPTHS), "us": kernels}


def graphs_after(head: Eagle3Head, context_length: int) -> tuple[TreeGraphs, GraphInput]:
    """Return the captured growth of a tree for one sequence, and its input. DUE rows of the sequence are not
    computed yet.

    head: The head that grows the tree.
    context_length: Number of tokens of the sequence, at least DUE.

    Features and KV of the sequence are random. Needs a CUDA device and Triton. Fails with an AssertionError
    if the pages do not suffice.
    """
    from specsot_kernels.gpu.growing import grow

    levels = max(DEPTHS) + 1
    memory = DraftPages(head, -(-(context_length + levels * TOP_K) // PAGE) + 1, PAGE)
    memory.table.open(1)
    memory.table.reserve(1, context_length)
    memory.features.normal_()
    memory.kv.layers[0].normal_()
    tree_pages = memory.reserve_tree(1, context_length, levels * TOP_K)
    assert tree_pages is not None
    graph_input = GraphInput(DueRows(1, context_length - DUE, tuple(range(DUE)), True), tree_pages)
    return TreeGraphs(FusedHead(head), memory, TOP_K, levels, GraphCapture(), grow, (1,)), graph_input


def head_shape(config: ModelConfig) -> HeadShape:
    """Return the shape of a head with one layer as wide as those of the base model. The layer reads an
    embedding next to a feature.

    config: The base model.
    """
    return HeadShape(
        hidden=config.hidden,
        inputs=2 * config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate,
        vocab=VOCABULARY,
        layers=1,
    )


def made_up_head(decoder: Decoder, shape: HeadShape, kind: Quantization | None = None) -> Eagle3Head:
    """Return a head with made-up weights for a base model, whose embedding it shares.

    decoder: The whole base model.
    shape: The head's shape.
    kind: The head's quantization; None: that of the base.

    The head reads three taps: layer 2, the middle one, and the third last. Its draft ids are the first ids of
    the base model.
    """
    config = decoder.config
    device = decoder.device
    fetch = Fetch(MadeUp(), decoder.dtype, device, kind)
    rotary = Rotary(config.rope, shape.heads, shape.kv_heads, shape.head_dim, device)
    ones = torch.ones(shape.hidden, dtype=decoder.dtype, device=device)
    taps = (2, config.layers // 2, config.layers - 3)
    return Eagle3Head(
        shape=shape,
        positions=config.max_positions,
        fusion=SummedTaps(taps, fetch("fc.weight", (shape.hidden, 3 * config.hidden)), None),
        table=decoder.edges.embedding(),
        token_norm=Norm(ones, config.eps),
        feature_norm=Norm(ones, config.eps),
        decoder=HeadLayers(fetch, shape, rotary, config.eps),
        norm=Norm(ones, config.eps),
        lm_head=Linear(fetch("lm_head.weight", (shape.vocab, shape.hidden)), None, kind),
        offsets=None,
    )
