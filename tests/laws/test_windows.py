"""Law 1 behind windows: what is written does not depend on drafters, stages and how rows lie."""

import pytest

from specsot.members import TreeShape
from specsot.params import Window
from tests.laws.drafters import knowing
from tests.laws.ring import Setup, ring_of, write
from tests.laws.test_identity import WARM, prompts_of

pytestmark = pytest.mark.torch

WINDOW, LIMIT = Window(4, 24), 60


@pytest.mark.full
async def test_law_1_behind_a_window(models):
    base, head = models
    prompts = prompts_of(4)
    plain, _ = await write(Setup(base), prompts, LIMIT, WARM, window=WINDOW)
    unlimited, _ = await write(Setup(base), prompts, LIMIT, WARM)
    assert plain != unlimited, "the window must matter"
    drafter = knowing(base, [[*prompt, *text] for prompt, text in zip(prompts, plain)])
    shape = TreeShape(6, 2, 14, fixed=True)
    setup = Setup(base, None, 2, "batched", shape, drafter=drafter)
    drafted, gain = await write(setup, prompts, LIMIT, WARM, window=WINDOW)
    assert drafted == plain
    assert gain > 2, "deep paths must really have been accepted"
    headed, _ = await write(Setup(base, head, 3, "packed", shape), prompts, LIMIT, WARM, window=WINDOW)
    assert headed == plain


async def test_law_1_behind_a_window_after_a_repair(models):
    """What was written comes again as a prompt; its sinks are still those of what was asked."""
    base, _ = models
    prompt = prompts_of(1)[0][:3]  # fewer than the window's sinks
    async with ring_of(Setup(base)) as ring:
        more = {"limit": LIMIT, "sampling": WARM, "seed": 7, "window": WINDOW}
        whole = await ring.written(await ring.open(prompt, **more))
        again = await ring.open([*prompt, *whole[:40]], generated=40, **more)
        assert await ring.written(again) == whole[40:]
