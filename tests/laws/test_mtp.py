"""Law 1 with MTP layers: what is written is what plain decoding writes, over stages, trees and branches."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsot.params import Sampling
from tests.conftest import some
from tests.drafter.mtp import KINDS, LAYERS, split_pair, write_pair
from tests.laws.plain import check_texts
from tests.laws.ring import SMALL, Setup, ring_of

pytestmark = pytest.mark.torch

PROMPTS = [[7, 99, 3, 50, 21], [7, 99, 3, 50, 64, 8], list(range(30, 52))]
LIMIT = 16


# Each kind over one number of stages; over the other one by `make test-all`.
WHOLE = [(kind, stages) for n, kind in enumerate(KINDS) for stages in ([LAYERS, 1] if n % 2 else [1, LAYERS])]


@pytest.mark.parametrize(("kind", "stages"), some(WHOLE, *range(0, len(WHOLE), 2)))
async def test_law_1_texts_are_those_of_plain_decoding(kind: str, stages: int, tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "base", kind)
    async with ring_of(Setup(pair.directory, pair.directory, stages, "batched", SMALL, method="mtp")) as ring:
        texts = await ring.write_all(PROMPTS, LIMIT)
        assert not ring.broken
        assert ring.drafts
        (drafter,) = (member for member in ring.fleet.members() if member.kind == "drafter")
        assert drafter.head == "the MTP layer of base"
    check_texts(pair.directory, PROMPTS, texts, LIMIT, Sampling())


@pytest.mark.parametrize("kind", some(KINDS, 0, 2))
async def test_law_1_branches_of_one_prefix_with_a_layer_of_its_own_file(kind: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "base", kind)
    layer = split_pair(pair, tmp_path / "layer")
    prompts = [[7, 99, 3, 50, 21, 64, own] for own in (8, 60, 41)]
    sampling = Sampling(temperature=0.8)
    async with ring_of(Setup(pair.directory, layer, 2, "packed", SMALL, method="mtp")) as ring:
        texts = await ring.write_all(prompts, LIMIT, sampling, shared=6)
        assert not ring.broken
        assert ring.drafts
    check_texts(pair.directory, prompts, texts, LIMIT, sampling)
