"""Law 1 through Transformers' modules: branches and drafts over two stages write what Transformers write."""

from pathlib import Path

import pytest

from specsot.params import Sampling
from tests.laws.drafters import hostile, knowing
from tests.laws.plain import Excuses, write_plainly
from tests.laws.ring import Setup, ring_of
from tests.laws.test_drafters import prompts_of
from tests.model.other_families import MIXED, write_other

pytestmark = pytest.mark.torch

LIMIT, SHARED = 10, 20  # tokens written; tokens of the forked prefix, behind the end of a page


async def test_law_1_a_family_through_transformers_equals_plain_decoding(tmp_path: Path) -> None:
    """With windows, and KV heads of several numbers; trees that are often right, then hostile ones."""
    kinds = [*MIXED, MIXED[1]]
    write_other(tmp_path, "mimo_v2_flash", vocab_size=200, num_hidden_layers=4, layer_types=kinds)
    prompts, excuses = prompts_of(3, SHARED), Excuses()
    wanted = [write_plainly(tmp_path, tuple(one), LIMIT, Sampling(), 7, n) for n, one in enumerate(prompts)]
    texts = [[*prompt, *plain.tokens] for prompt, plain in zip(prompts, wanted)]
    for drafter in (knowing(tmp_path, texts), hostile(tmp_path, texts, 100)):
        async with ring_of(Setup(tmp_path, None, 2, drafter=drafter, draft_timeout=0.1)) as ring:
            written = await ring.write_all(prompts, LIMIT, shared=SHARED)
            assert not ring.broken
            assert ring.drafts
        for text, plain in zip(written, wanted):
            excuses.compare(text, plain)
    excuses.settle()
