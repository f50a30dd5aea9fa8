"""Law 7, in the ring: heads of every family draft over stages as they do in one piece, and change nothing."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from specsot.members import TreeShape  # noqa: E402
from specsot.params import Sampling  # noqa: E402
from tests.laws.plain import Excuses, write_plainly  # noqa: E402
from tests.laws.ring import Setup, ring_of  # noqa: E402
from tests.vectors.making import HERE, SETTINGS, SMALL  # noqa: E402

pytestmark = pytest.mark.torch

SHAPE = TreeShape(SETTINGS["A"].depth, SETTINGS["A"].top_k, SETTINGS["A"].total_token, fixed=True)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("stages", "links"), [(1, "local"), (3, "local"), (2, "grpc")])
async def test_law_7_recorded_lengths_over_stages(name, stages, links):
    """What is accepted in every round is what plain torch recorded, wherever the taps are cut."""
    prompts = json.loads((HERE / name / "vectors.json").read_text())["prompts"]
    limit = max(len(prompt["runs"]["A"]["generated_ids"]) for prompt in prompts) + 10
    setup = Setup(HERE / name / "base", HERE / name / "head", stages, "batched", SHAPE, links=links)
    excuses = Excuses()
    async with ring_of(setup) as ring:
        texts = await ring.write_all([prompt["prompt_ids"] for prompt in prompts], limit)
        assert not ring.broken
        for n, (text, prompt) in enumerate(zip(ring.texts.values(), prompts)):
            wanted = [accepted + 1 for accepted in prompt["runs"]["A"]["accept_lengths"]]
            assert text.steps[1 : len(wanted) + 1] == wanted
            plain = write_plainly(setup.base, tuple(prompt["prompt_ids"]), limit, Sampling(), 7, n)
            excuses.compare(texts[n], plain)
        excuses.settle()
