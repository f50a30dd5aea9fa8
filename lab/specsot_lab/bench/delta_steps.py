"""Prints the milliseconds of a step after contexts of several lengths, for models with gated delta layers and
made-up weights.

Run `python -m specsot_lab.bench.delta_steps` on a CPU, or `--device cuda --shape qwen3_next` for the shape of
Qwen3-Next.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from specsot.checkpoint.config import make_config
from specsot.core.tree import ancestry, depths
from specsot.members import Range
from specsot_lab.bench.gpu_steps import kernels_of, random_parents
from specsot_model.attention import RowSpan
from specsot_model.cuda_graphs import BUCKETS, CapturedSteps, GraphCapture, StepRows, bucket_of
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages
from specsot_model.loaded_parts import AbsentWeights

# Tokens of the prompt that is timed on a GPU.
PROMPT: Final = 2048
# Measurements, of which the median is the result. Two more before them are not counted.
TURNS: Final = 9
# Nodes of each tree that stay in the KV cache, so that the next tree starts after them.
ACCEPTED: Final = 3
# Configurations of models with gated delta layers, by name: a small one for a CPU; that of Qwen3-Next-80B-A3B
# with four layers; and the default one of Qwen3.5 in Transformers, with four layers.
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
    "qwen3_next": {
        "model_type": "qwen3_next",
        "vocab_size": 1024,
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
    },
    "qwen3_5": {
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
    """One sequence in pages of its own. Its steps are captured as CUDA graphs if the decoder supports
    them.
    """

    def __init__(
        self, decoder: Decoder, rows: int, page_rows: int, sizes: Sequence[int], chunk_rows: int
    ) -> None:
        """Allocate the pages and, if the decoder can be captured, capture its graphs.

        decoder: The whole base model.
        rows: Maximum number of rows of the sequence.
        page_rows: Rows of a page.
        sizes: Rows of the steps that are timed.
        chunk_rows: Rows of a prompt that are computed at once.

        If the decoder cannot be captured, all steps run kernel by kernel.
        """
        self._decoder = decoder
        self._size = page_rows
        self._chunk_rows = chunk_rows
        self._pages = tuple(range(-(-rows // page_rows)))
        self._kv: KVPages = decoder.make_kv(len(self._pages), page_rows)
        buckets = {bucket_of(size, BUCKETS) or max(BUCKETS) for size in (chunk_rows, *sizes)}
        self._steps: CapturedSteps | None = None
        if decoder.capturable:
            self._steps = CapturedSteps(decoder, self._kv, {}, GraphCapture(), tuple(buckets))

    @torch.inference_mode()
    def run(self, base: int, rows: int, parents: Sequence[int] | None = None) -> None:
        """Compute the rows of a prompt, or the nodes of a tree, by a graph if there is one of this size, else
        kernel by kernel.

        base: Number of rows before.
        rows: Rows to compute.
        parents: Parent of each node of the tree; None: the rows are those of a prompt, each after the one
            before.

        The rows are written into the KV cache after the `base` rows; rows that lie there from an earlier call
        are replaced. Token ids are those of the slots, modulo the vocabulary.
        """
        slots = range(base, base + rows)
        positions = list(slots) if parents is None else [base + depth for depth in depths(parents)]
        visible = None if parents is None else ancestry(parents)
        span = RowSpan(rows, base, rows, self._pages, visible)
        tokens = [row % self._decoder.config.vocab for row in slots]
        if self._steps is None or self._steps.run(StepRows(tokens, positions, slots, [span])) is None:
            self._run_eager(tokens, positions, slots, span)

    def _run_eager(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], span: RowSpan
    ) -> None:
        """Compute rows kernel by kernel.

        tokens: Token id of each row.
        positions: Rotary position of each row.
        slots: KV slot of each row.
        span: The rows that each row sees.

        Returns when the work was launched; the hidden rows are dropped.
        """
        decoder = self._decoder
        token_tensor, position_tensor, slot_tensor = (
            torch.tensor(list(values), device=decoder.device) for values in (tokens, positions, slots)
        )
        plan = decoder.plan([span], self._size, "batched")
        decoder.forward(decoder.embed(token_tensor), position_tensor, slot_tensor, plan, self._kv)

    def fill(self, first: int, last: int) -> float:
        """Return the milliseconds in which the prompt's rows first .. last - 1 are computed; nearly 0 if
        there are none.

        first: First row.
        last: The row after the last one.

        On a CPU the time is processor time, see `_milliseconds_of`.
        """

        def run() -> None:
            """Compute the prompt in chunks."""
            for start in range(first, last, self._chunk_rows):
                self.run(start, min(self._chunk_rows, last - start))

        return self._milliseconds_of(run)

    def milliseconds(self, context_length: int, rows: int) -> float:
        """Return the median milliseconds of a tree's step. Each tree starts after the accepted nodes of the
        one before.

        context_length: Number of rows before the first tree.
        rows: Nodes of the tree, root included.

        TURNS + 2 trees are timed, of which the first two do not count. min(rows, ACCEPTED) nodes of each are
        accepted.
        """
        parents = random_parents(rows)
        accepted = min(rows, ACCEPTED)
        bases = range(context_length, context_length + accepted * (TURNS + 2), accepted)
        steps = [self._milliseconds_of(lambda base=base: self.run(base, rows, parents)) for base in bases]
        return statistics.median(steps[2:])

    def _milliseconds_of(self, work: Callable[[], object]) -> float:
        """Return the milliseconds that some work takes. On a CPU this is the processor time of the process,
        so that other processes do not raise it.

        work: The function to time; a GPU is synchronized after it.

        On a GPU it is wall-clock time.
        """
        on_gpu = self._decoder.device.type == "cuda"
        clock = time.perf_counter if on_gpu else time.process_time
        start_time = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        return 1e3 * (clock() - start_time)


def main() -> None:
    """Read the command line, and print a line for each context length.

    On a CUDA device, a line with the milliseconds of a prompt of PROMPT tokens, the median of three, is
    printed first. With --kernels, the last line has the microseconds of each kernel of one step; that needs a
    CUDA device. The contexts of --behind must ascend, because each continues the one before. The process
    exits with status 0, or with 2 for an unknown option.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="small: in fp32, others in bf16")
    parser.add_argument("--behind", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 24])
    parser.add_argument("--wide", type=int, default=512, help="rows of a prompt at once")
    parser.add_argument("--kernels", action="store_true", help="the kernels of one step of a row, too")
    options = parser.parse_args()
    config = make_config(SHAPES[options.shape], {}, Path("made up"))
    files = AbsentWeights((f"{config.names.embedding}.weight",), config)
    dtype = torch.float32 if options.shape == "small" else torch.bfloat16
    with torch.inference_mode():
        device = torch.device(options.device)
        decoder = Decoder(config, files, Range(0, config.layers), dtype, device)
        max_rows = max(PROMPT, *options.behind) + (TURNS + 2) * ACCEPTED + max(options.rows)
        sequence = TimedSequence(
            decoder, max_rows, 64 if device.type == "cuda" else 256, options.rows, options.wide
        )
        if device.type == "cuda":
            # The first run compiles kernels.
            sequence.fill(0, PROMPT)
            spent = sorted(sequence.fill(0, PROMPT) for _ in range(3))
            print(
                f"{options.shape}: a prompt of {PROMPT}, {options.wide} rows at once: {spent[1]:.2f} ms",
                flush=True,
            )
        filled = 0
        for context_length in options.behind:
            sequence.fill(filled, context_length)
            filled = context_length
            steps = [
                f"{sequence.milliseconds(context_length, rows):8.2f} ms of {rows} rows"
                for rows in options.rows
            ]
            print(f"{options.shape}: after {context_length:6} tokens: {', '.join(steps)}", flush=True)
        if options.kernels:
            kernels = kernels_of(lambda: sequence.run(filled + ACCEPTED, 1, (0,)))
            print(f"{options.shape}: microseconds of a step of one row: {json.dumps(kernels)}", flush=True)


if __name__ == "__main__":
    main()
