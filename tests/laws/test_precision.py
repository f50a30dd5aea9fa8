"""Law 1 for a base in fewer bits: it writes what it writes plainly, whoever drafts, cut as it may be.

Not for KV rows in int8: there the last bit of a sum may decide about a whole step (docs/models.md).
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("numba") is None:
    pytest.skip("needs numba", allow_module_level=True)

import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from specsot.checkpoint.resolving import resolve_model
from specsot.members import TreeShape
from specsot_model.packed_files import flush
from tests.conftest import some
from tests.laws.drafters import knowing
from tests.laws.ring import Setup, ring_of, write
from tests.laws.test_identity import WARM, prompts_of
from tests.model.gguf_files import write_gguf

pytestmark = pytest.mark.torch

LIMIT, SHAPE = 20, TreeShape(5, 2, 12, fixed=True)


async def test_law_1_in_int8_with_a_head_in_int4(models):
    base, head = models
    prompts = prompts_of(2)
    plain, _ = await write(Setup(base, quantization="int8"), prompts, LIMIT, WARM)
    headed = Setup(base, head, 2, "packed", SHAPE, quantization="int8", draft_quantization="int4")
    assert (await write(headed, prompts, LIMIT, WARM))[0] == plain


async def test_law_1_in_int4_with_drafts_and_after_a_repair(models):
    base, prompts = models[0], prompts_of(2)
    alone = Setup(base, quantization="int4")
    plain, _ = await write(alone, prompts, LIMIT, WARM)
    drafter = knowing(base, [[*prompt, *text] for prompt, text in zip(prompts, plain)])
    drafted = replace(alone, stages=2, layout="batched", shape=SHAPE, drafter=drafter)
    texts, gain = await write(drafted, prompts, LIMIT, WARM)
    assert texts == plain
    assert gain > 2, "deep paths must really have been accepted"
    async with ring_of(alone) as ring:  # what was written comes again as a prompt
        again = [*prompts[0], *plain[0][:10]]
        one = await ring.open(again, generated=10, limit=LIMIT, sampling=WARM, seed=7)
        assert await ring.written(one) == plain[0][10:]


@pytest.mark.parametrize("links", some(["grpc", "direct"], 0))
async def test_law_1_over_hops_in_8_bits(models, links):
    base, prompts = models[0], prompts_of(2)
    ring = Setup(base, stages=3, links=links, quantization="int8", hop_dtype="int8")
    plain, _ = await write(ring, prompts, LIMIT, WARM)
    drafter = knowing(base, [[*prompt, *text] for prompt, text in zip(prompts, plain)])
    texts, gain = await write(replace(ring, shape=SHAPE, drafter=drafter), prompts, LIMIT, WARM)
    assert texts == plain
    assert gain > 2, "deep paths must really have been accepted"
    chances = [await first_chance(one, prompts[0]) for one in (ring, replace(ring, hop_dtype="auto"))]
    assert chances[0] != chances[1], "it is lossy: else these were not rounded"


async def first_chance(setup, prompt):
    async with ring_of(setup) as ring:
        one = await ring.open(prompt, limit=1, logprobs=0)
        await ring.written(one)
        return ring.texts[one].chances[0].logprob


async def test_law_1_of_a_gguf_file_before_and_after_its_weights_are_kept(models, tmp_path, monkeypatch):
    """The second ring maps what the first one kept, in two stages and with drafts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    file = resolve_model(write_gguf(tmp_path / "m.gguf", model, (GGMLQuantizationType.Q8_0,)))
    prompts = prompts_of(2)
    alone = Setup(file, quantization="int8")
    plain, _ = await write(alone, prompts, LIMIT, WARM)
    flush()
    assert list((tmp_path / "specsot" / "packed").glob("*/*.weight"))
    drafter = knowing(file, [[*prompt, *text] for prompt, text in zip(prompts, plain)])
    texts, gain = await write(replace(alone, stages=2, shape=SHAPE, drafter=drafter), prompts, LIMIT, WARM)
    assert texts == plain
    assert gain > 2, "deep paths must really have been accepted"
