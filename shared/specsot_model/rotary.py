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
    """Return the rows of a query or key projection, reordered so that the two numbers of a rotary pair are
    neighbours.

    The result has the shape of `rows`.

    rows: [heads * head_dim, ...]: a weight, its bias, or the weight of a head norm.
    head_dim: Numbers of a head.
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
    below original / high, and blends the two in between (as published with Llama 3.1). The kind yarn does the
    same, but blends linearly by pair index, between the pairs that turn `high` and `low` times within the
    original context. The kind linear divides all frequencies by `factor`, and longrope each by a factor of
    its own. The kind proportional has 0 for all but the first pairs.

    rope: The model's rotary parameters: base, kind of scaling and its factors.
    head_dim: Numbers of a head.

    Raises ModelError if longrope has the wrong number of factors.
    """
    num_rotated = rope.rotated(head_dim)
    exponents = torch.arange(0, num_rotated, 2, dtype=torch.int64).float() / num_rotated
    return F.pad(_scaled(rope, 1.0 / rope.theta**exponents), (0, (head_dim - num_rotated) // 2))


def _scaled(rope: Rope, unscaled: Tensor) -> Tensor:
    """Return frequencies scaled as `rope.kind` says, fp32 [pairs].

    The result is unchanged for "default". Any other kind than linear, longrope, proportional and llama3 is
    treated as yarn.

    rope: The model's rotary parameters.
    unscaled: Radians per position of each rotating pair, fp32 [pairs], without scaling.

    Raises ModelError if longrope has the wrong number of factors.
    """
    if rope.kind == "default":
        return unscaled
    if rope.kind == "linear":
        return unscaled / rope.factor
    if rope.kind == "proportional":
        rotating = torch.arange(len(unscaled)) < int(rope.proportion * len(unscaled))
        return unscaled / rope.factor * rotating
    if rope.kind == "longrope":
        if len(rope.factors) != len(unscaled):
            raise ModelError(f"longrope has {len(rope.factors)} factors for {len(unscaled)} rotating pairs")
        return unscaled / torch.tensor(rope.factors)
    if rope.kind == "llama3":
        turns = rope.original * unscaled / (2 * math.pi)
        blend = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    else:
        first, last = _blended_pairs(rope, len(unscaled))
        blend = 1 - ((torch.arange(len(unscaled)) - first) / (last - first)).clamp(0, 1)
    return unscaled / rope.factor * (1 - blend) + unscaled * blend


def _blended_pairs(rope: Rope, pairs: int) -> tuple[float, float]:
    """Return the range (first, last) of pair indices that yarn blends.

    Pairs up to the first keep their frequency; pairs from the last on are slowed by the whole factor. `last`
    is always greater than `first`. The indices are whole if `rope.truncate` is true, first rounded down and
    last up. `first` is at least 0, and `last` about 2 * pairs - 1 at most.

    rope: The model's rotary parameters.
    pairs: Number of rotating pairs.
    """
    first, last = (
        pairs * math.log(rope.original / (turns * 2 * math.pi)) / math.log(rope.theta)
        for turns in (rope.high, rope.low)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    return first, last + 0.001 * (first == last)


def query_growth(rope: Rope, positions: Tensor) -> Tensor:
    """Return the extra factor of queries at these positions, fp32 [rows]; 1 if `Rope.slope` is 0.

    rope: The model's rotary parameters, of which `slope` and `original` (positions) are read.
    positions: Integers [rows], the position of each query in its sequence.
    """
    return 1 + rope.slope * torch.log1p(torch.floor(positions / rope.original))


class Rotary:
    """Rotation tables for `heads` query heads and `kv_heads` key heads.

    The query part of a table includes the attention scale, so that scaling needs no pass of its own.

    frequencies: Radians per position of each pair, fp32 [head_dim / 2].
    stretch: Factor by which queries and keys are stretched (yarn, longrope); 1 for other kinds.
    scale: Attention scale of the rotating numbers of a query, stretch^2 / sqrt(head_dim or `scalar`).
    """

    def __init__(
        self,
        rope: Rope,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        scalar: float | None = None,
    ) -> None:
        """Compute the frequencies and scales of the tables.

        ModelError is raised if longrope has the wrong number of factors.

        rope: The model's rotary parameters.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        head_dim: Numbers of a head.
        device: Device of the tables.
        scalar: Attention scores are divided by its square root; None means head_dim.
        """
        self._rope = rope
        self._heads = heads
        self.frequencies = frequencies(rope, head_dim).to(device)
        self.stretch = rope.stretch
        unstretched = (scalar or head_dim) ** -0.5
        self.scale = rope.stretch**2 * unstretched
        scales = torch.ones(heads + kv_heads, head_dim // 2)
        scales[:heads] = unstretched
        scales[:heads, : rope.rotated(head_dim) // 2] = self.scale
        self._scales = scales.to(device)

    def table(self, positions: Tensor) -> Tensor:
        """Return the rotations of queries and keys: complex64 [rows, heads + kv_heads, head_dim / 2].

        The attention scale, and for a rope with `slope` the growth by position, is contained in the queries'
        rotations.

        positions: LongTensor [rows], the position of each row in its sequence.
        """
        angles = positions.float()[:, None, None] * self.frequencies
        scales = self._scales.expand(*angles.shape[:1], -1, angles.shape[-1])
        if self._rope.slope:
            scales = scales.clone()
            scales[:, : self._heads] *= query_growth(self._rope, positions)[:, None, None]
        return torch.polar(scales, angles.expand(-1, self._scales.shape[0], -1))


def turn_back(frequencies: Tensor, positions_back: Sequence[int]) -> Tensor:
    """Return the rotations that move queries back by some positions: complex64 [rows, head_dim / 2].

    The rotation of a row with 0 is 1.

    frequencies: `Rotary.frequencies`, radians per position of each rotary pair, fp32 [head_dim / 2].
    positions_back: By row, how many positions nearer the query comes to the keys before it.
    """
    angles = torch.tensor(positions_back, device=frequencies.device).float()[:, None] * -frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(heads: Tensor, table: Tensor) -> None:
    """Rotate heads in place, in fp32 for any dtype.

    heads: [rows, heads + kv_heads, head_dim], queries before keys, with the numbers of a pair next to each
        other (`interleave`).
    table: complex64 [rows, heads + kv_heads, head_dim / 2], as `Rotary.table` returns it.
    """
    wide = heads.float()
    torch.view_as_complex(wide.view(*wide.shape[:2], -1, 2)).mul_(table)
    if wide is not heads:
        heads.copy_(wide)
