"""The least time that a lap or a draft can take on one device: its bytes copied, its products multiplied.

Attention's products, rows of KV that are written and what
the host does are left out, so that nothing is below a floor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specsot.model.config import ModelConfig
from specsot_drafter.heads.checkpoint import HeadShape
from specsot_lab.bench.gpu_laps import seconds_of
from specsot_lab.bench.synthetic_models import bytes_of_a_token, bytes_of_kv

BYTES = 2  # of a number in bf16


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of a device. copied: bytes a second, read and written; multiplied: operations a second, in bf16."""

    copied: float
    multiplied: float


def measure_speeds() -> Speeds:
    """By a copy of 2 GiB and a product of 8,192 by 8,192 numbers, as cuBLAS does it."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds_of(lambda: target.copy_(source), 20)
    side = 8192
    left, right = torch.randn(2, side, side, device="cuda", dtype=torch.bfloat16).unbind()
    return Speeds(copied, 2 * side**3 / seconds_of(lambda: left @ right, 20))


def floor_of_lap(config: ModelConfig, speeds: Speeds, rows: int, seen: int) -> float:
    """Seconds: all weights read once, and the KV of `seen` rows; each row multiplied by all weights."""
    weights = bytes_of_a_token(config, BYTES)
    read = (weights + bytes_of_kv(config, seen, BYTES)) / speeds.copied
    return max(read, 2 * rows * weights / BYTES / speeds.multiplied)


def floor_of_draft(shape: HeadShape, speeds: Speeds, passes: int, bytes_each: int = BYTES) -> float:
    """Seconds of so many passes, one behind the other. bytes_each: of a weight."""
    return passes * bytes_of_a_pass(shape, bytes_each) / speeds.copied


def bytes_of_a_pass(shape: HeadShape, bytes_each: int = BYTES) -> int:
    """Weights of a head's layer and its lm_head."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.inputs * (q + 2 * kv) + shape.hidden * (q + 3 * shape.intermediate)
    return bytes_each * (layer + shape.hidden * shape.vocab)
