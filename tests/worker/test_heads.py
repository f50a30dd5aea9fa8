"""A sequence whose heads have windows of their own: chunks, trees and moves against one dense mask."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch

from specsot.core.frames import Opening
from specsot.members import Layout
from specsot.params import MAX_TOKENS, HeadWindows
from tests.worker.writers import PAGE, TEXT, Writer, feed, rows_of, whole

HEADS = HeadWindows((((0, 1), (4, MAX_TOKENS)), ((4, 8), (20, 40))))


def dense(decoder, heads: HeadWindows) -> torch.Tensor:
    """Hidden rows [text, H] of the whole text at once."""
    from specsot_model.attention import AttentionPlan

    count = len(TEXT)
    at = torch.arange(count)

    def attend(q: torch.Tensor, layer: torch.Tensor, windows: list[tuple[int, int]]) -> torch.Tensor:
        keys, values = layer.transpose(2, 3).flatten(1, 2)[:, :count]  # [rows, heads, dim]
        near = [(at[None] < sinks) | (at[None] >= at[:, None] - recent) for sinks, recent in windows]
        seen = torch.stack(near) & (at[None] <= at[:, None])
        scores = torch.einsum("rhgd,chd->hgrc", q, keys).masked_fill(~seen[:, None], -math.inf)
        return torch.einsum("hgrc,chd->rhgd", scores.softmax(-1), values).flatten(1)

    kernels = [partial(attend, windows=list(windows)) for windows in heads.layers]
    plans = [AttentionPlan((), (), None, None, kernel) for kernel in kernels]
    return whole(decoder, plans)


@pytest.mark.parametrize("layout", ["packed", "batched"])
def test_heads_see_what_one_dense_mask_shows_them(decoder, layout: Layout):
    """Beside a sequence that sees all. A hidden key has weight 0, whatever else a head sees."""
    from specsot_worker.stage import DecoderStage

    all_of_it = HeadWindows((((0, MAX_TOKENS),) * 2,) * 2)
    stage, policies = DecoderStage(decoder, 40, PAGE, layout), (HEADS, None)
    writers = [Writer(sequence, random.Random(sequence)) for sequence in (1, 2)]
    openings = tuple(Opening(writer.sequence, 60, heads=heads) for writer, heads in zip(writers, policies))
    feed(writers, stage, 60, openings)
    full = dense(decoder, all_of_it)
    torch.testing.assert_close(rows_of(writers[0]), dense(decoder, HEADS), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows_of(writers[1]), full, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(rows_of(writers[0]), full, atol=1e-2)
