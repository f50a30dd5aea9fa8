"""What one GPU does with models of published shapes: decoding without drafts, verification, drafting.

Stages and verifiers are driven as a ring of one stage drives them. Weights are made up.

device: A step that is replayed as one captured graph, without the host: the time of the kernels.

step:    The wall-clock time of a step by stage and verifier, whose result the host reads: the time that a
    sequence waits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from specsot.core.frames import Frame, Opening, PromptChunk, TreeSegment
from specsot.core.tree import single
from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot_bench.results import Stopwatch
from specsot_lab.bench.clock import RowLog, captured, median_seconds
from specsot_lab.bench.gpu_drafts import measure_drafts
from specsot_lab.bench.gpu_fp8 import measure_fp8
from specsot_lab.bench.gpu_product import measure_product
from specsot_lab.bench.gpu_served import measure_served
from specsot_lab.bench.gpu_speculation import measure_speculation
from specsot_lab.bench.gpu_steps import PAGE, Speeds, floor_of_step, kernels_of, measure_speeds, step_call
from specsot_lab.bench.synthetic_models import NextTokenWeights, config_of
from specsot_model.decoder import Decoder
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier

# Figures by name.
Row = dict[str, object]

# Keys of a row that make up its name.
NAME_KEYS: Final = ("model", "after", "what", "depth", "rows", "requests", "branches", "chance")
# Nodes of the trees whose verification is measured.
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 200, 256, 512)
# The entries of ROWS for which the kernels are listed, too.
PROFILED: Final = (1, 64, 200)
# Steps of decoding without drafts. The first quarter of them is not counted.
STEPS: Final = 200
# Rows of a prompt that are computed in one frame.
CHUNK: Final = 256
# What can be measured; all of it by default.
PARTS: Final = ("steps", "speculation", "product", "fp8", "served")


@dataclass(frozen=True, slots=True)
class GpuRun:
    """What is measured.

    models: Names of SHAPES.
    context_lengths: Numbers of tokens in the KV cache before what is measured; at least one.
    replayed_model: The model with which speculation is replayed, and with which the rest of the product is
        measured; None: no model.
    only: The entries of PARTS that are measured.
    """

    models: tuple[str, ...]
    context_lengths: tuple[int, ...] = (1024,)
    replayed_model: str | None = "Llama-3.1-8B"
    only: tuple[str, ...] = PARTS


def measure(options: GpuRun, output: Path | None) -> int:
    """Measure, print every row as it is measured, and write all of them; return the exit status 0.

    options: What is measured.
    output: The JSON file; None: rows are only printed.

    Raises InvalidRequest if there is no CUDA device, or for an unknown part.

    A model that is not one of SHAPES raises InvalidRequest when its turn comes.
    """
    if not torch.cuda.is_available():
        raise InvalidRequest("bench gpu needs a CUDA device")
    if unknown := set(options.only) - set(PARTS):
        raise InvalidRequest(f"only must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}", "only")
    speeds = measure_speeds()
    log = RowLog("gpu", _settings(options, speeds), output, *NAME_KEYS)
    for row in measure_all(options, speeds):
        log.add(row)
    return 0


def _settings(options: GpuRun, speeds: Speeds) -> Row:
    """Return the settings of the run, by name.

    options: What is measured.
    speeds: The measured speeds of the device.
    """
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy TB/s": round(speeds.copy_speed / 1e12, 3),
        "product TFLOP/s": round(speeds.multiply_speed / 1e12),
        "text": options.context_lengths[0] if len(options.context_lengths) == 1 else options.context_lengths,
        "weights": "made up",
        "dtype": "bf16",
    }


@torch.inference_mode()
def measure_all(options: GpuRun, speeds: Speeds) -> Iterator[Row]:
    """Yield the rows of every model, each with the model's name.

    options: What is measured.
    speeds: The measured speeds of the device.

    Raises InvalidRequest for a model that is not one of SHAPES, when its turn comes.
    """
    for name in options.models:
        for row in _model_rows(name, options, speeds):
            yield {"model": name} | row
        torch.cuda.empty_cache()


def _model_rows(name: str, options: GpuRun, speeds: Speeds) -> Iterator[Row]:
    """Yield all rows of one shape. The parts "fp8" and "served" run after the model has been freed, so that
    they have the device to themselves.

    name: The shape, one of SHAPES.
    options: What is measured.
    speeds: The measured speeds of the device.

    With several context lengths, the rows of each have an entry "after", the number of tokens before. The
    parts "speculation", "product", "fp8" and "served" are measured only with `options.replayed_model`; "fp8"
    and "served" only once, "fp8" after the first context length.
    """
    config = config_of(name)
    decoder = Decoder(
        config, NextTokenWeights(), Range(0, config.layers), torch.bfloat16, torch.device("cuda", 0)
    )
    has_several_lengths = len(options.context_lengths) > 1
    for context_length in options.context_lengths:
        for row in _context_rows(
            decoder, context_length, options, speeds, replayed=name == options.replayed_model
        ):
            yield {"after": context_length} | row if has_several_lengths else row
    if name != options.replayed_model:
        return
    del decoder
    torch.cuda.empty_cache()
    if "fp8" in options.only:
        yield from measure_fp8(config, options.context_lengths[0], speeds)
    if "served" in options.only:
        yield from measure_served(name)


def _context_rows(
    decoder: Decoder, context_length: int, options: GpuRun, speeds: Speeds, replayed: bool
) -> Iterator[Row]:
    """Yield the rows of those parts that measure steps after a given context.

    decoder: The whole base model.
    context_length: Number of tokens in the KV cache before what is measured.
    options: What is measured.
    speeds: The measured speeds of the device.
    replayed: True if speculation and the rest of the product are measured with this model.

    The parts "steps" (with any model), "speculation" and "product" are measured, in this order, if
    `options.only` has them.
    """
    if "steps" in options.only:
        yield from measure_steps(decoder, context_length, speeds)
    if replayed and "speculation" in options.only:
        yield from measure_speculation(decoder, context_length, speeds)
    if replayed and "product" in options.only:
        yield from measure_product(decoder, context_length, speeds)


def measure_steps(decoder: Decoder, context_length: int, speeds: Speeds) -> Iterator[Row]:
    """Yield the rows of decoding, drafting and verification.

    decoder: The whole base model.
    context_length: Number of tokens in the KV cache before the step.
    speeds: The measured speeds of the device.

    The first two rows are decoding without drafts, on the device alone and with the host. Then come those of
    `measure_drafts` and of `measure_verify`.
    """
    device = median_seconds(captured(step_call(decoder, context_length, 1)))
    step = statistics.median(step_seconds_of(decoder, context_length))
    yield from baseline_rows(decoder, context_length, speeds, {"plain, device": device, "plain, step": step})
    yield from measure_drafts(decoder, context_length, device, speeds)
    yield from measure_verify(decoder, context_length, device, speeds)


def baseline_rows(
    decoder: Decoder, context_length: int, speeds: Speeds, named_seconds: Mapping[str, float]
) -> Iterator[Row]:
    """Yield a row for each way to decode one token per step, compared with the time in which the device
    copies as many bytes as the step must read.

    decoder: The whole base model.
    context_length: Number of tokens in the KV cache before the step.
    speeds: The measured speeds of the device.
    named_seconds: Seconds of a step, by the name of the way.

    "floor ms" is the shortest possible time, and "of copy bandwidth %" the part of the measured time that it
    is.
    """
    floor = floor_of_step(decoder.config, speeds, 1, context_length)
    for name, seconds in named_seconds.items():
        yield {
            "what": name,
            "ms": _milliseconds(seconds),
            "tokens/s": round(1 / seconds, 1),
            "floor ms": _milliseconds(floor),
            "of copy bandwidth %": round(100 * floor / seconds, 1),
        }


def measure_verify(
    decoder: Decoder, context_length: int, root_step_seconds: float, speeds: Speeds
) -> Iterator[Row]:
    """Yield a row for the verification of a tree of each size in ROWS, and the kernels for the sizes in
    PROFILED.

    decoder: The whole base model.
    context_length: Number of tokens in the KV cache before the step.
    root_step_seconds: Seconds of a step over one row, of which the others are given as multiples.
    speeds: The measured speeds of the device.

    "t/t(1)" is the time as a multiple of `root_step_seconds`. A profile row follows the row of its size, with
    "us", the microseconds by kernel.
    """
    for rows in ROWS:
        replay = captured(step_call(decoder, context_length, rows))
        seconds = median_seconds(replay)
        floor = floor_of_step(decoder.config, speeds, rows, context_length)
        yield {
            "what": "verify, device",
            "rows": rows,
            "ms": _milliseconds(seconds),
            "t/t(1)": round(seconds / root_step_seconds, 3),
            "floor ms": _milliseconds(floor),
        }
        if rows in PROFILED:
            yield {"what": "profile of a step", "rows": rows, "us": kernels_of(replay)}


def step_seconds_of(decoder: Decoder, context_length: int) -> list[float]:
    """Return the seconds of each step of decoding without drafts, from one result on the host to the next.
    The first quarter of STEPS is left out.

    decoder: The whole base model.
    context_length: Number of tokens of the prompt before the first step, at least 1.

    Each step verifies a tree that consists of its root.
    """
    stage = DecoderStage(decoder, -(-(context_length + STEPS) // PAGE) + 1, PAGE)
    stage.capture()
    verifier = Verifier(decoder.logits, lambda _: None, None, stage)
    prompt = tuple(range(context_length))
    opening = (Opening(1, context_length, limit=STEPS + 2, drafted=False),)
    for start in range(0, context_length, CHUNK):
        tokens = prompt[start : start + CHUNK]
        chunk = PromptChunk(1, start, tokens, start + CHUNK >= context_length)
        verified = verifier.verify(stage.run(Frame(1, 1, opening, (chunk,))))
        opening = ()
    times: list[float] = []
    accepted: tuple[int, ...] = ()
    for step in range(STEPS):
        token = verified.result.outcomes[0].tokens[-1]  # pyrefly: ignore[unbound-name]
        watch = Stopwatch()
        growth = TreeSegment(1, step + 1, context_length + step, accepted, single(token))
        verified = verifier.verify(stage.run(Frame(1, step + 2, (), (growth,))))
        times.append(watch.seconds)
        accepted = (0,)
    return times[STEPS // 4 :]


def _milliseconds(seconds: float) -> float:
    """Return seconds in milliseconds, rounded to microseconds.

    seconds: The duration.
    """
    return round(seconds * 1e3, 3)
