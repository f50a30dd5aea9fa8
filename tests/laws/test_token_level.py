"""What is asked of single tokens, against Transformers: chances of prompts, and ends that come no sooner."""

import random
from functools import cache

import pytest
import torch

from specsot.core.frames import End
from specsot.params import Sampling
from tests.exact import pick
from tests.laws.drafters import knowing
from tests.laws.plain import load
from tests.laws.ring import Setup, ring_of

TOP = 3


def prompt_of(count, seed=11):
    rng = random.Random(seed)
    return [rng.randrange(2, 200) for _ in range(count)]


@pytest.mark.parametrize("stages", [1, 2])
async def test_chances_of_a_prompt_are_transformers_log_softmax(models, stages):
    """Over several chunks, beside others, and of the prompt alone."""
    base, head = models
    prompts = [prompt_of(200), prompt_of(1), prompt_of(65, seed=3)]
    async with ring_of(Setup(base, head, stages, rows=48)) as ring:
        ids = [await ring.open(prompt, limit=3, prompt_logprobs=TOP) for prompt in prompts]
        other = await ring.open(prompt_of(70, seed=5), limit=3)
        for one in (*ids, other):
            await ring.written(one)
    assert ring.texts[other].prompt == []
    for one, prompt in zip(ids, prompts):
        with torch.inference_mode():
            logprobs = load(base)(torch.tensor([prompt])).logits[0].log_softmax(-1)
        found = ring.texts[one].prompt
        assert len(found) == len(prompt) - 1
        for place, chance in enumerate(found):
            best = logprobs[place].topk(TOP).values.tolist()
            expected = [float(logprobs[place, prompt[place + 1]]), *best]
            told = [chance.logprob, *(logprob for _, logprob in chance.top)]
            assert told == pytest.approx(expected, abs=3e-4)  # logits of this model: 40 and more


@pytest.mark.parametrize("stages", [1, 2])
async def test_law_1_no_stop_token_before_min_tokens(models, stages):
    """Right drafts, wrong ones, and those that end too soon: what plain decoding with these barred writes."""
    base, _ = models
    prompt, least, limit = tuple(prompt_of(9)), 12, 30
    stops = tuple(_plainly(base, prompt, (), 0, 40)[3:30:4])  # it would often end
    plain = _plainly(base, prompt, stops, least, limit)
    known = [[*prompt, *plain], [*prompt, *_plainly(base, prompt, (), 0, 40)]]
    async with ring_of(Setup(base, None, stages, drafter=knowing(base, known))) as ring:
        free = await ring.open([*prompt], limit=limit, stop_ids=stops)
        held = await ring.open([*prompt], limit=limit, stop_ids=stops, min_tokens=least)
        resumed = await ring.open(
            [*prompt, *plain[:5]], limit=limit, stop_ids=stops, min_tokens=least, generated=5
        )
        texts = [await ring.written(one) for one in (free, held, resumed)]
        ends = [ring.texts[one].end for one in (free, held)]
    assert len(texts[0]) == 4
    assert texts[1] == plain
    assert texts[2] == plain[5:]
    assert len(plain) >= least
    assert ends == [End.STOP, End.STOP if plain[-1] in stops else End.LENGTH]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("stages", [1, 2])
async def test_law_1_excluded_first_bars_the_first_token_and_no_later_one(models, stages, sampling):
    """With right and wrong drafts, and for a sequence that is opened again after some of its tokens."""
    base, _ = models
    prompt, limit = tuple(prompt_of(9)), 30
    free = _without_first(base, prompt, (), sampling, limit)
    excluded = tuple(sorted({*free}))
    plain = _without_first(base, prompt, excluded, sampling, limit)
    drafter = knowing(base, [[*prompt, *plain], [*prompt, *free]])
    given = {"limit": limit, "sampling": sampling, "seed": 7, "excluded_first": excluded}
    async with ring_of(Setup(base, None, stages, drafter=drafter)) as ring:
        begun = await ring.open([*prompt], **given)
        resumed = await ring.open([*prompt, *plain[:5]], generated=5, **given)
        texts = [await ring.written(one) for one in (begun, resumed)]
        assert ring.drafts
    assert plain[0] not in excluded
    assert not set(excluded).isdisjoint(plain[1:])
    assert texts == [plain, plain[5:]]


def _without_first(base, prompt, excluded, sampling, limit):
    """Decode without drafts; the first token is none of `excluded`."""
    tokens = [*prompt]
    for written in range(limit):
        with torch.inference_mode():
            logits = load(base)(torch.tensor([tokens])).logits[0, -1]
            if not written:
                logits[list(excluded)] = float("-inf")
        tokens.append(pick(logits, sampling, {}, 7, 0, len(tokens)))
    return tokens[len(prompt) :]


@cache
def _plainly(base, prompt, stops, least, limit):
    """Greedy, the stop tokens barred as long as there are fewer than `least`."""
    written = []
    with torch.inference_mode():
        while len(written) < limit and not (written and written[-1] in stops):
            logits = load(base)(torch.tensor([[*prompt, *written]])).logits[0, -1]
            if len(written) < least:
                logits[list(stops)] = float("-inf")
            written.append(int(logits.argmax()))
    return written
