"""Milliseconds of a step behind texts of several lengths, with gated delta layers and made-up weights.

`python -m specsot_lab.bench.delta_steps` on a CPU; `--device cuda --shape qwen3_next` in Qwen3-Next's shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specsot.checkpoint.config import make_config
from specsot.core.tree import ancestry, depths
from specsot.members import Range
from specsot_lab.bench.gpu_steps import kernels_of, parents_of
from specsot_model.attention import RowSpan
from specsot_model.cuda_graphs import BUCKETS, CapturedSteps, GraphCapture, StepRows, bucket_of
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages
from specsot_model.loaded_parts import AbsentWeights

PROMPT = 2048
TURNS = 9
KEPT = 3  # rows of a tree that stay, so that the next one stands behind them
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "model_type": "qwen3_next",
        "vocab_size": 1024,
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "mlp_only_layers": list(range(8)),
        "max_position_embeddings": 16384,
    },
    "qwen3_next": {  # Qwen3-Next-80B-A3B's
        "model_type": "qwen3_next",
        "vocab_size": 1024,
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
    },
    "qwen3_5": {  # as Transformers' config has it where nothing is said
        "model_type": "qwen3_5_text",
        "vocab_size": 1024,
        "num_hidden_layers": 4,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "max_position_embeddings": 262144,
    },
}


class TimedSequence:
    """One text in pages of its own; in graphs, where its layers have any."""

    def __init__(self, decoder: Decoder, rows: int, page_rows: int, sizes: Sequence[int], wide: int) -> None:
        """Prepare the pages and, if the decoder can be captured, its graphs.

        decoder: the whole base. rows: maximum of the sequence. page_rows: rows of a page. sizes: rows of
            steps. wide: rows of a prompt at once.
        """
        self._decoder = decoder
        self._size = page_rows
        self._wide = wide
        self._pages = tuple(range(-(-rows // page_rows)))
        self._kv: KVPages = decoder.make_kv(len(self._pages), page_rows)
        buckets = {bucket_of(size, BUCKETS) or max(BUCKETS) for size in (wide, *sizes)}
        self._steps: CapturedSteps | None = None
        if decoder.capturable:
            self._steps = CapturedSteps(decoder, self._kv, {}, GraphCapture(), tuple(buckets))

    @torch.inference_mode()
    def run(self, base: int, rows: int, parents: Sequence[int] | None = None) -> None:
        """Compute the rows of a prompt, or of a tree with these parents, after `base` other rows."""
        slots = range(base, base + rows)
        positions = list(slots) if parents is None else [base + one for one in depths(parents)]
        visible = None if parents is None else ancestry(parents)
        span = RowSpan(rows, base, rows, self._pages, visible)
        tokens = [row % self._decoder.config.vocab for row in slots]
        if self._steps is None or self._steps.run(StepRows(tokens, positions, slots, [span])) is None:
            self._run_eager(tokens, positions, slots, span)

    def _run_eager(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], span: RowSpan
    ) -> None:
        """Compute rows kernel by kernel. tokens, positions, slots: of each row. span: what the rows see."""
        decoder = self._decoder
        entry, at, places = (
            torch.tensor(list(each), device=decoder.device) for each in (tokens, positions, slots)
        )
        plan = decoder.plan([span], self._size, "batched")
        decoder.forward(decoder.embed(entry), at, places, plan, self._kv)

    def fill(self, first: int, last: int) -> float:
        """Return the milliseconds that a prompt's rows first .. last - 1 take."""

        def run() -> None:
            """Compute the prompt in parts of `wide` rows."""
            for at in range(first, last, self._wide):
                self.run(at, min(self._wide, last - at))

        return self._spent(run)

    def milliseconds(self, behind: int, rows: int) -> float:
        """Return the median milliseconds of a tree's step; each follows what is kept of the one before.
        behind: rows before. rows: nodes of the tree.
        """
        parents = parents_of(rows)
        kept = min(rows, KEPT)
        bases = range(behind, behind + kept * (TURNS + 2), kept)
        steps = [self._spent(lambda base=base: self.run(base, rows, parents)) for base in bases]
        return statistics.median(steps[2:])

    def _spent(self, work: Callable[[], object]) -> float:
        """Return the milliseconds that the work takes; on a CPU, of the processor's time, whatever else runs
        there.
        """
        on_gpu = self._decoder.device.type == "cuda"
        clock = time.perf_counter if on_gpu else time.process_time
        begun = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        return 1e3 * (clock() - begun)


def main() -> None:
    """Read the command line and print the table."""
    reading = argparse.ArgumentParser(description=__doc__)
    reading.add_argument("--device", default="cpu")
    reading.add_argument("--shape", choices=SHAPES, default="small", help="small: in fp32, others in bf16")
    reading.add_argument("--behind", type=int, nargs="+", default=[64, 512, 2048])
    reading.add_argument("--rows", type=int, nargs="+", default=[1, 24])
    reading.add_argument("--wide", type=int, default=512, help="rows of a prompt at once")
    reading.add_argument("--kernels", action="store_true", help="the kernels of one step of a row, too")
    given = reading.parse_args()
    config = make_config(SHAPES[given.shape], {}, Path("made up"))
    files = AbsentWeights((f"{config.names.embedding}.weight",), config)
    dtype = torch.float32 if given.shape == "small" else torch.bfloat16
    with torch.inference_mode():
        device = torch.device(given.device)
        decoder = Decoder(config, files, Range(0, config.layers), dtype, device)
        most = max(PROMPT, *given.behind) + (TURNS + 2) * KEPT + max(given.rows)
        text = TimedSequence(decoder, most, 64 if device.type == "cuda" else 256, given.rows, given.wide)
        if device.type == "cuda":
            text.fill(0, PROMPT)  # compiles
            spent = sorted(text.fill(0, PROMPT) for _ in range(3))
            print(
                f"{given.shape}: a prompt of {PROMPT}, {given.wide} rows at once: {spent[1]:.2f} ms",
                flush=True,
            )
        filled = 0
        for behind in given.behind:
            text.fill(filled, behind)
            filled = behind
            steps = [f"{text.milliseconds(behind, rows):8.2f} ms of {rows} rows" for rows in given.rows]
            print(f"{given.shape}: behind {behind:6}: {', '.join(steps)}", flush=True)
        if given.kernels:
            told = kernels_of(lambda: text.run(filled + KEPT, 1, (0,)))
            print(f"{given.shape}: microseconds of a step of one row: {json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main()
