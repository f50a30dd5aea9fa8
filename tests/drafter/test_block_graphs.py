"""Blocks that one graph drafts are those that are drafted without."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from specsot.core.frames import FeatureBatch, Features
from specsot.members import TreeShape
from specsot_drafter.block_graphs import captured_blocks
from specsot_drafter.core.selection import Candidates, best_each
from specsot_drafter.core.sequences import DraftSequences
from specsot_drafter.heads.dflash import BlockHead
from specsot_drafter.heads.dspark import DSparkHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.proposers.block import BlockProposer, MarkovProposer
from specsot_model.cuda_graphs import GraphCapture
from tests.conftest import some
from tests.drafter.ring import opening
from tests.drafter.test_descent import later
from tests.models import Shape, write_base, write_dflash, write_dspark

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KIND = torch.float16  # what no library packs on a CPU
LENGTHS, SHAPE, PAGE = (19, 7, 12), TreeShape(4, 2, 12), 16


@torch.inference_mode()
def drafts(head: BlockHead, graphs: bool) -> list[Candidates]:
    """Of all texts together, of which each then goes on by 3 tokens; drawn alike whatever drafts."""
    seeded, texts = torch.Generator().manual_seed(3), DraftSequences(None)
    capture = GraphCapture() if DEVICE == "cuda" else later
    proposer = (
        MarkovProposer(head, SHAPE, 8, PAGE, capture if graphs else None)
        if isinstance(head, DSparkHead)
        else BlockProposer(head, SHAPE, 8, PAGE, capture if graphs else None)
    )
    found, written = list[Candidates](), torch.randint(90, (len(LENGTHS), 64), generator=seeded).tolist()
    for number, length in enumerate(LENGTHS):
        proposer.open(texts.open(opening(number, length, limit=60)))
    for more in (0, 3):
        for number, length in enumerate(LENGTHS):
            start, stop = length * (more > 0), length + more
            feature_batch = FeatureBatch(
                number, start, tuple(written[number][start:stop]), written[number][stop], 1
            )
            texts.observe([feature_batch])
            rows = torch.randn(stop - start, head.width, generator=seeded)
            proposer.observe(Features(1, 0, feature_batches=(feature_batch,), rows=rows))
        offer = proposer.propose([text for n in range(3) if (text := texts.find(n))], SHAPE.depth + 1)
        assert offer is not None
        found.append(offer)
    return found


@pytest.mark.parametrize("causal", some([False, True], 1))
def test_a_graph_drafts_what_is_drafted_without(tmp_path: Path, causal: bool) -> None:
    base = write_base(tmp_path / "base", Shape(positions=64))
    head = load_head(write_dflash(tmp_path / "head", base, causal), base, KIND, DEVICE)
    assert isinstance(head, BlockHead)
    assert (captured_blocks(head) is head) == (DEVICE == "cuda")
    for plain, captured in zip(drafts(head, False), drafts(head, True), strict=True):
        assert captured.tokens.tolist() == plain.tokens.tolist()
        assert captured.parents.tolist() == plain.parents.tolist()
        assert captured.scores == pytest.approx(plain.scores, abs=0.1)


@pytest.mark.parametrize("kind", some(["vanilla", "gated", "rnn"], 2))
def test_a_graph_grows_the_trees_that_grow_without(tmp_path: Path, kind: str) -> None:
    """It has more candidates, of which none is likelier than those of the tree."""
    base = write_base(tmp_path / "base", Shape(positions=64))
    head = load_head(write_dspark(tmp_path / "head", base, kind), base, KIND, DEVICE)
    assert isinstance(head, DSparkHead)
    assert (captured_blocks(head) is head) == (DEVICE == "cuda")
    for plain, captured in zip(drafts(head, False), drafts(head, True), strict=True):
        for found, wanted in zip(best_paths(captured), best_paths(plain), strict=True):
            assert sorted(found.values()) == pytest.approx(sorted(wanted.values()), abs=0.1)
            both = found.keys() & wanted.keys()
            assert len(both) > 0.8 * len(wanted), "but for near ties"
            assert all(found[path] == pytest.approx(wanted[path], abs=0.1) for path in both)


def best_paths(candidates: Candidates) -> list[dict[tuple[int, ...], float]]:
    """Of every tree, the scores of the paths that the selection takes, as many as a tree has nodes."""
    found = []
    taken = best_each(candidates.scores, SHAPE.nodes - 1)
    for tree in range(len(candidates)):
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(candidates.tokens[tree].tolist(), candidates.parents[tree].tolist()):
            paths.append((*paths[parent], token))
        scores = candidates.scores[tree].tolist()
        found.append({paths[n + 1]: scores[n] for n in np.flatnonzero(taken[tree]).tolist()})
    return found
