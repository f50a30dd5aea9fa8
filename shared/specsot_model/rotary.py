"""Rotary positions: frequencies of each kind, and tables that turn interleaved heads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.checkpoint.rope import Rope
from specsot.errors import ModelError


def interleave(rows: Tensor, head_dim: int, rotated: int | None = None) -> Tensor:
    """Reorder rows of a query or key projection [heads * head_dim, ...] (or its bias, or a norm weight
    [head_dim]): of each head the first d = `rotated` (all) as 0, d/2, 1, d/2 + 1, ..., the rest behind."""
    turns = head_dim if rotated is None else rotated
    heads = rows.unflatten(0, (-1, head_dim))
    pairs = heads[:, :turns].unflatten(1, (2, turns // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((pairs, heads[:, turns:]), 1).reshape(rows.shape)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair, fp32 [head_dim / 2]; pairs of the part that does not turn have 0.

    llama3: wavelengths beyond original / low are slowed by `factor`, those below original / high are
    kept, between them the two are blended (as published with Llama 3.1). yarn: the same, blended pair by
    pair between those that turn `high` and `low` times in the original positions.
    """
    rotated = rope.rotated(head_dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    return F.pad(_scaled(rope, 1.0 / rope.theta**exponents), (0, (head_dim - rotated) // 2))


def _scaled(rope: Rope, plain: Tensor) -> Tensor:
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "longrope":
        if len(rope.factors) != len(plain):
            raise ModelError(f"longrope has {len(rope.factors)} factors for {len(plain)} pairs that turn")
        return plain / torch.tensor(rope.factors)
    if rope.kind == "llama3":
        turns = rope.original * plain / (2 * math.pi)
        blend = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    else:
        first, last = _blended_pairs(rope, len(plain))
        blend = 1 - ((torch.arange(len(plain)) - first) / (last - first)).clamp(0, 1)
    return plain / rope.factor * (1 - blend) + plain * blend


def _blended_pairs(rope: Rope, pairs: int) -> tuple[float, float]:
    """Yarn: pairs up to the first are kept, those from the last on slowed by the whole factor."""
    first, last = (
        pairs * math.log(rope.original / (turns * 2 * math.pi)) / math.log(rope.theta)
        for turns in (rope.high, rope.low)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    return first, last + 0.001 * (first == last)


def growth(rope: Rope, positions: Tensor) -> Tensor:
    """What queries of these positions are multiplied by besides, fp32 [rows]; see `Rope.slope`."""
    return 1 + rope.slope * torch.log1p(torch.floor(positions / rope.original))


class Rotary:
    """Rotation tables for `heads` query heads and `kv_heads` key heads.

    The attention scale rides along in the query part of the table, so no pass is spent on it.
    """

    def __init__(
        self,
        rope: Rope,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        scalar: int | None = None,
    ) -> None:
        """scalar: scores are divided by its square root; None: head_dim."""
        self._rope = rope
        self._heads = heads
        self.frequencies = frequencies(rope, head_dim).to(device)
        self.stretch = rope.stretch
        plain = (scalar or head_dim) ** -0.5
        self.scale = rope.stretch**2 * plain
        scales = torch.ones(heads + kv_heads, head_dim // 2)
        scales[:heads] = plain
        scales[:heads, : rope.rotated(head_dim) // 2] = self.scale
        self._scales = scales.to(device)

    def table(self, positions: Tensor) -> Tensor:
        """Rotations for positions [rows]: complex64 [rows, heads + kv_heads, head_dim / 2]."""
        angles = positions.float()[:, None, None] * self.frequencies
        scales = self._scales.expand(*angles.shape[:1], -1, angles.shape[-1])
        if self._rope.slope:
            scales = scales.clone()
            scales[:, : self._heads] *= growth(self._rope, positions)[:, None, None]
        return torch.polar(scales, angles.expand(-1, self._scales.shape[0], -1))


def turn_back(rates: Tensor, steps: Sequence[int]) -> Tensor:
    """Rotations that bring queries so many positions nearer to the keys before them: complex64
    [rows, head_dim / 2]. rates: `Rotary.frequencies`."""
    angles = torch.tensor(steps, device=rates.device).float()[:, None] * -rates
    return torch.polar(torch.ones_like(angles), angles)


def rotate(qk: Tensor, table: Tensor) -> None:
    """Rotate interleaved heads [rows, heads + kv_heads, head_dim] in place; in fp32 whatever the dtype."""
    wide = qk.float()
    torch.view_as_complex(wide.view(*wide.shape[:2], -1, 2)).mul_(table)
    if wide is not qk:
        qk.copy_(wide)
