"""Measures seconds per layer by number of rows, on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from specsot.members import Curve
from specsot.model.attention import Span
from specsot.model.cuda_graphs import CapturedLaps, GraphCapture, LapRows
from specsot.model.decoder import Decoder
from specsot.model.kv import KVPages

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
WIDE = (*SIZES, 256, 512)  # where laps are graphs: many texts' trees are as many rows, and those cost more
HISTORY_ROWS = 128  # KV rows in front of the measured ones
MIN_TURNS, MAX_TURNS_CPU = 3, 12  # turns that are told; a GPU takes all the time there is, to reach its clock

Forward = Callable[[int], float]  # seconds of so many rows


@torch.inference_mode()
def measure_rows(
    decoder: Decoder, kv: KVPages | None = None, sizes: Sequence[int] = (), seconds: float = 0.3
) -> Curve:
    """Median seconds of *one* layer for each number of rows, ascending.

    kv: pages that may be overwritten; None makes its own. sizes: SIZES or WIDE where none are given.
    seconds: roughly how long to measure at most.
    Sizes are measured in turns, so that a disturbance hits all of them; and as more rows never cost
    less, no size is believed to cost more than a larger one did. Where laps are graphs, graphs are timed.
    """
    sizes = sizes or (WIDE if decoder.capturable else SIZES)
    kv = kv or decoder.make_kv(1, HISTORY_ROWS + max(sizes))
    forward = _captured(decoder, kv, sizes) if decoder.capturable else partial(_forward, decoder, kv)
    most = MAX_TURNS_CPU if decoder.device.type == "cpu" else math.inf
    times = _take_turns(forward, sorted(sizes, reverse=True), seconds, most)
    points: list[tuple[int, float]] = []
    for rows, taken in times.items():
        layer = statistics.median(taken) / len(decoder.layers)
        points.append((rows, min(layer, points[-1][1] if points else layer)))
    return tuple(reversed(points))


def _take_turns(
    forward: Forward, sizes: Sequence[int], seconds: float, most: float
) -> dict[int, list[float]]:
    """Seconds of forwards of the whole range, by rows; the first turn warms up and is not told."""
    times: dict[int, list[float]] = {rows: [] for rows in sizes}
    end, turn = time.perf_counter() + seconds, 0
    while turn <= MIN_TURNS or (turn <= most and time.perf_counter() < end):
        for rows, taken in times.items():
            spent = forward(rows)
            if turn:
                taken.append(spent)
        turn += 1
    return times


def _captured(decoder: Decoder, kv: KVPages, sizes: Sequence[int]) -> Forward:
    """What the device takes: the host's part is paid once a lap, not once a layer."""
    laps = CapturedLaps(decoder, kv, {}, GraphCapture(), tuple(sizes))

    def forward(rows: int) -> float:
        history, span = _behind(kv, rows)
        entry = torch.zeros(rows, decoder.config.hidden, dtype=decoder.dtype, device=decoder.device)
        tokens = [0] * rows
        places = range(history, history + rows)
        return laps.seconds(LapRows(entry if decoder.layers.first else tokens, places, places, [span]))

    return forward


def _behind(kv: KVPages, rows: int) -> tuple[int, Span]:
    """Rows in front of the measured ones, and the span of those."""
    history = min(HISTORY_ROWS, kv.pages * kv.page_rows - rows)
    return history, Span(rows, history, rows, tuple(range(kv.pages)))


def _forward(decoder: Decoder, kv: KVPages, rows: int) -> float:
    begun = time.perf_counter()
    history, span = _behind(kv, rows)
    positions = torch.arange(history, history + rows, device=decoder.device)
    plan = decoder.plan([span], kv.page_rows, "packed")
    hidden = torch.zeros(rows, decoder.config.hidden, dtype=decoder.dtype, device=decoder.device)
    decoder.forward(hidden, positions, positions, plan, kv)
    if decoder.device.type == "cuda":
        # for this thread's work alone: the device may not be waited for while any other thread captures
        torch.cuda.current_stream(decoder.device).synchronize()
    return time.perf_counter() - begun
