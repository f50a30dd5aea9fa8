"""Measures seconds per layer by number of rows, on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

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

Timer = Callable[[], float]  # does something once, and tells its seconds
Forward = Callable[[int], float]  # seconds of so many rows


def measure_curve(
    timers: Mapping[int, Timer],
    seconds: float,
    least: int,
    device: torch.device,
    clock: Timer = time.perf_counter,
) -> Curve:
    """(rows, median seconds), ascending. timers: by rows; each is asked `least` times or more.

    seconds: roughly how long to measure at most. Sizes are measured in turns, the largest first, so that a
    disturbance hits all of them; the first turn warms up and is not told. As more rows never cost less, no
    size is believed to cost more than a larger one did.
    """
    most = MAX_TURNS_CPU if device.type == "cpu" else math.inf
    times: dict[int, list[float]] = {rows: [] for rows in sorted(timers, reverse=True)}
    end, turn = clock() + seconds, 0
    while turn <= least or (turn <= most and clock() < end):
        for rows, taken in times.items():
            spent = timers[rows]()
            if turn:
                taken.append(spent)
        turn += 1
    costs = accumulate(map(statistics.median, times.values()), min)
    return tuple(reversed([*zip(times, costs)]))


@torch.inference_mode()
def measure_rows(
    decoder: Decoder, kv: KVPages | None = None, sizes: Sequence[int] = (), seconds: float = 0.3
) -> Curve:
    """Median seconds of *one* layer for each number of rows, ascending; see `measure_curve`.

    kv: pages that may be overwritten; None makes its own. sizes: SIZES or WIDE where none are given.
    Where laps are graphs, graphs are timed.
    """
    sizes = sizes or (WIDE if decoder.capturable else SIZES)
    kv = kv or decoder.make_kv(1, HISTORY_ROWS + max(sizes))
    forward = _captured(decoder, kv, sizes) if decoder.capturable else partial(_forward, decoder, kv)
    timers = {rows: partial(forward, rows) for rows in sizes}
    curve = measure_curve(timers, seconds, MIN_TURNS, decoder.device)
    return tuple((rows, spent / len(decoder.layers)) for rows, spent in curve)


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
