"""Law 1 under soft ends: a sequence ends where plain decoding ends it, whatever drafts it."""

import json
import random
from collections import Counter
from functools import cache

import pytest
import torch

from specsot.core.frames import End
from specsot.core.soft_end import SoftEnd
from specsot.core.vocabulary import read_vocabulary
from specsot.grammar import sentence_ends
from specsot.members import TreeShape
from specsot.params import Sampling
from tests.conftest import some
from tests.exact import pick
from tests.laws.drafters import knowing
from tests.laws.plain import Excuses, Plain, load
from tests.laws.ring import Setup, ring_of
from tests.models import Shape, write_base, write_head

pytestmark = pytest.mark.torch

END, LIMIT = 1, 60
SAMPLINGS = [Sampling(), Sampling(temperature=1.2), Sampling(0.9, top_p=0.9, repetition_penalty=1.1)]
NAMES = ["T0", "T1", "penalty"]
# Tokens generated before the soft end, and the smallest number of tokens.
ASKED = ((0, 0), (5, 0), (5, 20), (20, 0), (LIMIT, 0))
WORDS = [first + second for first in "abcdefghij" for second in "klmnop"]
# A third of all tokens begins a sentence, a third ends one, and a few are marks of Markdown.
TEXTS = (
    *("\n", "**", "- ", "`", "(", ")", '"', "。", "1", "#", "|", "```", "Dr.", " "),
    *(f" {word.capitalize()}" for word in WORDS),
    *(f"{word}." for word in WORDS),
    *(f" {word}?" for word in WORDS),
    *(f" {word}" for word in WORDS),
    *WORDS[:44],
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, shape = tmp_path_factory.mktemp("models"), Shape(layers=4, vocabulary=300)
    base = write_base(folder / "base", shape)
    write_texts(base)
    return base, write_head(folder / "head", shape, drafts=250)


def write_texts(folder):
    """Write a tokenizer of two tokens without text and of TEXTS."""
    names = ["<s>", "</s>", *(text.replace(" ", "\u2581") for text in TEXTS)]
    assert len(set(names)) == 300
    vocab = {name: number for number, name in enumerate(names)}
    added = [{"id": number, "content": names[number], "special": True} for number in (0, 1)]
    for one in added:
        one |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    config = {
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True},
        "decoder": {"type": "ByteFallback"},
        "added_tokens": added,
    }
    (folder / "tokenizer.json").write_text(json.dumps(config))


def asked():
    rng = random.Random(5)
    return [([rng.randrange(2, 300) for _ in range(rng.randrange(3, 20))], *one) for one in ASKED]


@cache
def write_on(base, prompt, least, sampling, ordinal):
    """Plain decoding, which no end of a sentence ends."""
    model, tokens, gaps = load(base), list(prompt), list[float]()
    fed, past = tokens, None
    for written in range(LIMIT):
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([fed]), past_key_values=past, use_cache=True)
        past, logits = out.past_key_values, out.logits[0, -1].clone()
        if written < least:
            logits[END] = -torch.inf
        top = logits.topk(2).values
        gaps.append(float(top[0] - top[1]))
        fed = [pick(logits, sampling, counts_of(prompt, tokens), 7, ordinal, len(tokens))]
        tokens += fed
        if fed == [END]:
            break
    return Plain(tuple(tokens[len(prompt) :]), tuple(gaps))


def counts_of(prompt, tokens):
    """How often each token was generated; those of the prompt count 0."""
    return dict.fromkeys(prompt, 0) | Counter(tokens[len(prompt) :])


def end_softly(plain, after, least, ends):
    """The same until it would begin a new sentence: there it ends instead."""
    prose = ends.start()
    for written, token in enumerate(plain.tokens):
        if token == END or (written >= max(after, least) and ends.ends_before(prose, token)):
            return Plain((*plain.tokens[:written], END), plain.gaps[: written + 1]), End.STOP
        prose = ends.advance(prose, token)
    return plain, End.LENGTH


@cache
def oracle(base, sampling):
    ends = sentence_ends(read_vocabulary(base, 300))
    return [
        end_softly(write_on(base, tuple(prompt), least, sampling, number), after, least, ends)
        for number, (prompt, after, least) in enumerate(asked())
    ]


async def compare(setup, sampling):
    excuses = Excuses()
    async with ring_of(setup) as ring:
        ids = [
            await ring.open(
                prompt,
                soft_end=SoftEnd(after, END),
                min_tokens=least,
                limit=LIMIT,
                sampling=sampling,
                seed=7,
                ordinal=number,
                stop_ids=(END,),
            )
            for number, (prompt, after, least) in enumerate(asked())
        ]
        texts = [(await ring.written(one), ring.texts[one].end) for one in ids]
        draft_rounds = [draft_round for one in ids for draft_round in ring.texts[one].draft_rounds]
        assert not ring.broken
    for (tokens, end), (plain, ended) in zip(texts, oracle(setup.base, sampling)):
        excuses.compare(tokens, plain)
        assert end is ended
    excuses.settle()
    return draft_rounds


def test_soft_ends_end_most_sequences_before_their_limit(models):
    for sampling in SAMPLINGS:
        softly = oracle(models[0], sampling)
        assert sum(end is End.STOP for _, end in softly[:-1]) >= 2
        assert len({len(plain.tokens) for plain, _ in softly}) > 2


@pytest.mark.parametrize("sampling", some(SAMPLINGS, 0), ids=NAMES)
@pytest.mark.parametrize(("stages", "layout"), some([(1, "packed"), (2, "batched")], 0))
async def test_law_1_without_a_drafter(models, stages, layout, sampling):
    await compare(Setup(models[0], None, stages, layout), sampling)


@pytest.mark.parametrize("sampling", some(SAMPLINGS, 1), ids=NAMES)
async def test_law_1_with_trees_of_a_head(models, sampling):
    base, head = models
    await compare(Setup(base, head, 1, "packed", TreeShape(4, 3, 12, fixed=True)), sampling)


@pytest.mark.parametrize("sampling", some(SAMPLINGS, 2), ids=NAMES)
async def test_law_1_with_a_drafter_that_knows_the_continuation(models, sampling):
    base, _ = models
    known = [
        [*prompt, *write_on(base, tuple(prompt), least, sampling, number).tokens]
        for number, (prompt, _, least) in enumerate(asked())
    ]
    shape = TreeShape(6, 2, 14, fixed=True)
    draft_rounds = await compare(
        Setup(base, None, 2, "packed", shape, drafter=knowing(base, known)), sampling
    )
    assert sum(draft_rounds) / len(draft_rounds) > 1.5, "deep paths must really have been accepted"
