"""Tokens without features: their draft rows are skipped, and all later rows keep their true positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specsot.core.frames import Draft, FeatureBatch, Features
from specsot.core.tree import Tree, single
from specsot.members import TreeShape
from specsot.params import Window
from specsot_drafter.core.selection import Candidates, best_each, build_trees
from specsot_drafter.core.sequences import DraftSequences
from specsot_drafter.engine import DraftEngine
from specsot_drafter.growth import TreeGrowth, TreeRoom
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import propose_with
from specsot_model.attention import RowSpan, plan_attention
from tests.drafter.ring import drafts_of, opening
from tests.drafter.test_dflash import PUBLISHED, base, loaded
from tests.drafter.test_engine import SHAPE, Text, engine, open_with, text
from tests.models import Shape, write_base, write_head

__all__ = ["base", "engine", "text"]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    """In fp64, because the rows are computed in other batches than those they are compared with: in fp32, two
    nodes of these trees are so near each other that their order depends on the processor.
    """
    folder = tmp_path_factory.mktemp("models")
    base, drafter = write_base(folder / "base", Shape(layers=7, positions=128)), write_head(folder / "head")
    return load_head(drafter, base, torch.float64, "cpu")


def lost(features: Features) -> Features:
    """The same batches without features."""
    return replace(features, rows=None, fed=0)


def expected(head: DraftHead, text: Text, rows: Sequence[int], committed: int) -> Tree:
    """Computed from scratch: the head over these rows alone, at their positions, then one growth."""
    with torch.inference_mode():
        kv = head.make_kv(1, 128)
        positions = torch.tensor(rows)
        tokens = torch.tensor(text.tokens)[positions + 1]
        num_rows = len(rows)
        span = RowSpan(num_rows, 0, num_rows, (0,))
        plan = plan_attention([span], 128, head.group, "packed", head.dtype, head.device)
        inputs = HeadRows(positions, torch.arange(num_rows), plan, kv)
        outputs = head.forward(tokens, text.rows[positions], inputs)
        room = TreeRoom(num_rows, (0,), range(num_rows, 128), committed)
        offer = TreeGrowth(head, kv, [room], SHAPE.top_k).run(outputs[-1:], SHAPE.depth + 1)
        return build_trees(offer, [text.tokens[committed]], best_each(offer.scores, SHAPE.nodes - 1))[0]


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 17), (5, 6), (10, 30), (16, 32), (10, 39)])
def test_a_tree_grows_from_the_rows_that_have_features(
    head: DraftHead, text: Text, engine: DraftEngine, start: int, stop: int, computed: bool
) -> None:
    """Also in later rounds: what was grown leaves no trace."""
    open_with(engine, opening(1, 10))
    if start:
        engine.observe(text.feature_batch(1, 0, start, 1 if computed else None, final=computed))
        drafts_of(engine)
    engine.observe(lost(text.feature_batch(1, start, stop)))
    kept = [*range(start), *range(stop, 40)]
    engine.observe(text.feature_batch(1, stop, 40, 2, final=True))
    assert drafts_of(engine) == (Draft(1, 2, expected(head, text, kept, 40)),)
    engine.observe(text.feature_batch(1, 40, 43, 3, final=True))
    assert drafts_of(engine) == (Draft(1, 3, expected(head, text, [*kept, 40, 41, 42], 43)),)


def test_rows_are_skipped_several_times(head: DraftHead, text: Text, engine: DraftEngine) -> None:
    free = engine.free_pages
    open_with(engine, opening(1, 10))
    for start in (0, 10, 20, 30):
        engine.observe(lost(text.feature_batch(1, start, start + 7)))
        engine.observe(text.feature_batch(1, start + 7, start + 10, 1, final=True))
    kept = [start + row for start in (0, 10, 20, 30) for row in (7, 8, 9)]
    assert drafts_of(engine) == (Draft(1, 1, expected(head, text, kept, 40)),)
    assert free - engine.free_pages <= 3, "skipped rows take no pages"
    engine.observe(Features(1, 0, closings=(1,)))
    assert engine.free_pages == free


def test_without_a_feature_after_the_gap_the_tree_is_its_root(
    head: DraftHead, text: Text, engine: DraftEngine
) -> None:
    open_with(engine, opening(1, 10), opening(2, 10))
    for sequence in (1, 2):
        engine.observe(text.feature_batch(sequence, 0, 10, 1, final=True))
    drafts_of(engine)
    gap = text.feature_batch(1, 10, 20, 2, final=True)
    engine.observe(lost(gap))
    engine.observe(text.feature_batch(2, 10, 20, 2, final=True))
    trees = {draft.sequence: draft.tree for draft in drafts_of(engine)}
    assert trees == {1: single(text.tokens[20]), 2: expected(head, text, range(20), 20)}
    engine.observe(text.feature_batch(1, 20, 21, 3, final=True))
    assert drafts_of(engine) == (Draft(1, 3, expected(head, text, [*range(10), 20], 21)),)


@pytest.mark.parametrize(
    ("length", "shared"),
    [
        # The fork is in the rows before the gap or in the gap: nothing can be shared.
        (5, []),
        (20, []),
        (30, []),
        # The row before the fork pairs with a token of the fork itself.
        (31, [*range(10), 30]),
        (40, [*range(10), *range(30, 40)]),
    ],
)
def test_a_fork_shares_the_rows_of_its_source_that_follow_each_other_up_to_it(
    head: DraftHead, text: Text, engine: DraftEngine, length: int, shared: list[int]
) -> None:
    free = engine.free_pages
    open_with(engine, opening(1, 40, decodes=False))
    engine.observe(text.feature_batch(1, 0, 10))
    engine.observe(lost(text.feature_batch(1, 10, 30)))
    engine.observe(text.feature_batch(1, 30, 40))
    open_with(engine, opening(2, 45, fork=(1, length)))
    engine.observe(text.feature_batch(2, length, 45, 1, final=True))
    assert drafts_of(engine) == (Draft(2, 1, expected(head, text, [*shared, *range(length, 45)], 45)),)
    engine.observe(Features(1, 0, closings=(1, 2)))
    assert engine.free_pages == free


def test_a_block_is_drafted_over_the_tokens_that_have_features(base: Path) -> None:
    """As if a window hid the others."""
    head = loaded(PUBLISHED, base)
    found = drafted_block(head, [(0, 2, True), (2, 24, False), (24, 40, True)])
    assert found == pytest.approx(drafted_block(head, [(0, 40, True)], Window(sinks=2, recent=16)), abs=1e-4)
    assert found != pytest.approx(drafted_block(head, [(0, 40, True)]), abs=1e-3)
    assert found != pytest.approx(drafted_block(head, [(0, 24, False), (24, 40, True)]), abs=1e-3)


def test_a_block_is_drafted_for_a_fork_of_a_source_that_lacks_features(base: Path) -> None:
    head = loaded(PUBLISHED, base)
    source = [(0, 2, True), (2, 6, False)]
    alone = drafted_block(head, [(0, 6, False), (6, 9, True)])
    assert drafted_block(head, [(6, 9, True)], source=source, fork=6) != pytest.approx(alone, abs=1e-3)
    assert drafted_block(head, [(4, 6, False), (6, 9, True)], source=source, fork=4) == alone


def drafted_block(
    head: DraftHead,
    parts: Sequence[tuple[int, int, bool]],
    window: Window | None = None,
    source: Sequence[tuple[int, int, bool]] = (),
    fork: int | None = None,
) -> list[float]:
    """Log-probabilities of a block after all these tokens.

    parts: Positions (start, stop) of tokens, and whether they have features.
    source: The same of the sequence from which this one forks.
    """
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 24, (41,), generator=draw).tolist()
    fused = torch.randn(40, head.width, generator=draw)
    sequences = DraftSequences(None)
    proposer = propose_with(head, TreeShape(1, 24, 24 * 25), pages=40, page_rows=2)
    free = proposer.free_pages

    def observe(sequence: int, start: int, stop: int, present: bool) -> None:
        batch = FeatureBatch(sequence, start, tuple(tokens[start:stop]), tokens[stop], None)
        sequences.observe([batch])
        rows = fused[start:stop] if present else None
        proposer.observe(Features(1, 0, feature_batches=(batch,), rows=rows))

    if fork is not None:
        proposer.open(sequences.open(opening(1, 40)))
        for part in source:
            observe(1, *part)
    own = opening(2, 40, fork=None if fork is None else (1, fork), window=window)
    proposer.open(sequences.open(own))
    for part in parts:
        observe(2, *part)
    found = sequences.find(2)
    assert found is not None
    offer: Candidates | None = proposer.propose([found], 2)
    assert offer is not None
    proposer.close(1)
    proposer.close(2)
    assert proposer.free_pages == free
    return offer.scores[0].tolist()
