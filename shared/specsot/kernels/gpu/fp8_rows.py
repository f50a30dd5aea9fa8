"""Quantises activation rows to 8-bit floats, one scale a row, and scales products back."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from specsot.kernels.gpu.launching import (
    await_before,
    early_start,
    kernel,
    let_next_begin,
    on_device_of,
    power_of_two,
)

OUT_COLUMNS = 1024  # columns of a tile of what comes out
LARGEST = tl.constexpr(448.0)  # of an 8-bit float with 4 bits of exponent and 3 of fraction


def shorten_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, size] as float8_e4m3fn, and what each row is to be multiplied by, fp32 [rows].

    The numbers of a row of x lie side by side.
    """
    rows, size = x.shape
    short = x.new_empty((rows, size), dtype=torch.float8_e4m3fn)
    scales = x.new_empty(rows, dtype=torch.float32)
    with on_device_of(x):
        _shorten[(rows,)](
            x, short, scales, size, x.stride(0), power_of_two(size), num_warps=8, **early_start(x)
        )  # fmt: skip
    return short, scales


def lengthen_rows(y: Tensor, scales: Tensor, gated: bool = False, into: Tensor | None = None) -> Tensor:
    """[rows, size] times each row's scale; gated: silu(first half) * second half of that, [rows, size / 2].

    into: what it is added to, in place; else it takes the place of y, or is new where it is gated.
    """
    rows, wanted = len(y), y.shape[1] // (1 + gated)
    out = into if into is not None else y.new_empty((rows, wanted)) if gated else y
    with on_device_of(y):
        _lengthen[(rows, -(-wanted // OUT_COLUMNS))](
            y,
            scales,
            out,
            y.shape[1],
            wanted,
            out.stride(0),
            OUT_COLUMNS,
            gated,
            into is not None,
            **early_start(y),
        )
    return out


@kernel
def _shorten(x, short, scales, size, from_x, room: tl.constexpr, early: tl.constexpr):
    let_next_begin(early)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, room)
    there = column < size
    await_before(early)
    values = tl.load(x + row * from_x + column, mask=there, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(values), 0)
    scale = tl.where(peak > 0, peak / LARGEST, 1.0)
    tl.store(short + row * size + column, (values / scale).to(short.dtype.element_ty), mask=there)
    tl.store(scales + row, scale)


@kernel
def _lengthen(
    y, scales, out, size, wanted, from_out, wide: tl.constexpr, gated: tl.constexpr, added: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    let_next_begin(early)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * wide + tl.arange(0, wide)
    there = column < wanted
    await_before(early)
    scale = tl.load(scales + row)
    values = tl.load(y + row * size + column, mask=there, other=0.0).to(tl.float32) * scale
    if gated:
        beside = tl.load(y + row * size + wanted + column, mask=there, other=0.0).to(tl.float32) * scale
        values = values / (1 + tl.exp(-values)) * beside
    place = out + row * from_out + column
    if added:
        values += tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.store(place, values.to(out.dtype.element_ty), mask=there)
