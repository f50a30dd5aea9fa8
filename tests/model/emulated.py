"""Runs products as they are compiled for another processor, whose instructions are spelled out in plain LLVM
code, and prints a digest of the results of each format of weights.

python -m tests.model.emulated avx512vnni          # or avxvnni, amx
python -m tests.model.emulated avx512vnni whole    # the whole kernel, not only products: takes twice as long

Imported as a module, it emulates nothing: `digests` then describes this processor's kernel.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from specsot_kernels.cpu import layout

KIND, *PARTS = sys.argv[1:] if __name__ == "__main__" else ("own",)
if KIND != "own":
    layout.INSTRUCTIONS = "avx512vnni" if KIND == "amx" else KIND
    layout.AMX = KIND == "amx"
    layout.WIDE_INPUTS, layout.STEP_BYTES = False, 4

from specsot_kernels.cpu import kernel, running, steps, tiles  # noqa: E402
from specsot_kernels.cpu import vectors as v  # noqa: E402

Call = Callable[..., Any]


def emulated_call(call_named: Call) -> Call:
    """`call_named`, but for dot products of 4 unsigned with 4 signed bytes, which are spelled out."""

    def call(b: Any, name: str, result: Any, *values: Any, **flags: Any) -> Any:
        if "vpdpbusd" not in name:
            return call_named(b, name, result, *values, **flags)
        lanes = 4 * result.count
        wide = tiles.ir.VectorType(v.I32, lanes)
        weights, inputs = (b.bitcast(one, tiles.ir.VectorType(v.I8, lanes)) for one in values[1:])
        products = b.mul(b.zext(weights, wide), b.sext(inputs, wide))
        return b.add(values[0], tiles._pairs(b, tiles._pairs(b, products)))

    return call


class Matrices:
    """AMX's tile products: where the tiles of inputs and weights were loaded from, and what they gave."""

    def __init__(self) -> None:
        self.steps = 0
        self.loaded: dict[int, tuple[Any, Any]] = {}
        self.sums: list[Any] = []

    def emit(self, b: Any, name: str, *values: Any) -> None:
        """Emit what an instruction does; one that configures, zeroes or releases needs nothing."""
        if name == "tileloadd64":
            self.loaded[values[0].constant] = b.ptrtoint(values[1], v.I64), values[2]
        elif name == "tdpbsud":
            (x, x_stride), (w, w_stride) = self.loaded[0], self.loaded[1]
            plain = tiles._GenericDots()
            self.sums = []
            for row in range(layout.TILE_ROWS):
                held = [tiles.ir.Constant(v.VI, None)]
                for step in range(self.steps):
                    inputs = plain.read(b, v.address(b, x, (row, x_stride), (step, 4)))
                    weights = v.read(tiles._bytes(64))(b, v.address(b, w, (step, w_stride)))
                    held = plain.step(b, held, weights, inputs)
                self.sums += held
        elif name == "tilestored64":
            at = b.ptrtoint(values[1], v.I64)
            for row, sums in enumerate(self.sums):
                v.write(v.VI)(b, v.address(b, at, (row, values[2])), sums)

    def product(self, bits: int) -> Any:
        """The operation that `tiles.matrix` calls for these bits."""
        emit = tiles._amx_tile(bits)

        def code(b: Any, *values: Any) -> None:
            self.steps = tiles._steps(bits) // tiles._parts(bits)
            emit(b, *values)

        return tiles.operation(tiles.types.void, (v.INT,) * 15, code)


def multiply(tables):
    """Run a product as `steps._run` does. Numba compiles this function, so it has no types."""
    frame, product = v.get_long(tables), v.get_long(tables + 8)
    stride = v.get_long(product + steps.INPUTS) * 4
    x, norm, out = (
        v.get_long(frame + steps.X),
        v.get_long(frame + steps.NORM),
        v.get_long(frame + steps.OUTPUT),
    )
    thread, threads = steps.team(frame)
    steps.project(thread, threads, frame, product, x, stride, norm, out)


def emulate() -> None:
    """Let the kernel be compiled with emulated instructions, and not be kept."""
    if "whole" not in PARTS:
        steps._run = multiply
    tiles.call_named = emulated_call(tiles.call_named)
    kernel._object_file = lambda: None
    steps.source_digest = lambda folder=kernel.FOLDER: f"emulated_{KIND}"
    if layout.AMX:
        matrices = Matrices()
        tiles._amx = matrices.emit
        nothing = tiles.operation(tiles.types.void, (), lambda b: None)
        tiles.configure = tiles._by_format(lambda bits: nothing)
        tiles.release = nothing
        tiles.matrix = tiles._by_format(matrices.product)


def weight(bits: int, drawn: torch.Generator) -> running.PackedWeight:
    """A weight of random codes and scales."""
    shape = (200, 1536)
    num_codes, num_scales, num_bias = running.array_sizes(shape, bits)
    codes = torch.randint(0, 256, (num_codes,), dtype=torch.uint8, generator=drawn)
    head, group = layout.HEAD_BYTES[bits], layout.GROUP_BYTES[bits]
    if bits != 8:
        # The fp16 numbers precede every 8 groups, or end each group.
        halves = codes.view(-1, head + 8 * group)[:, :head] if head else codes.view(-1, group)[:, 256:]
        scales = torch.randn(len(halves), halves.shape[1] // 2, generator=drawn) / 100
        halves.copy_(scales.half().view(torch.uint8))
    arrays = torch.rand(num_scales, generator=drawn), torch.randn(num_bias, generator=drawn)
    return running.PackedWeight.of_arrays(shape, running.PackedArrays(codes, *arrays), bits)


def digests() -> Iterator[str]:
    """Yield the number of bits of each format, and a digest of a product's results."""
    drawn = torch.Generator().manual_seed(0)
    for bits in tiles.FORMATS:
        held, x = weight(bits, drawn), torch.randn(64, 1536, generator=drawn)
        found = running.multiply(x, held)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 22, 31):
            assert torch.equal(running.multiply(x[-rows:].clone(), held), found[-rows:]), (bits, rows)
        yield f"{bits} {hashlib.sha256(found.numpy().tobytes()).hexdigest()}"


if __name__ == "__main__":
    emulate()
    for digest in digests():
        print(digest)
