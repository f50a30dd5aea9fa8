"""What an EAGLE-3 head of the published shape takes to grow one tree, by depth, on one GPU.

The head's weights are made up, so its trees are right in shape alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import torch

from specsot.checkpoint.config import ModelConfig
from specsot.members import Quantization
from specsot_drafter.eagle_kv import DraftPages, DueRows
from specsot_drafter.heads.checkpoint import HeadShape
from specsot_drafter.heads.eagle import Eagle3Head, HeadLayers, SummedTaps
from specsot_drafter.heads.fused import FusedHead
from specsot_drafter.overlap.graph_growth import GraphInput, TreeGraphs
from specsot_lab.bench.clock import each_of
from specsot_lab.bench.gpu_steps import Speeds, floor_of_draft, kernels_of
from specsot_lab.bench.synthetic_models import MadeUp
from specsot_model.cuda_graphs import GraphCapture
from specsot_model.decoder import Decoder
from specsot_model.layers import Norm
from specsot_model.linear import Linear
from specsot_model.rotary import Rotary
from specsot_model.weights import Fetch

# of the published heads and trees
VOCABULARY = 32_000
TOP_K = 10
DEPTHS = (4, 5, 6, 7)
DUE = 6  # tokens that were accepted since the last draft
TURNS = 40
PAGE = 64


def measure_drafts(decoder: Decoder, text: int, plain: float, speeds: Speeds) -> Iterator[dict[str, object]]:
    """Yield milliseconds from DUE accepted tokens to all candidates of a tree on the host. plain: seconds
    that a step without drafts takes on the device.
    """
    for kind in (None, "fp8"):
        yield from _measure_head(decoder, text, plain, speeds, kind)


def _measure_head(
    decoder: Decoder, text: int, plain: float, speeds: Speeds, kind: Quantization | None
) -> Iterator[dict[str, object]]:
    """Yield the rows of a head in this quantization. The others are those of `measure_drafts`."""
    shape = head_shape(decoder.config)
    graphs, seed = descents_after(made_up_head(decoder, shape, kind), text)
    said = kind or "bf16"
    for depth in DEPTHS:
        seconds = statistics.median(each_of(partial(graphs.run, [seed], depth + 1), TURNS))
        yield {
            "what": f"draft, called, head in {said}",
            "depth": depth,
            "ms": round(seconds * 1e3, 3),
            "of a plain step %": round(100 * seconds / plain, 1),
            "floor ms": round(1e3 * floor_of_draft(shape, speeds, depth + 1, 1 if kind else 2), 3),
        }
    kernels = kernels_of(lambda: graphs.run([seed], max(DEPTHS) + 1))
    yield {"what": f"profile of a draft, head in {said}", "depth": max(DEPTHS), "us": kernels}


def descents_after(head: Eagle3Head, text: int) -> tuple[TreeGraphs, GraphInput]:
    """Return graphs over a memory that holds one text of `text` rows, of which DUE rows are not computed yet,
    and their input.
    """
    from specsot_kernels.gpu.growing import grow

    levels = max(DEPTHS) + 1
    memory = DraftPages(head, -(-(text + levels * TOP_K) // PAGE) + 1, PAGE)
    memory.table.open(1)
    memory.table.reserve(1, text)
    memory.features.normal_()
    memory.kv.layers[0].normal_()
    ground = memory.reserve_tree(1, text, levels * TOP_K)
    assert ground is not None
    seed = GraphInput(DueRows(1, text - DUE, tuple(range(DUE)), True), ground)
    return TreeGraphs(FusedHead(head), memory, TOP_K, levels, GraphCapture(), grow, (1,)), seed


def head_shape(config: ModelConfig) -> HeadShape:
    """Return the shape of a head of one layer as wide as the base's, which reads an embedding beside a
    feature.
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
    """Return a head with made-up weights for this base, over the base's embeddings. kind: its
    quantization.
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
