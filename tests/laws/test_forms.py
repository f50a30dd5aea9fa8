"""Law 1 under forms and lists: the answer is plain decoding's through the same masks, whatever drafts it and
however the model is cut; law 3: what ends well has the form.
"""

import json
import random
from functools import cache

import pytest
import torch

from specsot.core.frames import End
from specsot.core.skeleton import PlanRules
from specsot.core.vocabulary import read_vocabulary
from specsot.grammar import TokenAutomaton
from specsot.grammar.answers import AnswerAutomaton
from specsot.members import TreeShape
from specsot.params import Form, Sampling
from specsot_drafter.proposers import eagle
from tests.conftest import is_full, some
from tests.constraint.forms import FORMS, has_form
from tests.constraint.oracle import parse_list
from tests.cut_trees import cut_into
from tests.drafter.ring import Unguided
from tests.exact import pick
from tests.laws.drafters import knowing
from tests.laws.plain import Excuses, Plain, load
from tests.laws.ring import Setup, ring_of
from tests.models import Shape, write_base, write_head

END, LIMIT = 1, 80
NAMES = ("person", "tree", "any of", "date", "words", "choice", "list")
MORE = "tree", "words"
LISTS = PlanRules(direct=False, max_points=4, listed=True)
HELD = FORMS | {"list": LISTS}
GREEDY, WARM = Sampling(), Sampling(temperature=1.0)
JOINED = ('{"', '":', '", "', '"}', "},", "name", "kind", "aste", "th", "é", " no", "yes,", "20", "-0", "\n ")
PIECES = (b"\xf0\x9f", b"\x98\x80", b"\x80!", b'\xc3\xa9"')


def write_tokenizer(folder, count):
    """Two tokens without text, every byte, and tokens that cross characters and JSON's own marks."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    picture = {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    texts = [bytes([byte]) for byte in range(256)] + [text.encode() for text in JOINED] + list(PIECES)
    names = ["<s>", "</s>", *("".join(picture[byte] for byte in text) for text in texts)]
    assert len(names) <= count
    config = {
        "model": {"type": "BPE", "vocab": {name: n for n, name in enumerate(names)}, "merges": []},
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "added_tokens": [
            {
                "id": n,
                "content": names[n],
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for n in (0, 1)
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, shape = tmp_path_factory.mktemp("models"), Shape(layers=4, vocabulary=300)
    base = write_base(folder / "base", shape)
    write_tokenizer(base, 300)
    return base, write_head(folder / "head", shape, drafts=250), read_vocabulary(base, 300)


def write_held(base, vocabulary, prompt, form, sampling, ordinal):
    """Plain decoding through the masks of an automaton that only ever goes forward; and why it ended."""
    model, tokens, gaps = load(base), list(prompt), list[float]()
    kind = TokenAutomaton if form is LISTS else AnswerAutomaton
    machine, fed, past = kind(vocabulary, form, (END,)), tokens, None
    place = machine.start()
    for remaining in range(LIMIT, 0, -1):
        with torch.inference_mode():
            out = model(input_ids=torch.tensor([fed]), past_key_values=past, use_cache=True)
        forbidden, past = torch.from_numpy(~machine.mask(place, remaining)), out.past_key_values
        logits = out.logits[0, -1].masked_fill(forbidden, -torch.inf)
        top = logits.topk(2).values
        gaps.append(float(top[0] - top[1]))
        fed = [pick(logits, sampling, {}, 7, ordinal, len(tokens))]
        tokens += fed
        if fed == [END]:
            return Plain(tuple(tokens[len(prompt) :]), tuple(gaps)), End.STOP
        place = machine.advance(place, fed[0])
        if machine.finished(place):
            return Plain(tuple(tokens[len(prompt) :]), tuple(gaps)), End.GRAMMAR
    return Plain(tuple(tokens[len(prompt) :]), tuple(gaps)), End.LENGTH


def is_valid(form, text):
    return parse_list(text.encode(), LISTS) is not None if form is LISTS else has_form(form, text)


def asked():
    """Prompts and forms, the same for every ring; two more by `make test-all`."""
    rng = random.Random(11)
    prompts = {name: [rng.randrange(300) for _ in range(rng.randrange(3, 25))] for name in NAMES}
    return [(prompt, HELD[name]) for name, prompt in prompts.items() if is_full() or name not in MORE]


@cache
def oracle(base, sampling):
    """What plain decoding writes for each of `asked`, and why it ended."""
    vocabulary = read_vocabulary(base, 300)
    return [write_held(base, vocabulary, *one, sampling, n) for n, one in enumerate(asked())]


async def compare(setup, vocabulary, sampling, one_by_one=False):
    """Every answer with its oracle's; returns how many tokens each step brought."""
    excuses, ids = Excuses(), []
    async with ring_of(setup) as ring:
        for n, (prompt, form) in enumerate(asked()):
            sequence = await ring.open(
                prompt,
                **{"plan" if form is LISTS else "form": form},
                limit=LIMIT,
                sampling=sampling,
                seed=7,
                ordinal=n,
                stop_ids=(END,),
            )
            ids.append(sequence)
            if one_by_one:
                await ring.written(sequence)
        texts = [(await ring.written(one), ring.texts[one].end) for one in ids]
        draft_rounds = [draft_round for one in ids for draft_round in ring.texts[one].draft_rounds]
        assert not ring.broken
    for (_, form), (tokens, end), (plain, ended) in zip(asked(), texts, oracle(setup.base, sampling)):
        excuses.compare(tokens, plain)
        assert end == ended
        assert end is not End.LENGTH
        text = b"".join(vocabulary.bytes[token] or b"" for token in tokens).decode()
        assert is_valid(form, text), text
    excuses.settle()
    return draft_rounds


@pytest.mark.full
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["T0", "T1"])
async def test_law_1_without_a_drafter(models, sampling):
    base, _, vocabulary = models
    await compare(Setup(base), vocabulary, sampling)


@pytest.mark.parametrize(
    ("stages", "layout", "sampling"),
    some([(1, "packed", GREEDY), (2, "batched", WARM), (3, "packed", WARM)], 1),
    ids=["1-packed-T0", "2-batched-T1", "3-packed-T1"],
)
@pytest.mark.parametrize("grown", ["levels", "graph"])
async def test_law_1_by_a_drafter_that_is_held_too(models, stages, layout, sampling, grown, monkeypatch):
    """Between levels, or when all has grown."""
    base, head, vocabulary = models
    if grown == "graph":
        monkeypatch.setattr(eagle, "_graphs", Unguided)
    await compare(Setup(base, head, stages, layout, TreeShape(4, 3, 12, fixed=True)), vocabulary, sampling)


@pytest.mark.parametrize("sampling", some([GREEDY, WARM], 1), ids=["T0", "T1"])
async def test_law_1_with_a_drafter_that_predicts_well_and_often_violates_the_grammar(models, sampling):
    base, _, vocabulary = models
    known = [[*prompt, *plain.tokens] for (prompt, _), (plain, _) in zip(asked(), oracle(base, sampling))]
    shape = TreeShape(6, 2, 14, fixed=True)
    draft_rounds = await compare(
        Setup(base, None, 2, "packed", shape, drafter=knowing(base, known)), vocabulary, sampling
    )
    assert sum(draft_rounds) / len(draft_rounds) > 2, "deep paths must really have been accepted"


async def test_law_1_with_trees_in_parts_that_often_violate_the_grammar(models):
    base, _, vocabulary = models
    known = [[*prompt, *plain.tokens] for (prompt, _), (plain, _) in zip(asked(), oracle(base, WARM))]
    shape = TreeShape(6, 2, 14, fixed=True)
    setup = Setup(base, None, 2, "packed", shape, drafter=knowing(base, known), make_depth=cut_into(4))
    draft_rounds = await compare(setup, vocabulary, WARM, one_by_one=True)
    assert sum(draft_rounds) / len(draft_rounds) > 2, "deep paths must really have been accepted"


async def test_law_6_a_form_that_cannot_be_compiled_in_the_ring_fails_alone(models):
    """The endpoint refuses such forms; should one come through, the others go on."""
    base, _, vocabulary = models
    good = FORMS["choice"]
    async with ring_of(Setup(base)) as ring:
        doomed = await ring.open([5, 6, 7], form=Form("regex", ("(",)), limit=9)
        other = await ring.open([5, 6, 7], form=good, limit=40)
        assert await ring.written(doomed) == []
        text = b"".join(vocabulary.bytes[token] or b"" for token in await ring.written(other)).decode()
        assert ring.texts[doomed].end is End.FAILED
        assert has_form(good, text)
        assert not ring.broken
