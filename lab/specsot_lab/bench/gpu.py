"""What one GPU does with models of real shapes: plain decoding, verification, drafting.

Stages and judges are driven as a ring of one drives them. Weights are made up.

device: a step as one captured graph, replayed without the host: what the kernels take.
step:    wall time of a step by stage and judge, result read by the host: what a sequence waits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from specsot.core.frames import Frame, Opening, PromptChunk, TreeSegment
from specsot.core.tree import single
from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot_bench.results import Stopwatch
from specsot_lab.bench.clock import RowLog, captured, typical
from specsot_lab.bench.gpu_drafts import measure_drafts
from specsot_lab.bench.gpu_fp8 import measure_fp8
from specsot_lab.bench.gpu_product import measure_product
from specsot_lab.bench.gpu_served import measure_served
from specsot_lab.bench.gpu_speculation import measure_speculation
from specsot_lab.bench.gpu_steps import PAGE, Speeds, floor_of_step, kernels_of, measure_speeds, step_of
from specsot_lab.bench.synthetic_models import Telling, config_of
from specsot_model.decoder import Decoder
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier

Row = dict[str, object]

NAMED = ("model", "after", "what", "depth", "rows", "requests", "branches", "chance")  # what tells rows apart
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 200, 256, 512)
PROFILED = (1, 64, 200)  # of ROWS
STEPS = 200  # of a measured plain decoding
CHUNK = 256  # rows of a prompt at a time
PARTS = ("steps", "speculation", "product", "fp8", "served")


@dataclass(frozen=True, slots=True)
class GpuRun:
    """models: of SHAPES; texts: rows in front of what is measured; replay: with which of them speculation is
    replayed, and what the product does is measured. only: of PARTS.
    """

    models: tuple[str, ...]
    texts: tuple[int, ...] = (1024,)
    replay: str | None = "Llama-3.1-8B"
    only: tuple[str, ...] = PARTS


def measure(asked: GpuRun, output: Path | None) -> int:
    """Measure, print every row as it comes, and write all of them; return the exit status 0.

    asked: what is measured. output: the JSON file, or None. Raises InvalidRequest without a GPU, or for an
        unknown part.
    """
    if not torch.cuda.is_available():
        raise InvalidRequest("bench gpu needs a CUDA device")
    if unknown := set(asked.only) - set(PARTS):
        raise InvalidRequest(f"only must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}", "only")
    speeds = measure_speeds()
    log = RowLog("gpu", _settings(asked, speeds), output, *NAMED)
    for row in measure_all(asked, speeds):
        log.add(row)
    return 0


def _settings(asked: GpuRun, speeds: Speeds) -> Row:
    """Return the settings of the run, by name."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy TB/s": round(speeds.copied / 1e12, 3),
        "product TFLOP/s": round(speeds.multiplied / 1e12),
        "text": asked.texts[0] if len(asked.texts) == 1 else asked.texts,
        "weights": "made up",
        "dtype": "bf16",
    }


@torch.inference_mode()
def measure_all(asked: GpuRun, speeds: Speeds) -> Iterator[Row]:
    """Yield the rows of every model, with its name."""
    for name in asked.models:
        for row in _measured(name, asked, speeds):
            yield {"model": name} | row
        torch.cuda.empty_cache()


def _measured(name: str, asked: GpuRun, speeds: Speeds) -> Iterator[Row]:
    """Yield everything of one shape; its services have the device to themselves."""
    config = config_of(name)
    decoder = Decoder(config, Telling(), Range(0, config.layers), torch.bfloat16, torch.device("cuda", 0))
    several = len(asked.texts) > 1
    for text in asked.texts:
        for row in _measured_after(decoder, text, asked, speeds, replayed=name == asked.replay):
            yield {"after": text} | row if several else row
    if name != asked.replay:
        return
    del decoder
    torch.cuda.empty_cache()
    if "fp8" in asked.only:
        yield from measure_fp8(config, asked.texts[0], speeds)
    if "served" in asked.only:
        yield from measure_served(name)


def _measured_after(
    decoder: Decoder, text: int, asked: GpuRun, speeds: Speeds, replayed: bool
) -> Iterator[Row]:
    """Yield the parts that were asked for, after `text` rows. replayed: whether acceptance is replayed for
    this shape.
    """
    if "steps" in asked.only:
        yield from measure_ours(decoder, text, speeds)
    if replayed and "speculation" in asked.only:
        yield from measure_speculation(decoder, text, speeds)
    if replayed and "product" in asked.only:
        yield from measure_product(decoder, text, speeds)


def measure_ours(decoder: Decoder, text: int, speeds: Speeds) -> Iterator[Row]:
    """Yield decoding, drafting and verification after `text` rows."""
    device = typical(captured(step_of(decoder, text, 1)))
    step = statistics.median(steps_of(decoder, text))
    yield from baseline_rows(decoder, text, speeds, {"plain, device": device, "plain, step": step})
    yield from measure_drafts(decoder, text, device, speeds)
    yield from measure_verify(decoder, text, device, speeds)


def baseline_rows(decoder: Decoder, text: int, speeds: Speeds, steps: Mapping[str, float]) -> Iterator[Row]:
    """Yield rows of one token a step, against the time in which the bytes that must be read can be copied.
    steps: seconds, by name.
    """
    floor = floor_of_step(decoder.config, speeds, 1, text)
    for what, seconds in steps.items():
        yield {
            "what": what,
            "ms": _ms(seconds),
            "tokens/s": round(1 / seconds, 1),
            "floor ms": _ms(floor),
            "of copy bandwidth %": round(100 * floor / seconds, 1),
        }


def measure_verify(decoder: Decoder, text: int, one: float, speeds: Speeds) -> Iterator[Row]:
    """Yield rows of a step over a tree of so many nodes, as a multiple of a step over one, which takes `one`
    seconds.
    """
    for rows in ROWS:
        replay = captured(step_of(decoder, text, rows))
        seconds = typical(replay)
        floor = floor_of_step(decoder.config, speeds, rows, text)
        yield {
            "what": "verify, device",
            "rows": rows,
            "ms": _ms(seconds),
            "t/t(1)": round(seconds / one, 3),
            "floor ms": _ms(floor),
        }
        if rows in PROFILED:
            yield {"what": "profile of a step", "rows": rows, "us": kernels_of(replay)}


def steps_of(decoder: Decoder, text: int) -> list[float]:
    """Return the seconds of each step of decoding without drafts, from one result on the host to the next.
    text: rows before.
    """
    stage = DecoderStage(decoder, -(-(text + STEPS) // PAGE) + 1, PAGE)
    stage.capture()
    judge = Verifier(decoder.logits, lambda _: None, None, stage)
    prompt = tuple(range(text))
    opening = (Opening(1, text, limit=STEPS + 2, drafted=False),)
    for start in range(0, text, CHUNK):
        tokens = prompt[start : start + CHUNK]
        chunk = PromptChunk(1, start, tokens, start + CHUNK >= text)
        verdict = judge.verify(stage.run(Frame(1, 1, opening, (chunk,))))
        opening = ()
    times: list[float] = []
    keep: tuple[int, ...] = ()
    for step in range(STEPS):
        token = verdict.result.outcomes[0].tokens[-1]  # pyrefly: ignore[unbound-name]
        watch = Stopwatch()
        growth = TreeSegment(1, step + 1, text + step, keep, single(token))
        verdict = judge.verify(stage.run(Frame(1, step + 2, (), (growth,))))
        times.append(watch.seconds)
        keep = (0,)
    return times[STEPS // 4 :]


def _ms(seconds: float) -> float:
    """Return seconds in milliseconds, rounded."""
    return round(seconds * 1e3, 3)
