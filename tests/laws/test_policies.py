"""Law 1 under policies after a repair: what was written comes again as a prompt (else: `test_pairs.py`)."""

import pytest

from specsot.params import Pruning, Window
from tests.conftest import some
from tests.laws.ring import Setup, ring_of
from tests.laws.test_identity import WARM, prompts_of

pytestmark = pytest.mark.torch

LIMIT = 40
POLICIES = {
    "window": {"window": Window(4, 24)},
    "pruning": {"pruning": Pruning(0.5, 16, 1)},
    "given back": {"pruning": Pruning(0.6, 20, 0)},
}


# Each policy after a prompt of one length; after the other one by `make test-all`.
CASES = [(policy, asked) for asked in (3, None) for policy in POLICIES]


@pytest.mark.parametrize(("policy", "asked"), some(CASES, 0, 2, 4))
async def test_law_1_under_policies_after_a_repair(models, policy, asked):
    """Pruned where it was, as prompt chunks end there, too; with the sinks of what was asked, which may be
    fewer than a window's. The second time a head drafts, over three stages."""
    base, head = models
    prompt, more = prompts_of(1)[0][:asked], {"limit": LIMIT, "sampling": WARM, "seed": 7} | POLICIES[policy]
    async with ring_of(Setup(base)) as ring:
        whole = await ring.written(await ring.open(prompt, **more))
    async with ring_of(Setup(base, head, 3, "packed")) as ring:
        again = await ring.open([*prompt, *whole[:30]], generated=30, **more)
        assert await ring.written(again) == whole[30:]
        assert not ring.broken
        assert ring.drafts
