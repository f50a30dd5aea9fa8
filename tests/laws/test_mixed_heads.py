"""Law 1 with layers of different heads, with layers that read token ids and other layers' keys, and with
latent attention: branches and drafts over two stages write
what Transformers write."""

from pathlib import Path
from typing import Any

import pytest

from specsot.params import Sampling
from tests.laws.drafters import hostile, knowing
from tests.laws.plain import Excuses, write_plainly
from tests.laws.ring import Setup, ring_of
from tests.laws.test_drafters import prompts_of
from tests.model.tiny import write_model

pytestmark = pytest.mark.torch

KINDS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text of readers": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
        "hidden_size_per_layer_input": 10,
        "vocab_size_per_layer_input": 200,
        "num_kv_shared_layers": 2,
        "enable_moe_block": False,
    },
    "deepseek_v3": {},
}
LIMIT, SHARED = 10, 70  # tokens written; tokens of the forked prefix, past the window and within a page


@pytest.mark.parametrize("kind", KINDS)
async def test_law_1_a_sequence_in_pages_of_other_rows_equals_plain_decoding(
    kind: str, tmp_path: Path
) -> None:
    """Trees of a drafter that is often right, then of a hostile one; three branches of a prefix."""
    write_model(tmp_path, kind.split()[0], **{"vocab_size": 200, "num_hidden_layers": 4, **KINDS[kind]})
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
