"""Rotary position embedding: frequencies of each kind of scaling, and tables that rotate interleaved heads.

A pair is two numbers of a head that are rotated together, as one complex number. Weights are reordered when
they are loaded (`interleave`), so that the two numbers of a pair are neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.checkpoint.rope import Rope
from specsot.errors import ModelError


def interleave(rows: Tensor, head_dim: int, rotated: int | None = None) -> Tensor:
    """Reorder the rows of a query or key projection so that the two numbers of a rotary pair are neighbours.

    rows: [heads * head_dim, ...]: a weight, its bias, or the weight of a head norm.
    rotated: How many numbers of each head rotate; None: all. The others keep their places at the end.

    # one head of 6 numbers, rotated 4: [0 1 2 3 4 5] -> [0 2 1 3 4 5]
    """
    turns = head_dim if rotated is None else rotated
    heads = rows.unflatten(0, (-1, head_dim))
    pairs = heads[:, :turns].unflatten(1, (2, turns // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((pairs, heads[:, turns:]), 1).reshape(rows.shape)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the radians per position of each pair, fp32 [head_dim / 2]. Pairs that do not rotate have 0.

    The kind llama3 divides the frequency of wavelengths beyond original / low by `factor`, keeps wavelengths
    below original / high, and blends the two in between (as published with Llama 3.1). The kind yarn does
    the same, but blends linearly by pair index, between the pairs that turn `high` and `low` times within
    the original context. Raises ModelError if longrope has the wrong number of factors.
    """
    rotated = rope.rotated(head_dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    return F.pad(_scaled(rope, 1.0 / rope.theta**exponents), (0, (head_dim - rotated) // 2))


def _scaled(rope: Rope, plain: Tensor) -> Tensor:
    """Scale the unscaled frequencies `plain`, one per rotating pair, as `rope.kind` says."""
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
    """Return the range of pair indices that yarn blends.

    Pairs up to the first keep their frequency; pairs from the last on are slowed by the whole factor.
    """
    first, last = (
        pairs * math.log(rope.original / (turns * 2 * math.pi)) / math.log(rope.theta)
        for turns in (rope.high, rope.low)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    return first, last + 0.001 * (first == last)


def growth(rope: Rope, positions: Tensor) -> Tensor:
    """Return the extra factor of queries at these positions, fp32 [rows]; see `Rope.slope`."""
    return 1 + rope.slope * torch.log1p(torch.floor(positions / rope.original))


class Rotary:
    """Rotation tables for `heads` query heads and `kv_heads` key heads.

    The query part of a table includes the attention scale, so that scaling needs no pass of its own.

    frequencies: Radians per position of each pair, fp32 [head_dim / 2].
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
        """scalar: Attention scores are divided by its square root; None means head_dim."""
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
        """Return the rotations for positions [rows]: complex64 [rows, heads + kv_heads, head_dim / 2]."""
        angles = positions.float()[:, None, None] * self.frequencies
        scales = self._scales.expand(*angles.shape[:1], -1, angles.shape[-1])
        if self._rope.slope:
            scales = scales.clone()
            scales[:, : self._heads] *= growth(self._rope, positions)[:, None, None]
        return torch.polar(scales, angles.expand(-1, self._scales.shape[0], -1))


def turn_back(rates: Tensor, steps: Sequence[int]) -> Tensor:
    """Return the rotations that move queries back by `steps` positions: complex64 [rows, head_dim / 2].

    rates: `Rotary.frequencies`.
    steps: By row, how many positions nearer the query comes to the keys before it.
    """
    angles = torch.tensor(steps, device=rates.device).float()[:, None] * -rates
    return torch.polar(torch.ones_like(angles), angles)


def rotate(qk: Tensor, table: Tensor) -> None:
    """Rotate interleaved heads [rows, heads + kv_heads, head_dim] in place, in fp32 for any dtype."""
    wide = qk.float()
    torch.view_as_complex(wide.view(*wide.shape[:2], -1, 2)).mul_(table)
    if wide is not qk:
        qk.copy_(wide)
