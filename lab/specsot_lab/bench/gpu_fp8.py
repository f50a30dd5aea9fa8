"""Quantization to 8 bits compared with bf16 on one GPU: the same steps, verification and drafts, of a base
model and a head in each precision.

All steps are captured graphs. Acceptance is replayed with one chance for each level, see `gpu_replay`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from specsot.checkpoint.config import ModelConfig
from specsot.members import Quantization, Range, TreeShape
from specsot_lab.bench.clock import captured, median_seconds
from specsot_lab.bench.gpu_drafts import head_shape, made_up_head
from specsot_lab.bench.gpu_loop import Drafting, GpuLoop, free_loops
from specsot_lab.bench.gpu_speculation import (
    BUDGET,
    CHANCE,
    DEPTH,
    NODES,
    PAGES,
    REQUEST_CONTEXT,
    ROWS,
    STEPS,
    TOP_K,
    Baseline,
    Row,
    figures_of,
    speed_of,
)
from specsot_lab.bench.gpu_steps import Speeds, kernels_of, step_call
from specsot_lab.bench.synthetic_models import NextTokenWeights
from specsot_model.decoder import Decoder

# Quantizations of the base model; None is bf16, which is first because the others are compared with it.
KINDS: tuple[Quantization | None, ...] = (None, "fp8", "int8")
# Numbers of sequences that decode without drafts at once.
SEQUENCES: Final = (1, 8, 64)
# Rows of the steps whose time on the device is measured.
VERIFIED: Final = (1, 8, 64, 200, 512)
# The entries of VERIFIED for which the kernels are listed, too.
PROFILED: Final = (1, 64)


def measure_fp8(config: ModelConfig, context_length: int, speeds: Speeds) -> Iterator[Row]:
    """Yield the rows of every precision, each relative to bf16: decoding of several sequences, steps of
    several sizes on the device, and drafting.

    config: The shape of the base model.
    context_length: Number of tokens in the KV cache before what is measured.
    speeds: The measured speeds of the device.

    Every row's name begins with "base in bf16", "base in fp8" or "base in int8". Each precision is freed
    before the next one is made.
    """
    baseline_speeds: dict[int, float] = {}
    baseline_seconds: dict[int, float] = {}
    for kind in KINDS:
        decoder = _decoder(config, kind)
        for row in _precision_rows(decoder, kind, context_length, speeds, baseline_speeds, baseline_seconds):
            yield {"what": f"base in {kind or 'bf16'}, {row.pop('what')}"} | row
        del decoder
        free_loops()


def _decoder(config: ModelConfig, kind: Quantization | None) -> Decoder:
    """Return a whole base model with made-up weights.

    config: The shape.
    kind: The quantization; None: bf16.

    The model is on the first CUDA device, and predicts the next higher token id after every token.
    """
    all_layers = Range(0, config.layers)
    device = torch.device("cuda", 0)
    return Decoder(config, NextTokenWeights(), all_layers, torch.bfloat16, device, quantization=kind)


def _precision_rows(
    decoder: Decoder,
    kind: Quantization | None,
    context_length: int,
    speeds: Speeds,
    baseline_speeds: dict[int, float],
    baseline_seconds: dict[int, float],
) -> Iterator[Row]:
    """Yield the rows of one precision.

    decoder: The base model in this precision.
    kind: The quantization; None: bf16.
    context_length: Number of tokens in the KV cache before what is measured.
    speeds: The measured speeds of the device.
    baseline_speeds: Tokens per second of bf16 without drafts, by number of sequences. The first precision
        enters its own figures.
    baseline_seconds: Seconds of a step of bf16 on the device, by number of rows. The first precision enters
        its own figures.

    The rows come in this order: steps of each size in VERIFIED on the device, each followed by its kernels if
    it is in PROFILED; decoding without drafts for each number in SEQUENCES; and drafting, of one and of eight
    sequences, with a head in bf16, and for a quantized base also with a head of the same quantization.
    """
    for rows in VERIFIED:
        replay = captured(step_call(decoder, context_length, rows))
        seconds = median_seconds(replay)
        bf16_seconds = baseline_seconds.setdefault(rows, seconds)
        yield {
            "what": "device",
            "rows": rows,
            "ms": round(1e3 * seconds, 3),
            "x bf16": round(seconds / bf16_seconds, 3),
        }
        if rows in PROFILED:
            yield {"what": "profile of a step", "rows": rows, "us": kernels_of(replay)}
    undrafted = GpuLoop(decoder, PAGES, ROWS, None)
    for num_sequences in SEQUENCES:
        length = context_length if num_sequences == 1 else REQUEST_CONTEXT
        clock = undrafted.run(length, num_sequences, STEPS)
        baseline = Baseline(
            decoder,
            speeds,
            length * num_sequences,
            baseline_speeds.setdefault(num_sequences, speed_of(clock)),
        )
        yield figures_of("plain", clock, baseline, num_sequences) | {"requests": num_sequences}
    del undrafted
    baseline = Baseline(decoder, speeds, context_length, baseline_speeds[1])
    for head_kind in (None, kind) if kind else (None,):
        head = made_up_head(decoder, head_shape(decoder.config), head_kind)
        shape = TreeShape(DEPTH, TOP_K, NODES, fixed=True)
        drafted = GpuLoop(decoder, PAGES, ROWS, Drafting(head, shape, CHANCE, BUDGET))
        label = f"eagle, tau told, head in {head_kind or 'bf16'}"
        yield figures_of(label, drafted.run(context_length, 1, STEPS), baseline)
        several_baseline = replace(
            baseline, context_length=REQUEST_CONTEXT * 8, tokens_per_second=baseline_speeds[8]
        )
        yield figures_of(label, drafted.run(REQUEST_CONTEXT, 8, STEPS), several_baseline, 8) | {"requests": 8}
        del drafted
