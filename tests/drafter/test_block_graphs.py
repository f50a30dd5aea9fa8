"""Blocks that one graph drafts are those that are drafted without."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from specsot.core.frames import FeatureBatch, Features
from specsot.members import TreeShape
from specsot_drafter.block_graphs import captured_blocks
from specsot_drafter.core.selection import Candidates
from specsot_drafter.core.sequences import DraftSequences
from specsot_drafter.heads.dflash import BlockHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.proposers.block import BlockProposer
from specsot_model.cuda_graphs import GraphCapture
from tests.conftest import some
from tests.drafter.ring import opening
from tests.drafter.test_descent import later
from tests.models import Shape, write_base, write_dflash

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
    proposer = BlockProposer(head, SHAPE, 8, PAGE, capture if graphs else None)
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
