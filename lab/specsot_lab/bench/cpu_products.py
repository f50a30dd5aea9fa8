"""Products in few bits on a CPU, by rows: `python -m specsot_lab.bench.cpu_products [THREADS]`.

Scales and their rounding included, weights out of cache. fp32 is PyTorch's packed product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specsot.model.linear import Linear
from specsot_app.bench.core.tables import pipes
from specsot_lab.bench.clock import each_of

ROWS = (1, 4, 8, 16, 64)
KINDS = (None, "int8", "int4")
# Outputs and inputs of a layer's products, and how many layers: SmolLM2's, and two like a 7B model's.
MODELS = {
    "SmolLM2's 30 layers and head": [((960, 576), 30), ((576, 576), 30), ((3072, 576), 30), ((576, 1536), 30),
                                     ((49152, 576), 1)],
    "4096 x 4096, 4 times": [((4096, 4096), 4)],
    "4096 x 11008, twice": [((4096, 11008), 2)],
}  # fmt: skip


def products(shapes: Sequence[tuple[tuple[int, int], int]], kind: str | None) -> list[tuple[Linear, int]]:
    """And how many inputs each has."""
    sizes = [shape for shape, count in shapes for _ in range(count)]
    return [(Linear(torch.randn(shape), None, kind), shape[1]) for shape in sizes]  # type: ignore[arg-type]


@torch.inference_mode()
def lap(held: Sequence[tuple[Linear, int]], rows: int) -> Callable[[], None]:
    """All of them once."""
    inputs: dict[int, Tensor] = {size: torch.randn(rows, size) for _, size in held}

    def run() -> None:
        for product, size in held:
            product(inputs[size])

    return run


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    found: list[list[str]] = []
    for name, shapes in MODELS.items():
        for kind in KINDS:
            held = products(shapes, kind)
            told = (f"{min(each_of(lap(held, rows), 7)) * 1e3:.2f}" for rows in ROWS)
            found.append([name, kind or "fp32", *told])
    heads = [f"ms, least of 7, {torch.get_num_threads()} threads; rows", "", *map(str, ROWS)]
    sys.stdout.write(f"{pipes(heads, found, 2)}\n")


if __name__ == "__main__":
    main()
