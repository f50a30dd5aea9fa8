"""Law 7, in the ring: heads of every family draft over stages as they do in one piece, and change nothing."""

from __future__ import annotations

import json

import pytest

from specsot.members import TreeShape
from specsot.params import Sampling
from tests.conftest import some
from tests.laws.plain import Excuses, check_texts, write_plainly
from tests.laws.ring import Setup, ring_of
from tests.model.tiny import write_model
from tests.vectors.making import HERE, SETTINGS, SMALL

pytestmark = pytest.mark.torch

MOE = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
SHAPE = TreeShape(SETTINGS["A"].depth, SETTINGS["A"].top_k, SETTINGS["A"].total_token, fixed=True)


@pytest.mark.parametrize(
    ("name", "stages", "links"),
    some([(name, *way) for name in SMALL for way in ((1, "local"), (3, "local"), (2, "grpc"))], 1, 5),
)
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
            assert text.draft_rounds[1 : len(wanted) + 1] == wanted
            plain = write_plainly(setup.base, tuple(prompt["prompt_ids"]), limit, Sampling(), 7, n, texts[n])
            excuses.compare(texts[n], plain)
        excuses.settle()


@pytest.mark.parametrize("sampling", some([Sampling(), Sampling(temperature=0.8)], 1), ids=["T0", "T0.8"])
async def test_law_1_rows_of_a_tree_choose_their_own_experts(sampling, models, tmp_path):
    """A head's trees, whose nodes are verified together, on a base of experts and a dense layer."""
    write_model(
        tmp_path, "qwen3_moe", hidden_size=64, vocab_size=200, head_dim=16, num_hidden_layers=4, **MOE
    )
    prompts = [[7, 99, 3], list(range(60, 90)), [150] * 5]
    async with ring_of(Setup(tmp_path, models[1], 2, "packed", SHAPE)) as ring:
        texts = await ring.write_all(prompts, 20, sampling)
    check_texts(tmp_path, prompts, texts, 20, sampling)
