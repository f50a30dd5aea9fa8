"""8 bits beside bf16 on one GPU: the same steps, verification and drafts, of a base and a head in each form.

Everything in graphs; acceptance is replayed with tau told (`gpu_replay`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from specsot.checkpoint.config import ModelConfig
from specsot.members import Quantization, Range, TreeShape
from specsot_lab.bench.clock import captured, typical
from specsot_lab.bench.gpu_drafts import head_shape, made_up_head
from specsot_lab.bench.gpu_loop import Drafting, GpuLoop, free_loops
from specsot_lab.bench.gpu_speculation import (
    BUDGET,
    CHANCE,
    DEPTH,
    NODES,
    PAGES,
    REQUEST_TEXT,
    ROWS,
    STEPS,
    TOP_K,
    Row,
    Yardstick,
    figures_of,
    speed_of,
)
from specsot_lab.bench.gpu_steps import Speeds, kernels_of, step_of
from specsot_lab.bench.synthetic_models import Telling
from specsot_model.decoder import Decoder

KINDS: tuple[Quantization | None, ...] = (None, "fp8", "int8")
TEXTS = (1, 8, 64)
VERIFIED = (1, 8, 64, 200, 512)
PROFILED = (1, 64)


def measure_fp8(config: ModelConfig, text: int, speeds: Speeds) -> Iterator[Row]:
    """Yield rows of every precision, bf16 first, relative to which all others are given: texts, and what a
    step over so many rows takes the device.
    """
    plain: dict[int, float] = {}
    step: dict[int, float] = {}
    for kind in KINDS:
        decoder = _decoder(config, kind)
        for row in _measured(decoder, kind, text, speeds, plain, step):
            yield {"what": f"base in {kind or 'bf16'}, {row.pop('what')}"} | row
        del decoder
        free_loops()


def _decoder(config: ModelConfig, kind: Quantization | None) -> Decoder:
    """Return a whole base of this shape whose weights are made up, in this quantization."""
    whole = Range(0, config.layers)
    device = torch.device("cuda", 0)
    return Decoder(config, Telling(), whole, torch.bfloat16, device, quantization=kind)


def _measured(
    decoder: Decoder,
    kind: Quantization | None,
    text: int,
    speeds: Speeds,
    plain: dict[int, float],
    step: dict[int, float],
) -> Iterator[Row]:
    """plain: tokens a second by texts, and step: seconds by rows, of bf16, which are put there first."""
    for rows in VERIFIED:
        replay = captured(step_of(decoder, text, rows))
        seconds = typical(replay)
        first = step.setdefault(rows, seconds)
        yield {
            "what": "device",
            "rows": rows,
            "ms": round(1e3 * seconds, 3),
            "x bf16": round(seconds / first, 3),
        }
        if rows in PROFILED:
            yield {"what": "profile of a step", "rows": rows, "us": kernels_of(replay)}
    ring = GpuLoop(decoder, PAGES, ROWS, None)
    for texts in TEXTS:
        behind = text if texts == 1 else REQUEST_TEXT
        clock = ring.run(behind, texts, STEPS)
        held = Yardstick(decoder, speeds, behind * texts, plain.setdefault(texts, speed_of(clock)))
        yield figures_of("plain", clock, held, texts) | {"requests": texts}
    del ring
    held = Yardstick(decoder, speeds, text, plain[1])
    for short in (None, kind) if kind else (None,):
        head = made_up_head(decoder, head_shape(decoder.config), short)
        shape = TreeShape(DEPTH, TOP_K, NODES, fixed=True)
        tree = GpuLoop(decoder, PAGES, ROWS, Drafting(head, shape, CHANCE, BUDGET))
        said = f"eagle, tau told, head in {short or 'bf16'}"
        yield figures_of(said, tree.run(text, 1, STEPS), held)
        beside = replace(held, text=REQUEST_TEXT * 8, plain=plain[8])
        yield figures_of(said, tree.run(REQUEST_TEXT, 8, STEPS), beside, 8) | {"requests": 8}
        del tree
