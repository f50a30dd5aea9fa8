"""A sequence whose keys are pruned by their norm: chunks, trees, moves, pages against one dense mask."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch

from specsot.core.frames import Opening
from specsot.core.pages import max_held_pages
from specsot.errors import NotFound
from specsot.members import Layout
from specsot.params import HeadImportance, Pruning
from tests.worker.writers import PAGE, TEXT, Writer, feed, rows_of, whole, write

# Heads that keep half of the rows, three quarters of them, and all.
IMPORTANCE = HeadImportance(((0.0, 1.0), (0.5, 0.0)))


def ratio_of(pruning: Pruning, importance: HeadImportance | None, layer: int, head: int) -> float:
    """The share of its rows that a head keeps."""
    return pruning.keep_ratio * (0.5 + 0.5 * importance.layers[layer][head] if importance else 1)


def dense(decoder, pruning: Pruning, importance: HeadImportance | None = None) -> torch.Tensor:
    """Hidden rows [text, H] of the whole text at once, each head's rows behind a mask of its own."""
    from specsot_model.attention import AttentionPlan

    count, every = len(TEXT), pruning.prune_every
    at = torch.arange(count)
    causal = at[None] <= at[:, None]

    def seen_by(norms: list[float], ratio: float) -> torch.Tensor:
        """What one head's rows see: by their block what was left of those before it, and the block."""
        seen, left = causal.clone(), list[int]()
        for start in range(every, count, every):
            order = sorted((*left, *range(start - every, start)), key=lambda row: (norms[row], -row))
            left = order[: math.ceil(ratio * len(order))]
            seen[start:, :start] = False
            seen[start:, left] = True
        return seen

    def attend(q: torch.Tensor, layer: torch.Tensor, number: int) -> torch.Tensor:
        keys, values = layer.transpose(2, 3).flatten(1, 2)[:, :count]  # [rows, heads, dim]
        heads = [
            causal
            if number < pruning.skip_layers
            else seen_by(one, ratio_of(pruning, importance, number, head))
            for head, one in enumerate(keys.norm(dim=-1).bfloat16().T.tolist())
        ]
        scores = torch.einsum("rhgd,chd->hgrc", q, keys).masked_fill(~torch.stack(heads)[:, None], -math.inf)
        return torch.einsum("hgrc,chd->rhgd", scores.softmax(-1), values).flatten(1)

    kernels = [partial(attend, number=layer) for layer in range(2)]
    plans = [AttentionPlan((), (), None, None, kernel) for kernel in kernels]
    return whole(decoder, plans)


CASES: list[tuple[tuple[Pruning, Pruning], Layout]] = [
    ((Pruning(0.5, 24, 0), Pruning(1, 16, 2)), "packed"),
    ((Pruning(0.8, 40, 1), Pruning(0.9, 16, 0)), "batched"),
]


def writer_of(sequence: int, pruning: Pruning) -> Writer:
    return Writer(sequence, random.Random(sequence), every=pruning.prune_every)


@pytest.mark.parametrize(("policies", "layout"), CASES, ids=["packed", "batched"])
def test_pruning_gives_what_one_dense_mask_gives(decoder, policies: tuple[Pruning, Pruning], layout: Layout):
    from specsot_worker.stage import DecoderStage

    stage = DecoderStage(decoder, 60, PAGE, layout)
    writers = [writer_of(number, policy) for number, policy in enumerate(policies, 1)]
    openings = tuple(
        Opening(writer.sequence, 60, pruning=policy) for writer, policy in zip(writers, policies)
    )
    feed(writers, stage, 60, openings)
    for writer, policy in zip(writers, policies):
        torch.testing.assert_close(rows_of(writer), dense(decoder, policy), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(rows_of(writers[0]), rows_of(writers[1]), atol=1e-2)


@pytest.mark.parametrize(("policies", "layout"), CASES, ids=["packed", "batched"])
def test_pruning_by_importance_gives_what_one_dense_mask_gives(
    decoder, policies: tuple[Pruning, Pruning], layout: Layout
) -> None:
    """Each head keeps keep_ratio * (0.5 + 0.5 * importance) of its rows."""
    from specsot_worker.stage import DecoderStage

    stage = DecoderStage(decoder, 60, PAGE, layout)
    writers = [writer_of(number, policy) for number, policy in enumerate(policies, 1)]
    openings = tuple(
        Opening(writer.sequence, 60, pruning=policy, importance=IMPORTANCE)
        for writer, policy in zip(writers, policies)
    )
    feed(writers, stage, 60, openings)
    for writer, policy in zip(writers, policies):
        found = rows_of(writer)
        torch.testing.assert_close(found, dense(decoder, policy, IMPORTANCE), atol=1e-4, rtol=1e-4)
        if policy.skip_layers < 2:
            assert not torch.allclose(found, dense(decoder, policy), atol=1e-2)


def test_pages_after_the_rows_of_the_head_that_keeps_most_are_freed(decoder) -> None:
    from specsot_worker.stage import DecoderStage

    pruning, importance = Pruning(1.0, 32, 0), HeadImportance(((0.0, 0.2), (0.1, 0.0)))
    stage, writer = DecoderStage(decoder, 16, PAGE), writer_of(1, pruning)
    write([writer], stage, 20, 1, (Opening(1, 20, pruning=pruning, importance=importance),))
    held = []
    while writer.fed < len(TEXT):
        write([writer], stage, 20, writer.draft_round + 30)
        held.append(stage.table.count - stage.table.free)
    assert max(held) < len(TEXT) // PAGE
    torch.testing.assert_close(rows_of(writer), dense(decoder, pruning, importance), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("skip", [0, 1])
def test_what_no_layer_keeps_is_given_back(decoder, skip: int):
    from specsot_worker.stage import DecoderStage

    pruning = Pruning(0.5, 32, skip)
    stage, writer = DecoderStage(decoder, 16, PAGE), writer_of(1, pruning)
    write([writer], stage, 20, 1, (Opening(1, 20, pruning=pruning),))
    held = []
    while writer.fed < len(TEXT):
        write([writer], stage, 20, writer.draft_round + 30)
        held.append(stage.table.count - stage.table.free)
    most = max_held_pages(pruning, 32, PAGE)
    assert (most is None) == bool(skip)
    assert max(held) >= len(TEXT) // PAGE if most is None else 5 <= max(held) <= most < len(TEXT) // PAGE


def test_what_is_pruned_is_not_forked(decoder):
    from specsot_worker.stage import DecoderStage

    stage, pruning = DecoderStage(decoder, 16, PAGE), Pruning(0.5, 32, 0)
    writer = writer_of(1, pruning)
    write([writer], stage, 20, 1, (Opening(1, 20, pruning=pruning),))
    with pytest.raises(NotFound, match="sequence 1 cannot be forked: its heads keep different rows"):
        stage.table.fork(2, 1, 4)
