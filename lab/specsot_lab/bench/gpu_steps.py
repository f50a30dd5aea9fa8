"""A step on one device: its forward pass alone, the shortest time in which it is possible, and its kernels.

The shortest time, the floor, is that of copying the bytes that must be read, or of the multiplications. The
floor leaves out the products of attention, the KV rows that are written, and the work of the host, so that no
measurement is below it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from specsot.checkpoint.config import ModelConfig
from specsot.core.tree import ancestry, depths
from specsot_drafter.heads.checkpoint import HeadShape
from specsot_lab.bench.clock import Call, mean_seconds
from specsot_lab.bench.synthetic_models import bytes_of_a_token, bytes_of_kv
from specsot_model.attention import RowSpan
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages

# Rows of a KV page.
PAGE: Final = 64
# Bytes of a number in bf16.
BF16_BYTES: Final = 2
# Start and end of a kernel in microseconds, and the kernel's name.
KernelSpan = tuple[float, float, str]

# Runs of a profile, of which the mean is the result. Untuned.
PROFILED_RUNS: Final = 3
# Kernels that are listed by name; the others are summed up. Untuned.
MAX_KERNELS: Final = 10
# Characters of a kernel's name. Template arguments are left out.
MAX_NAME_LENGTH: Final = 48


def step_call(decoder: Decoder, context_length: int, rows: int) -> Call:
    """Return a function that runs a whole step on the device: embedding, layers, logits and argmax of the
    nodes of a tree.

    decoder: The whole base model.
    context_length: Number of tokens in the KV cache before the tree.
    rows: Nodes of the tree, root included.

    The returned function can be captured as a CUDA graph. The content of the KV cache and the tokens of the
    nodes are random.
    """
    pages = -(-(context_length + rows) // PAGE)
    kv = random_kv(decoder, pages)
    parents = random_parents(rows)
    positions = torch.tensor([context_length + depth for depth in depths(parents)], device="cuda")
    slots = torch.arange(context_length, context_length + rows, device="cuda")
    span = RowSpan(rows, context_length, rows, tuple(range(pages)), ancestry(parents))
    plan = decoder.plan([span], PAGE, "batched")
    tokens = torch.randint(decoder.config.vocab, (rows,), device="cuda")

    def step() -> Tensor:
        """Run the step, and return the argmax token of each node, [rows]."""
        hidden, _ = decoder.forward(decoder.embed(tokens), positions, slots, plan, kv)
        return decoder.logits(hidden).max(-1).indices

    return step


def random_parents(rows: int) -> tuple[int, ...]:
    """Return the parent of each node of a tree that grew at random, the same tree every time. The root, node
    0, is its own parent.

    rows: Number of nodes, root included, at least 1.
    """
    rng = random.Random(rows)
    return (0, *(rng.randrange(max(0, node - 12), node) for node in range(1, rows)))


def random_kv(decoder: Decoder, pages: int) -> KVPages:
    """Return KV pages with random content.

    decoder: The model whose layers the pages belong to.
    pages: Number of pages of PAGE rows.

    The numbers are normally distributed, with a mean of 0 and a standard deviation of 1.
    """
    kv = decoder.make_kv(pages, PAGE)
    for layer in kv.layers:
        layer.normal_()
    return kv


@dataclass(frozen=True, slots=True)
class Speeds:
    """The measured speeds of a device.

    copy_speed: Bytes per second of a copy, where bytes that are read and bytes that are written both count.
    multiply_speed: Operations per second of matrix products in bf16.
    """

    copy_speed: float
    multiply_speed: float


def measure_speeds() -> Speeds:
    """Return the device's speeds, measured by a copy of 2 GiB and by a product of two matrices of 8,192 by
    8,192 numbers.

    Needs a CUDA device.
    """
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / mean_seconds(lambda: target.copy_(source), 20)
    side = 8192
    left, right = torch.randn(2, side, side, device="cuda", dtype=torch.bfloat16).unbind()
    # The first product takes tenths of a second, which are not counted.
    mean_seconds(lambda: left @ right, 1)
    return Speeds(copied, 2 * side**3 / mean_seconds(lambda: left @ right, 20))


def floor_of_step(config: ModelConfig, speeds: Speeds, rows: int, visible_rows: int) -> float:
    """Return the shortest possible seconds of a step: the time of reading all weights and the KV rows once,
    or of multiplying each row by all weights, whichever is longer.

    config: The base model.
    speeds: The measured speeds of the device.
    rows: Rows of the step.
    visible_rows: KV rows that the step reads.

    Weights count 2 bytes each.
    """
    weights = bytes_of_a_token(config, BF16_BYTES)
    read_seconds = (weights + bytes_of_kv(config, visible_rows, BF16_BYTES)) / speeds.copy_speed
    return max(read_seconds, 2 * rows * weights / BF16_BYTES / speeds.multiply_speed)


def floor_of_draft(shape: HeadShape, speeds: Speeds, passes: int, weight_bytes: int = BF16_BYTES) -> float:
    """Return the shortest possible seconds of forward passes of a head: the time of reading its weights in
    each pass.

    shape: The head's shape.
    speeds: The measured speeds of the device.
    passes: Number of passes.
    weight_bytes: Bytes of a weight.
    """
    return passes * bytes_of_a_pass(shape, weight_bytes) / speeds.copy_speed


def bytes_of_a_pass(shape: HeadShape, weight_bytes: int = BF16_BYTES) -> int:
    """Return the bytes of weights that one forward pass of a head reads: those of its layer and its lm_head.

    shape: The head's shape.
    weight_bytes: Bytes of a weight.

    The layer counts its query, key, value and output projections and its MLP; norms and the projection of
    features are left out.
    """
    q = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    layer = shape.inputs * (q + 2 * kv) + shape.hidden * (q + 3 * shape.intermediate)
    return weight_bytes * (layer + shape.hidden * shape.vocab)


def kernels_of(run: Call) -> dict[str, float]:
    """Return the microseconds of each kernel in one run, the longest first. The profile itself makes the run
    slower.

    run: The function to profile; it is called once before.

    The result is the mean of PROFILED_RUNS runs, with kernels by short names as `longest_kernels` returns
    them.
    """
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED_RUNS):
            run()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if event.device_type.name == "CUDA"]
    spans = ((event.time_range.start, event.time_range.end, event.name) for event in events)
    return longest_kernels({name: spent / PROFILED_RUNS for name, spent in exclusive_times(spans).items()})


def exclusive_times(spans: Iterable[KernelSpan]) -> dict[str, float]:
    """Return the time during which each kernel ran and no earlier one did, by the kernel's name, because one
    kernel may start before another has ended; {} without kernels. For example:

        # spans (0, 10, "a") and (8, 12, "b") -> {"a": 10, "b": 2}

    spans: Start, end and name of each kernel, in any order. The result has the unit of these times.

    A kernel that ran only while an earlier one did has 0.
    """
    seconds: dict[str, float] = defaultdict(float)
    busy_until = 0.0
    for begin, end, name in sorted(spans):
        seconds[name] += max(end - max(begin, busy_until), 0.0)
        busy_until = max(busy_until, end)
    return seconds


def longest_kernels(microseconds: Mapping[str, float]) -> dict[str, float]:
    """Return the microseconds of the MAX_KERNELS kernels that take longest, by short names, and of all others
    together under "others", if there are any.

    microseconds: Time of each kernel, by its full name; kernels with equal short names are added up.

    Values are rounded to one decimal place. An entry "others" of 0 is left out.
    """
    named: dict[str, float] = defaultdict(float)
    for name, duration in microseconds.items():
        named[_short_name(name)] += duration
    order = sorted(named, key=lambda name: -named[name])
    figures = {name: round(named[name], 1) for name in order[:MAX_KERNELS]}
    others = sum(named[name] for name in order[MAX_KERNELS:])
    return figures | ({"others": round(others, 1)} if others else {})


def _short_name(name: str) -> str:
    """Return a kernel's name without its return type, template arguments and parameters.

    name: The kernel's full name.
    """
    return name.removeprefix("void ").split("<")[0].split("(")[0][:MAX_NAME_LENGTH]
