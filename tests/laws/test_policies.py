"""Law 1 where keys are pruned, and where heads have windows of their own: drafters, stages, a repair."""

import pytest

from specsot.members import TreeShape
from specsot.params import MAX_TOKENS, HeadWindows, Pruning
from tests.laws.drafters import knowing
from tests.laws.ring import Setup, ring_of, write
from tests.laws.test_identity import WARM, prompts_of
from tests.models import SHALLOW

pytestmark = pytest.mark.torch

LIMIT = 40
HEADS = HeadWindows(tuple(((0, 1 + layer), (4, MAX_TOKENS)) for layer in range(SHALLOW.layers)))
PRUNED, GIVEN_BACK = {"pruning": Pruning(0.5, 16, 1)}, {"pruning": Pruning(0.6, 20, 0)}


@pytest.mark.full
@pytest.mark.parametrize("policy", [PRUNED, {"heads": HEADS}], ids=["pruning", "heads"])
async def test_law_1_under_policies(models, policy):
    base, _ = models
    prompts = prompts_of(1)
    plain, _ = await write(Setup(base), prompts, LIMIT, WARM, **policy)
    drafter = knowing(base, [[*prompt, *text] for prompt, text in zip(prompts, plain)], skill=0.9)
    shape = TreeShape(6, 2, 14, fixed=True)
    setup = Setup(base, None, 2, "batched", shape, drafter=drafter)
    drafted, gain = await write(setup, prompts, LIMIT, WARM, **policy)
    assert drafted == plain
    assert gain > 2, "deep paths must really have been accepted"


@pytest.mark.parametrize("policy", [PRUNED, GIVEN_BACK], ids=["pruning", "given back"])
async def test_law_1_under_policies_after_a_repair(models, policy):
    """What was written comes again as a prompt, pruned where it was: prompt chunks end there, too. The second
    time a head drafts, over three stages."""
    base, head = models
    prompt, more = prompts_of(1)[0], {"limit": LIMIT, "sampling": WARM, "seed": 7} | policy
    async with ring_of(Setup(base)) as ring:
        whole = await ring.written(await ring.open(prompt, **more))
    async with ring_of(Setup(base, head, 3, "packed")) as ring:
        again = await ring.open([*prompt, *whole[:30]], generated=30, **more)
        assert await ring.written(again) == whole[30:]
        assert not ring.broken
        assert ring.drafts
