"""`specsot bench steps --rows`: the time of a step by the rows of its tree: layers, norm and lm_head
alone.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from specsot.core.frames import Frame, Opening, PromptChunk, TreeSegment
from specsot.core.tree import Tree
from specsot_bench.asking import counting_bar
from specsot_bench.core.tables import figure, markdown
from specsot_bench.reference_model import load_decoder
from specsot_bench.results import Row, Stopwatch, publish
from specsot_bench.runners import ModelSet
from specsot_worker.stage import DecoderStage

# Tokens in the KV cache before the tree.
CONTEXT: Final = 200
# Rows of a KV page.
PAGE_ROWS: Final = 64


@torch.inference_mode()
def measure(models: ModelSet, sizes: Sequence[int], steps: int, output: Path | None) -> int:
    """Measure steps of trees of several sizes, and publish the table. Return the exit status 0. The sizes
    take turns, so that other processes on the machine affect all of them.

    models: The base model and its precision.
    sizes: Nodes of the trees, root included; at least one. The others are compared with the first.
    steps: Measured steps of each size.
    output: The JSON file; None: the table is only printed.

    On a GPU, steps run as captured graphs where the model can be captured, and the time ends when the device
    has computed the token of the last node. One step of each size comes before and is not counted. "least_ms"
    is the shortest and "median_ms" the median step in milliseconds; "of_first" is the ratio of the shortest
    steps. Repeated sizes count once. Raises ModelError if the model cannot be loaded.
    """
    decoder = load_decoder(models)
    stage = DecoderStage(decoder, -(-(CONTEXT + max(sizes)) // PAGE_ROWS), PAGE_ROWS)
    stage.capture()
    prompt = PromptChunk(1, 0, tuple(number % decoder.config.vocab for number in range(CONTEXT)), final=True)
    stage.run(Frame(1, 1, (Opening(1, CONTEXT, limit=max(sizes) + 1),), (prompt,)))
    seconds_by_size: dict[int, list[float]] = {size: [] for size in sizes}
    with counting_bar(sys.stderr, "steps", steps) as count:
        for step in range(steps + 1):
            for size, seconds in seconds_by_size.items():
                watch = Stopwatch()
                tree = TreeSegment(1, 1, CONTEXT, (), tree_of(size))
                output_frame = stage.run(Frame(1, 2, segments=(tree,)))
                assert output_frame.hidden is not None
                # A GPU computes while Python continues, until a token is read.
                decoder.logits(output_frame.hidden)[-1].argmax().item()
                # The first step of each size is not counted.
                seconds += [watch.seconds] if step else []
            count()
    first_least = min(seconds_by_size[sizes[0]])
    rows: list[Row] = [
        {"name": f"{size} rows", "rows": size, "least_ms": 1e3 * min(seconds),
         "median_ms": 1e3 * statistics.median(seconds), "of_first": min(seconds) / first_least}
        for size, seconds in seconds_by_size.items()
    ]  # fmt: skip
    precision = {name: getattr(models, name) for name in ("dtype", "quantization", "device")}
    settings = {"model": str(models.base), "steps": steps, "threads": torch.get_num_threads(), **precision}
    publish(
        "step-rows", settings, rows, f"{markdown(COLUMNS, rows)}\n\n{settings['threads']} threads", output
    )
    return 0


def tree_of(size: int) -> Tree:
    """Return a tree in which every node has two children, as far as there are enough nodes: 4 nodes have the
    parents [0, 0, 0, 1].

    size: Number of nodes, root included, at least 1.
    """
    return Tree(tuple(range(1, size + 1)), tuple(max(number - 1, 0) // 2 for number in range(size)))


# The columns of the table.
COLUMNS: Final = (
    figure("rows", "rows", 0),
    figure("ms: least", "least_ms", 2),
    figure("median", "median_ms", 2),
    figure("of the first row", "of_first", 2),
)
