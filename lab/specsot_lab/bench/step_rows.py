"""`specsot bench steps --rows`: what a step takes by the rows of its tree: layers, norm and lm_head alone."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from specsot.core.frames import Frame, Opening, PromptChunk, TreeSegment
from specsot.core.tree import Tree
from specsot_app.terminal.show import counting_bar
from specsot_bench.core.tables import figure, markdown
from specsot_bench.reference_model import load_decoder
from specsot_bench.results import Row, Stopwatch, publish
from specsot_bench.runners import ModelSet
from specsot_worker.stage import DecoderStage

# tokens before the tree, positions of a page
TEXT = 200
PAGE_ROWS = 64


@torch.inference_mode()
def measure(models: ModelSet, sizes: Sequence[int], steps: int, output: Path | None) -> int:
    """Measure steps of trees of these sizes, publish the table and return the exit status. Sizes take turns,
    so that a busy moment affects all. output: the JSON file; None: only print.
    """
    decoder = load_decoder(models)
    stage = DecoderStage(decoder, -(-(TEXT + max(sizes)) // PAGE_ROWS), PAGE_ROWS)
    stage.capture()
    prompt = PromptChunk(1, 0, tuple(number % decoder.config.vocab for number in range(TEXT)), final=True)
    stage.run(Frame(1, 1, (Opening(1, TEXT, limit=max(sizes) + 1),), (prompt,)))
    found: dict[int, list[float]] = {size: [] for size in sizes}
    with counting_bar(sys.stderr, "steps", steps) as count:
        for step in range(steps + 1):
            for size, seconds in found.items():
                watch = Stopwatch()
                tree = TreeSegment(1, 1, TEXT, (), tree_of(size))
                passed = stage.run(Frame(1, 2, segments=(tree,)))
                assert passed.hidden is not None
                decoder.logits(passed.hidden)
                seconds += [watch.seconds] if step else []  # the first warms up
            count()
    first = min(found[sizes[0]])
    rows: list[Row] = [
        {"name": f"{size} rows", "rows": size, "least_ms": 1e3 * min(each),
         "median_ms": 1e3 * statistics.median(each), "of_first": min(each) / first}
        for size, each in found.items()
    ]  # fmt: skip
    held = {name: getattr(models, name) for name in ("dtype", "quantization")}
    settings = {"model": str(models.base), "steps": steps, "threads": torch.get_num_threads(), **held}
    publish(
        "step-rows", settings, rows, f"{markdown(COLUMNS, rows)}\n\n{settings['threads']} threads", output
    )
    return 0


def tree_of(size: int) -> Tree:
    """Return a tree of `size` nodes in which every node has two children, as far as there are enough."""
    return Tree(tuple(range(1, size + 1)), tuple(max(number - 1, 0) // 2 for number in range(size)))


COLUMNS = (
    figure("rows", "rows", 0),
    figure("ms: least", "least_ms", 2),
    figure("median", "median_ms", 2),
    figure("of the first row", "of_first", 2),
)
