"""What values are made of: numbers, texts, trees, tensors."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from specsot.core.tree import Tree

small = st.integers(0, 2**32 - 1)
big = st.integers(0, 2**64 - 1)
tokens = st.lists(small, max_size=6).map(tuple)
seconds = st.floats(0, 1e6, allow_nan=False)
times = st.lists(seconds, max_size=4).map(tuple)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.from_regex(r"[a-z0-9:._/-]{1,20}", fullmatch=True)
traces = st.none() | st.from_regex(r"00-[1-9a-f]{32}-[1-9a-f]{16}-0[01]", fullmatch=True)
rising = st.sets(st.integers(0, 4000), max_size=6).map(lambda s: tuple(sorted(s)))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    count = draw(st.integers(1, 8))
    parents = [draw(st.integers(0, max(node - 1, 0))) for node in range(count)]
    return Tree(tuple(draw(small) for _ in range(count)), tuple(parents))


@st.composite
def tensors(draw: st.DrawFn, rows: int | None = None) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    shape = (draw(st.integers(0, 4)) if rows is None else rows, draw(st.integers(0, 5)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randn(shape, generator=generator).to(dtype)
