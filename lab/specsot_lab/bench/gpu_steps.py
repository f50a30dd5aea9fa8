"""A step on one device: its forward alone, the least time that it can take, and the kernels it is made of.

Floors: bytes copied, products multiplied. Attention's products, rows of KV that are written and what the host
does are left out, so that nothing is below a floor.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from specsot.checkpoint.config import ModelConfig
from specsot.core.tree import ancestry, depths
from specsot_drafter.heads.checkpoint import HeadShape
from specsot_lab.bench.clock import Call, seconds_of
from specsot_lab.bench.synthetic_models import bytes_of_a_token, bytes_of_kv
from specsot_model.attention import RowSpan
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages

PAGE = 64
BYTES = 2  # of a number in bf16
KernelSpan = tuple[float, float, str]  # begin and end of a kernel in microseconds, and its name

TIMES = 3  # that it runs
MOST = 10  # kernels that are told by name
LETTERS = 48  # of a name: what templates add is left out


def step_of(decoder: Decoder, text: int, rows: int) -> Call:
    """Return a call of a whole step on the device: embedding, layers, logits and argmax of a tree of `rows`
    nodes after `text` rows.
    """
    pages = -(-(text + rows) // PAGE)
    kv = filled(decoder, pages)
    parents = parents_of(rows)
    positions = torch.tensor([text + depth for depth in depths(parents)], device="cuda")
    slots = torch.arange(text, text + rows, device="cuda")
    span = RowSpan(rows, text, rows, tuple(range(pages)), ancestry(parents))
    plan = decoder.plan([span], PAGE, "batched")
    tokens = torch.randint(decoder.config.vocab, (rows,), device="cuda")

    def step() -> Tensor:
        """Run the step, and return the argmax of each row."""
        hidden, _ = decoder.forward(decoder.embed(tokens), positions, slots, plan, kv)
        return decoder.logits(hidden).max(-1).indices

    return step


def parents_of(rows: int) -> tuple[int, ...]:
    """Return the parents of a tree of `rows` nodes that grew at random, root included; the same
    every time.
    """
    rng = random.Random(rows)
    return (0, *(rng.randrange(max(0, node - 12), node) for node in range(1, rows)))


def filled(decoder: Decoder, pages: int) -> KVPages:
    """Return pages of KV with random content."""
    kv = decoder.make_kv(pages, PAGE)
    for layer in kv.layers:
        layer.normal_()
    return kv


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of a device. copied: bytes a second, read and written; multiplied: operations a second, in bf16."""

    copied: float
    multiplied: float


def measure_speeds() -> Speeds:
    """Return the device's speeds, by a copy of 2 GiB and a product of 8,192 by 8,192 numbers, as cuBLAS does
    it.
    """
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds_of(lambda: target.copy_(source), 20)
    side = 8192
    left, right = torch.randn(2, side, side, device="cuda", dtype=torch.bfloat16).unbind()
    seconds_of(lambda: left @ right, 1)  # the first product takes tenths of a second
    return Speeds(copied, 2 * side**3 / seconds_of(lambda: left @ right, 20))


def floor_of_step(config: ModelConfig, speeds: Speeds, rows: int, seen: int) -> float:
    """Return the seconds of a step at least: all weights read once, and the KV of `seen` rows; each row
    multiplied by all weights.
    """
    weights = bytes_of_a_token(config, BYTES)
    read = (weights + bytes_of_kv(config, seen, BYTES)) / speeds.copied
    return max(read, 2 * rows * weights / BYTES / speeds.multiplied)


def floor_of_draft(shape: HeadShape, speeds: Speeds, passes: int, bytes_each: int = BYTES) -> float:
    """Return the seconds of so many passes of a head, one after the other. bytes_each: of a weight."""
    return passes * bytes_of_a_pass(shape, bytes_each) / speeds.copied


def bytes_of_a_pass(shape: HeadShape, bytes_each: int = BYTES) -> int:
    """Return the bytes of weights of a head's layer and its lm_head. bytes_each: of a weight."""
    q = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    layer = shape.inputs * (q + 2 * kv) + shape.hidden * (q + 3 * shape.intermediate)
    return bytes_each * (layer + shape.hidden * shape.vocab)


def kernels_of(run: Call) -> dict[str, float]:
    """Return the microseconds of each kernel in one run, the longest first. A profile itself slows things
    down.
    """
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(TIMES):
            run()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
    spans = ((event.time_range.start, event.time_range.end, event.name) for event in events)
    return longest({name: spent / TIMES for name, spent in shares(spans).items()})


def shares(spans: Iterable[KernelSpan]) -> dict[str, float]:
    """Return how long each kernel was the one that all others waited for: one may begin before
    another ends.
    """
    spent: dict[str, float] = defaultdict(float)
    until = 0.0
    for begin, end, name in sorted(spans):
        spent[name] += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return spent


def longest(spent: Mapping[str, float]) -> dict[str, float]:
    """Return the MOST kernels that take longest, by short names, and all others together."""
    named: dict[str, float] = defaultdict(float)
    for name, taken in spent.items():
        named[_short(name)] += taken
    order = sorted(named, key=lambda name: -named[name])
    told = {name: round(named[name], 1) for name in order[:MOST]}
    rest = sum(named[name] for name in order[MOST:])
    return told | ({"others": round(rest, 1)} if rest else {})


def _short(name: str) -> str:
    """Return a kernel's name without its template's arguments."""
    return name.removeprefix("void ").split("<")[0].split("(")[0][:LETTERS]
