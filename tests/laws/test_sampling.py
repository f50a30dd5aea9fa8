"""Laws 1 and 2 where more than an argmax is asked for: every processor, by every drafter, in every split.

Plain decoding is Transformers' model with Transformers' own processors, one token at a time.
"""

import copy
import random
from functools import cache
from itertools import zip_longest

import pytest
import torch
from transformers import GenerationConfig

from specsot.core.frames import Fork
from specsot.members import TreeShape
from specsot.params import Sampling
from tests.conftest import some
from tests.laws.drafters import knowing
from tests.laws.plain import Excuses, load, write_plainly
from tests.laws.ring import Setup, ring_of

LIMIT, SHARED = 24, 21
BIAS = ((3, 2.5), (17, -4.0), (60, 1.0), (199, 0.5))
MIXTURE = dict(top_k=60, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.4,
               frequency_penalty=0.3, logit_bias=BIAS)  # fmt: skip
PROCESSORS = {
    "top_p": dict(temperature=0.8, top_p=0.8),
    "top_k": dict(temperature=0.8, top_k=7),
    "min_p": dict(temperature=0.8, min_p=0.1),
    "repetition": dict(temperature=0.8, repetition_penalty=1.5),
    "presence": dict(temperature=0.8, presence_penalty=1.5),
    "frequency": dict(temperature=0.8, frequency_penalty=1.2),
    "negative": dict(temperature=0.8, presence_penalty=-1.0, frequency_penalty=-0.5),
    "bias": dict(temperature=0.8, logit_bias=BIAS),
    "mixture": dict(temperature=0.8) | MIXTURE,
    "greedy+penalties": MIXTURE,
    "greedy+negative": dict(repetition_penalty=0.7, frequency_penalty=-1.0),
    # Half of the vocabulary is excluded, so that many an argmax is.
    "greedy+lowered": dict(logit_bias=tuple((token, -100.0) for token in range(0, 200, 2))),
}
WISHES = [Sampling(**processors) for processors in PROCESSORS.values()]


def prompts_of(count, seed=3):
    """One prefix, and more of it: repeated tokens are what penalties look for."""
    rng = random.Random(seed)
    prefix = [rng.randrange(200) for _ in range(SHARED)]
    return [
        prefix + [rng.choice([*prefix, rng.randrange(200)]) for _ in range(1 + n % 12)] for n in range(count)
    ]


def plainly(base, prompts, wishes, guesses=()):
    """What plain decoding writes: sequence n by wish n."""
    rows = zip_longest(prompts, wishes, guesses, fillvalue=())
    return [
        write_plainly(base, tuple(prompt), LIMIT, wish, 7, n, guess)
        for n, (prompt, wish, guess) in enumerate(rows)
    ]


def guessing(base, prompts, wishes):
    """A drafter that mostly knows what plain decoding writes."""
    plain = plainly(base, prompts, wishes)
    return knowing(base, [[*prompt, *one.tokens] for prompt, one in zip(prompts, plain)])


async def compare(setup, prompts, wishes, logprobs=lambda n: None):
    """Write every prompt by its own wish, all at once; returns the ring's texts and the plain ones.

    logprobs: how many a sequence asks for, by its number.
    """
    async with ring_of(setup) as ring:
        fork = Fork(await ring.prefix(prompts[0][:SHARED]), SHARED)
        ids = [
            await ring.open(
                prompt[SHARED:], fork, limit=LIMIT, sampling=wish, seed=7, ordinal=n, logprobs=logprobs(n)
            )
            for n, (prompt, wish) in enumerate(zip(prompts, wishes))
        ]
        for one in ids:
            await ring.written(one)
        assert not ring.broken
    excuses, texts = Excuses(), [ring.texts[one] for one in ids]
    plain = plainly(setup.base, prompts, wishes, [text.tokens for text in texts])
    for text, other in zip(texts, plain):
        excuses.compare(text.tokens, other)
    excuses.settle()
    return texts, plain


@pytest.mark.parametrize(
    ("stages", "layout", "links"),
    some([(1, "packed", "local"), (3, "batched", "local"), (2, "batched", "grpc")]),
)
async def test_law_1_every_processor_by_a_drafter_that_is_always_wrong(models, stages, layout, links):
    base, head = models
    await compare(Setup(base, head, stages, layout, links=links), prompts_of(len(WISHES)), WISHES)


@pytest.mark.parametrize("stages", some([1, 2]))
async def test_law_1_every_processor_in_deep_trees(models, stages):
    base, _ = models
    prompts = prompts_of(len(WISHES))
    shape, drafter = TreeShape(6, 2, 14, fixed=True), guessing(base, prompts, WISHES)
    texts, _ = await compare(Setup(base, None, stages, shape=shape, drafter=drafter), prompts, WISHES)
    check_deep(texts)


def check_deep(texts):
    for text in texts:
        assert sum(text.draft_rounds) / len(text.draft_rounds) > 1.5, (
            "deep paths must really have been accepted"
        )


@pytest.mark.parametrize(
    "processors",
    some([dict(repetition_penalty=1.3), dict(repetition_penalty=1.1, logit_bias=BIAS)], 1),
    ids=["repetition", "repetition+bias"],
)
async def test_law_1_greedy_with_penalties_writes_what_transformers_generate_writes(models, processors):
    base, head = models
    sampling, prompts = Sampling(**processors), prompts_of(2)
    config = GenerationConfig(
        max_new_tokens=LIMIT,
        do_sample=False,
        eos_token_id=1,
        pad_token_id=0,
        repetition_penalty=sampling.repetition_penalty,
        sequence_bias=[[[token], gain] for token, gain in sampling.logit_bias] or None,
    )
    async with ring_of(Setup(base, head, 2)) as ring:
        texts = await ring.write_all(prompts, LIMIT, sampling, SHARED, stop_ids=(1,))
    for prompt, text in zip(prompts, texts):
        theirs = load(base).generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
        assert text == theirs.tolist()


@cache
def load_exactly(base):
    return copy.deepcopy(load(base)).double()


def measure_exactly(base, prompt, tokens):
    """log_softmax [tokens, V] of Transformers' raw logits, teacher-forced, in float64."""
    with torch.inference_mode():
        logits = load_exactly(base)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


async def test_law_1_every_processor_and_logprobs_by_any_drafter(models):
    """By none, by one that is always wrong, by one that knows much. Every second text asks for logprobs.

    This model's wide logits amplify rounding: Transformers' own float32 is 1e-4 off the exact ones.
    """
    base, head = models
    wishes = [Sampling(), *WISHES]
    prompts = prompts_of(len(wishes))

    def asked(n):
        return None if n % 2 else 5

    plain, _ = await compare(Setup(base, stages=2), prompts, wishes, asked)
    shape, drafter = TreeShape(6, 2, 14, fixed=True), guessing(base, prompts, wishes)
    setups = [Setup(base, head, 3, "batched", links="grpc"), Setup(base, shape=shape, drafter=drafter)]
    drafted = [(await compare(setup, prompts, wishes, asked))[0] for setup in setups]
    check_deep(drafted[-1])
    for n, (prompt, text) in enumerate(zip(prompts, plain)):
        if not asked(n):
            assert text.chances == []
            continue
        assert len(text.chances) == len(text.tokens)
        truth = measure_exactly(base, prompt, text.tokens)
        for k, (token, chance) in enumerate(zip(text.tokens, text.chances)):
            tokens, logprobs = map(list, zip(*chance.top))
            assert chance.logprob == pytest.approx(float(truth[k, token]), abs=3e-4)
            assert logprobs == pytest.approx(truth[k].topk(5).values.tolist(), abs=3e-4)
            assert logprobs == pytest.approx(truth[k, tokens].tolist(), abs=3e-4)
            for texts in drafted:
                other = texts[n].chances[k]
                assert other.logprob == pytest.approx(chance.logprob, abs=1e-4)
                assert [p for _, p in other.top] == pytest.approx(logprobs, abs=1e-4)


async def test_logprobs_are_sent_only_to_clients_that_requested_them(models):
    base, head = models
    async with ring_of(Setup(base, head)) as ring:
        asks = await ring.open([5, 6], limit=6, logprobs=0)
        silent = await ring.open([5, 6], limit=6)
        assert await ring.written(asks) == await ring.written(silent)
    assert [len(chance.top) for chance in ring.texts[asks].chances] == [0] * 6
    assert ring.texts[silent].chances == []


@pytest.mark.parametrize("cut", some([1, 9, 23], 1))
async def test_law_1_what_was_written_before_a_repair_counts_as_written(models, cut):
    """The sequence is opened again with its own tokens as the end of its prompt."""
    base, head = models
    sampling = Sampling(temperature=0.8, **MIXTURE | dict(presence_penalty=2.0, frequency_penalty=1.5))
    prompt = prompts_of(3)[2]
    plain = write_plainly(base, tuple(prompt), LIMIT, sampling, 7, 0).tokens
    wishes = dict(limit=LIMIT, sampling=sampling, seed=7, generated=cut)
    async with ring_of(Setup(base, head, 2)) as ring:
        again = await ring.open([*prompt, *plain[:cut]], **wishes)
        prefix = await ring.prefix(prompt[:SHARED])
        forked = await ring.open([*prompt[SHARED:], *plain[:cut]], Fork(prefix, SHARED), **wishes)
        assert await ring.written(again) == list(plain[cut:])
        assert await ring.written(forked) == list(plain[cut:])
