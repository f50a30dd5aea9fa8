"""How long one layer takes for how many rows, measured here and now.

Refuses to know rings, tuners and what the figures are used for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from specsot.members import Curve
from specsot.model.attention import Span, plan_attention
from specsot.model.decoder import Decoder
from specsot.model.kv import KVPages

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
HISTORY = 128  # KV rows in front of the measured ones


@torch.inference_mode()
def measure_rows(
    decoder: Decoder, kv: KVPages | None = None, sizes: Sequence[int] = SIZES, seconds: float = 0.3
) -> Curve:
    """Median seconds of *one* layer for each number of rows, ascending.

    kv: pages that may be overwritten; None makes its own. seconds: roughly how long to measure in all.
    Sizes are measured in turns, so that a disturbance hits all of them; and as more rows never cost
    less, no size is believed to cost more than a larger one did.
    """
    kv = kv or decoder.make_kv(1, HISTORY + max(sizes))
    times = _take_turns(decoder, kv, sorted(sizes, reverse=True), seconds)
    points: list[tuple[int, float]] = []
    for rows, taken in times.items():
        layer = statistics.median(taken) / len(decoder.layers)
        points.append((rows, min(layer, points[-1][1] if points else layer)))
    return tuple(reversed(points))


def _take_turns(
    decoder: Decoder, kv: KVPages, sizes: Sequence[int], seconds: float
) -> dict[int, list[float]]:
    """Wall seconds of forwards of the whole range, by rows; the first turn warms up and is not told."""
    times: dict[int, list[float]] = {rows: [] for rows in sizes}
    end, turn = time.perf_counter() + seconds, 0
    while turn <= 3 or time.perf_counter() < end:
        for rows, taken in times.items():
            start = time.perf_counter()
            _forward(decoder, kv, rows)
            if turn:
                taken.append(time.perf_counter() - start)
        turn += 1
    return times


def _forward(decoder: Decoder, kv: KVPages, rows: int) -> None:
    history = min(HISTORY, kv.pages * kv.page_rows - rows)
    positions = torch.arange(history, history + rows, device=decoder.device)
    pages = tuple(range(kv.pages))
    config = decoder.config
    plan = plan_attention(
        [Span(rows, history, rows, pages)],
        kv.page_rows,
        config.heads // config.kv_heads,
        "packed",
        decoder.dtype,
        decoder.device,
    )
    hidden = torch.zeros(rows, config.hidden, dtype=decoder.dtype, device=decoder.device)
    decoder.forward(hidden, positions, positions, plan, kv)
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)
