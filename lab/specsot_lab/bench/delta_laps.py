"""Milliseconds of a lap behind texts of several lengths, with gated delta layers and made-up weights.

`python -m specsot_lab.bench.delta_laps` on a CPU; `--device cuda --published` in Qwen3-Next-80B-A3B's shape.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from specsot.core.tree import ancestry, depths
from specsot.members import Range
from specsot.model.absent import AbsentWeights
from specsot.model.attention import RowSpan
from specsot.model.config import make_config
from specsot.model.decoder import Decoder
from specsot.model.kv import KVPages
from specsot_lab.bench.gpu_laps import parents_of

PROMPT_ROWS, TURNS = 512, 9
SHAPE = {
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
}
PUBLISHED = {
    "model_type": "qwen3_next",
    "vocab_size": 1024,
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
}


class TimedText:
    """One text in pages of its own."""

    def __init__(self, decoder: Decoder, rows: int, page_rows: int) -> None:
        self._decoder, self._size = decoder, page_rows
        self._pages = tuple(range(-(-(rows + 64) // page_rows)))
        self._kv: KVPages = decoder.make_kv(len(self._pages), page_rows)

    def run(self, base: int, rows: int, parents: Sequence[int] | None = None) -> None:
        """A prompt's rows, or a tree's, behind `base` others."""
        device = self._decoder.device
        positions = range(base, base + rows) if parents is None else [base + one for one in depths(parents)]
        visible = None if parents is None else ancestry(parents)
        plan = self._decoder.plan([RowSpan(rows, base, rows, self._pages, visible)], self._size, "batched")
        tokens = torch.arange(base, base + rows, device=device) % self._decoder.config.vocab
        at, slots = torch.tensor(positions, device=device), torch.arange(base, base + rows, device=device)
        self._decoder.forward(self._decoder.embed(tokens), at, slots, plan, self._kv)

    def milliseconds(self, behind: int, rows: int) -> float:
        """Of a tree's lap, the median; on a CPU the processor's time, whatever else runs there."""
        spent: list[float] = []
        for _ in range(TURNS + 2):
            clock = time.perf_counter if self._decoder.device.type == "cuda" else time.process_time
            begun = clock()
            self.run(behind, rows, parents_of(rows))
            if self._decoder.device.type == "cuda":
                torch.cuda.synchronize()
            spent.append(clock() - begun)
        return 1e3 * statistics.median(spent[2:])


def main() -> None:
    reading = argparse.ArgumentParser(description=__doc__)
    reading.add_argument("--device", default="cpu")
    reading.add_argument("--published", action="store_true", help="Qwen3-Next-80B-A3B's shape, bf16")
    reading.add_argument("--behind", type=int, nargs="+", default=[64, 512, 2048])
    reading.add_argument("--rows", type=int, nargs="+", default=[1, 24])
    given = reading.parse_args()
    fields = PUBLISHED if given.published else SHAPE
    config = make_config(fields, {}, Path("made up"))
    files = AbsentWeights((f"{config.names.embedding}.weight",), config)
    dtype = torch.bfloat16 if given.published else torch.float32
    with torch.inference_mode():
        device = torch.device(given.device)
        decoder = Decoder(config, files, Range(0, config.layers), dtype, device)
        text = TimedText(decoder, max(given.behind), 64 if device.type == "cuda" else 256)
        filled = 0
        for behind in given.behind:
            for first in range(filled, behind, PROMPT_ROWS):
                text.run(first, min(PROMPT_ROWS, behind - first))
            filled = behind
            laps = [f"{text.milliseconds(behind, rows):8.2f} ms of {rows} rows" for rows in given.rows]
            print(f"behind {behind:6}: {', '.join(laps)}", flush=True)


if __name__ == "__main__":
    main()
