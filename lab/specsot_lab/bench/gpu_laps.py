"""A lap on the device alone, as one captured graph, and how long such things take."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from specsot.core.tree import ancestry, depths
from specsot.model.attention import Span
from specsot.model.decoder import Decoder
from specsot.model.kv import KVPages

Call = Callable[[], object]

PAGE = 64
TURNS = 7  # measurements, of which the median is told


def lap_of(decoder: Decoder, text: int, rows: int) -> Call:
    """A whole lap on the device: embedding, layers, logits and argmax of a tree behind `text` rows."""
    pages = -(-(text + rows) // PAGE)
    kv = filled(decoder, pages)
    parents = parents_of(rows)
    positions = torch.tensor([text + depth for depth in depths(parents)], device="cuda")
    slots = torch.arange(text, text + rows, device="cuda")
    span = Span(rows, text, rows, tuple(range(pages)), ancestry(parents))
    plan = decoder.plan([span], PAGE, "batched")
    tokens = torch.randint(decoder.config.vocab, (rows,), device="cuda")

    def lap() -> Tensor:
        hidden, _ = decoder.forward(decoder.embed(tokens), positions, slots, plan, kv)
        return decoder.logits(hidden).max(-1).indices

    return lap


def parents_of(rows: int) -> tuple[int, ...]:
    """A tree that grew at random, of `rows` nodes, root included; the same every time."""
    rng = random.Random(rows)
    return (0, *(rng.randrange(max(0, node - 12), node) for node in range(1, rows)))


def filled(decoder: Decoder, pages: int) -> KVPages:
    kv = decoder.make_kv(pages, PAGE)
    for layer in kv.layers:
        layer.normal_()
    return kv


def captured(call: Call) -> Call:
    """The same as a graph: whoever calls it only launches that."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    kept = graph, call  # what a graph reads lives no longer than the call that it was captured from
    return lambda: kept[0].replay()


def replayed(call: Call) -> float:
    """Seconds of a call inside a captured graph."""
    return typical(captured(call))


def typical(call: Call) -> float:
    """Median seconds of a call."""
    return statistics.median(seconds_of(call, 10) for _ in range(TURNS))


def seconds_of(call: Call, calls: int) -> float:
    """Seconds of a call in a row of calls."""
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls
