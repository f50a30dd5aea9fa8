"""A sequence behind a window: chunks, trees, moves, trimmed pages against one dense mask over all of it."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
import torch

from specsot.core.frames import Fork, Opening
from specsot.members import Layout
from specsot.params import Window
from tests.conftest import some
from tests.worker.writers import PAGE, TEXT, Writer, feed, rows_of, whole, write

WINDOWS = [Window(4, 24), Window(0, 16), Window(20, 40)]


def dense(decoder, window: Window) -> torch.Tensor:
    """Hidden rows [text, H] of the whole text at once: a mask, and sinks met at min(p, sinks + recent)."""
    from specsot_model.attention import AttentionPlan

    config, count = decoder.config, len(TEXT)
    at = torch.arange(count)
    sink, near = at[None] < window.sinks, at[None] >= at[:, None] - window.recent
    seen = (sink | near) & (at[None] <= at[:, None])
    steps = (at - window.sinks - window.recent).clamp_min(0)
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = -steps[:, None] * config.rope.theta**-exponents

    def attend(q: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
        keys, values = layer.transpose(2, 3).flatten(1, 2)[:, :count]  # [rows, heads, dim]
        even, odd = q[..., 0::2], q[..., 1::2]
        cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        plain = torch.einsum("rhgd,chd->hgrc", q, keys)
        scores = torch.where(sink, torch.einsum("rhgd,chd->hgrc", turned, keys), plain)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("hgrc,chd->rhgd", weights, values).flatten(1)

    plan = AttentionPlan((), (), None, None, attend)
    return whole(decoder, plan)


@pytest.mark.parametrize(
    ("window", "layout"), some(product(WINDOWS, ("packed", "batched")), 0, 3, 5), ids=str
)
def test_windows_give_what_one_dense_mask_gives(decoder, window: Window, layout: Layout):
    from specsot_worker.stage import DecoderStage

    expected, stage = dense(decoder, window), DecoderStage(decoder, 40, PAGE, layout)
    writers = [Writer(sequence, random.Random(sequence)) for sequence in (1, 2)]
    openings = tuple(Opening(writer.sequence, 60, window=window) for writer in writers)
    feed(writers, stage, 60, openings)
    for writer in writers:
        torch.testing.assert_close(rows_of(writer), expected, atol=1e-4, rtol=1e-4)


def test_windows_hold_memory_flat(decoder):
    from specsot_worker.stage import DecoderStage

    window, stage = Window(4, 24), DecoderStage(decoder, 8, PAGE)
    (writer,) = writers = [Writer(1, random.Random(1))]
    write(writers, stage, 1, 1, (Opening(1, 1, window=window),))
    held = 0
    while writer.fed < len(TEXT):
        write(writers, stage, 1, writer.draft_round + 2)
        held = max(held, stage.table.count - stage.table.free)
    assert held == 1 + 3 + 1  # sinks; what is recent, wherever it begins in a page; a tree beyond


def test_a_fork_looks_through_the_window_of_its_source(decoder):
    from specsot_worker.stage import DecoderStage

    window, stage = Window(4, 24), DecoderStage(decoder, 40, PAGE)
    source, fork = Writer(1, random.Random(1)), Writer(2, random.Random(2))
    write([source], stage, 100, 1, (Opening(1, 100, decodes=False, window=window),))
    for number in range(2, 50):
        if source.fed == 100:
            break
        write([source], stage, 100, number)
    fork.fed = 100
    write([fork], stage, 130, 50, (Opening(2, 130, Fork(1, 100), window=window),))
    feed([fork], stage, 130, first=51)
    torch.testing.assert_close(rows_of(fork, 100), dense(decoder, window)[100:], atol=1e-4, rtol=1e-4)
