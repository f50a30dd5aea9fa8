"""Law 1 behind windows: what is written does not depend on drafters, stages and how rows lie."""

import pytest

pytest.importorskip("torch")

from specsot.members import TreeShape
from specsot.params import Window
from tests.laws.drafters import KnowingDrafter
from tests.laws.ring import Setup, ring_of
from tests.laws.test_identity import WARM, prompts_of
from tests.models import Shape, write_base, write_head

pytestmark = pytest.mark.torch

WINDOW, LIMIT = Window(4, 24), 60


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return write_base(folder / "base", Shape()), write_head(folder / "head", Shape())


async def write(setup, prompts, **more):
    async with ring_of(setup) as ring:
        texts = await ring.write_all(prompts, LIMIT, WARM, **more)
        assert not ring.broken
        steps = [step for text in ring.texts.values() for step in text.steps]
    return texts, sum(steps) / len(steps)


async def test_law_1_behind_a_window(models):
    base, head = models
    prompts = prompts_of(4)
    plain, _ = await write(Setup(base), prompts, window=WINDOW)
    unlimited, _ = await write(Setup(base), prompts)
    assert plain != unlimited, "the window must matter"
    known = [[*prompt, *text] for prompt, text in zip(prompts, plain)]

    def continuation(text):
        return next((one[len(text) :] for one in known if one[: len(text)] == text), [])

    def drafter(name, address, dialer, compute):
        return KnowingDrafter(base, name, address, dialer, continuation, skill=0.85, seed=5)

    shape = TreeShape(6, 2, 14, fixed=True)
    drafted, gain = await write(
        Setup(base, None, 2, "batched", shape, drafter=drafter), prompts, window=WINDOW
    )
    assert drafted == plain
    assert gain > 2, "deep paths must really have been accepted"
    headed, _ = await write(Setup(base, head, 3, "packed", shape), prompts, window=WINDOW)
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
