"""Law 1 with every way to draft: token identity with plain decoding, whoever proposes and who decides."""

import random
from functools import partial

import pytest
from safetensors.torch import load_file, save_file

from specsot.drafting import DraftOptions
from specsot.members import TreeShape
from specsot.params import Sampling
from specsot.service.options import DraftModelOptions
from specsot.transport.wire.values import MAX_NODES
from specsot_drafter.drafter import Drafter
from specsot_drafter.loader import DraftLoader
from tests.conftest import some
from tests.laws.drafters import add_sometimes, hostile, knowing
from tests.laws.plain import Excuses, check_texts, write_plainly
from tests.laws.ring import Setup, ring_of
from tests.models import SHALLOW, Shape, write_base, write_dflash, write_dspark, write_head, write_p_eagle

pytestmark = pytest.mark.torch

GREEDY, WARM = Sampling(), Sampling(temperature=0.8, top_p=0.95, top_k=40)
TUNED = TreeShape(fixed=False)
LIMIT = 20
SMALL = Shape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, inner=48)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base, a head that knows nothing of it, and a smaller model that knows as little."""
    folder = tmp_path_factory.mktemp("models")
    base, head = write_base(folder / "base", SHALLOW), write_head(folder / "head", SHALLOW)
    return base, head, write_base(folder / "small", SMALL, 9)


def setup_of(base, draft, stages=1, links="local", shape=TUNED, layout="packed", **how):
    """A ring with a drafter of the product's own, started so."""

    def make(name, address, dialer, compute):
        options = DraftModelOptions(base, dtype="fp32", kv_memory=1 << 26, draft_model=draft, **how)
        return Drafter(DraftLoader(options, name, address), dialer, compute)

    return Setup(base, None, stages, layout, shape, drafter=make, links=links)


def prompts_of(count, shared=0, seed=3):
    """Some repeat themselves, so that there is something to look up."""
    rng = random.Random(seed)
    prefix = [rng.randrange(200) for _ in range(shared)]
    texts = [
        [rng.randrange(200) for _ in range(rng.randrange(1, 12))] * rng.randrange(1, 5) for _ in range(count)
    ]
    return [prefix + text for text in texts]


async def compare(setup, sampling=GREEDY, count=5, shared=17):
    """Tokens written per step, by sequence."""
    prompts = prompts_of(count, shared)
    async with ring_of(setup) as ring:
        texts = await ring.write_all(prompts, LIMIT, sampling, shared)
        assert not ring.broken
        draft_rounds = [text.draft_rounds[1:] for text in ring.texts.values() if text.draft_rounds]
    check_texts(setup.base, prompts, texts, LIMIT, sampling)
    return draft_rounds


MODES = {
    "linear": DraftOptions("linear", depth=4, tuner="fixed"),
    "tree": DraftOptions("tree", depth=3, breadth=2, nodes=12, tuner="fixed"),
    "pruned": DraftOptions("pruned", depth=4, breadth=3, nodes=20, threshold=0.2, tuner="fixed"),
}


@pytest.mark.parametrize("mode", MODES)
async def test_law_1_a_model_that_is_the_base_is_always_right(models, mode):
    base, _, _ = models
    options = MODES[mode]
    draft_rounds = await compare(setup_of(base, base, drafter="model", drafting=options))
    whole = options.depth + 1
    least = 19 // whole + (19 % whole > 0)
    for steps in draft_rounds:
        assert len(steps) == least if mode != "pruned" else len(steps) <= 2 * least, (
            "it stops where it is unsure"
        )
        assert max(steps) == whole


@pytest.mark.parametrize(("stages", "sampling"), some([(1, WARM), (2, GREEDY)], 1), ids=["1-T0.8", "2-T0"])
@pytest.mark.parametrize("mode", some(MODES, 1))
async def test_law_1_a_model_that_knows_nothing_changes_nothing(models, mode, stages, sampling):
    base, _, small = models
    setup = setup_of(base, small, stages, layout="batched", drafter="model", drafting=MODES[mode])
    await compare(setup, sampling)


TUNERS = [("measured", GREEDY), ("measured", WARM), ("seed", WARM), ("fixed", GREEDY)]
DRAFTERS = ["eagle", "dflash", "causal", "dspark", "p-eagle", "model", "suffix", "ngram"]
MET = [
    DRAFTERS.index(name) * 4 + tuner
    for name, tuner in zip(("eagle", "dflash", "dspark", "p-eagle", "suffix"), (1, 2, 1, 2, 1))
]


@pytest.mark.parametrize(
    ("drafter", "tuner", "sampling"), some([(one, *way) for one in DRAFTERS for way in TUNERS], *MET)
)
async def test_law_1_whichever_policy_decides_how_much_is_drafted(models, tmp_path, drafter, tuner, sampling):
    base, head, small = models
    draft = {"eagle": head, "model": small}.get(drafter)
    if drafter in ("dflash", "causal"):
        draft, drafter = write_dflash(tmp_path, base, drafter == "causal"), "eagle"
    if drafter == "dspark":
        draft, drafter = write_dspark(tmp_path, base), "eagle"
    if drafter == "p-eagle":
        draft, drafter = write_p_eagle(tmp_path, base), "eagle"
    await compare(setup_of(base, draft, drafter=drafter, drafting=DraftOptions(tuner=tuner)), sampling)


@pytest.mark.parametrize("links", some(["local", "grpc"], 1))
async def test_law_1_every_request_with_a_drafter_of_its_own(models, links):
    """One ring: who drafts is each sequence's own affair."""
    base, head, _ = models
    prompts = prompts_of(8)
    asked = [None, "eagle", "ngram", "none"] * 2
    async with ring_of(setup_of(base, head, 2, links, shape=TreeShape(3, 2, 8, fixed=True))) as ring:
        ids = [
            await ring.open(prompt, limit=LIMIT, seed=7, ordinal=n, drafted=who != "none", drafter=who)
            for n, (prompt, who) in enumerate(zip(prompts, asked))
        ]
        texts = [await ring.written(one) for one in ids]
        assert not ring.broken
    check_texts(base, prompts, texts, LIMIT, GREEDY)


@pytest.mark.parametrize(
    ("stages", "links", "sampling"),
    some([(1, "local", GREEDY), (1, "local", WARM), (2, "grpc", GREEDY)], 1, 2),
)
async def test_law_1_and_4_a_hostile_drafter_changes_no_token_and_stops_no_sequence(
    models, stages, links, sampling
):
    """Ids that nobody has, other roots, trees of later steps, too deep, too large, twice, for strangers."""
    base, _, _ = models
    prompts, excuses = prompts_of(6, 17), Excuses()
    wanted = [write_plainly(base, tuple(one), LIMIT, sampling, 7, n) for n, one in enumerate(prompts)]
    most = 5000 if links == "local" else MAX_NODES  # what is larger ends the link, and nothing else
    texts = [[*prompt, *plain.tokens] for prompt, plain in zip(prompts, wanted)]
    setup = Setup(
        base, None, stages, "packed", drafter=hostile(base, texts, most), links=links, draft_timeout=0.2
    )
    async with ring_of(setup) as ring:
        written = await ring.write_all(prompts, LIMIT, sampling, 17)
        assert not ring.broken
        assert ring.drafts, "some of its trees were taken"
        again = await ring.write_all(prompts[:2], LIMIT, sampling, 17)
    for text, plain in zip([*written, *again], [*wanted, *wanted[:2]]):
        excuses.compare(text, plain)
    excuses.settle()


@pytest.mark.parametrize("layout", ["packed", "batched"])
@pytest.mark.parametrize("spoilt", some([float("nan"), float("inf"), -float("inf")], 0))
@pytest.mark.parametrize("stages", some([1, 2], 1))
async def test_law_1_a_draft_with_non_finite_rows_changes_no_token(models, tmp_path, stages, spoilt, layout):
    """Only as a draft is that token ever fed: its rows meet the root's in one product, and later rows too."""
    prompts, excuses = prompts_of(5, 17), Excuses()
    wanted = [write_plainly(models[0], tuple(one), LIMIT, GREEDY, 7, n) for n, one in enumerate(prompts)]
    texts = [[*prompt, *plain.tokens] for prompt, plain in zip(prompts, wanted)]
    bad = next(token for token in range(200) if not any(token in text for text in texts))
    base = write_base(tmp_path / "base", SHALLOW, poison=bad)
    tensors = load_file(base / "model.safetensors")
    tensors["model.embed_tokens.weight"][bad] = spoilt
    save_file(tensors, base / "model.safetensors")
    drafter = knowing(base, texts, vary=partial(add_sometimes, bad))
    async with ring_of(Setup(base, None, stages, layout, drafter=drafter)) as ring:
        written = await ring.write_all(prompts, LIMIT, GREEDY, 17)
        assert not ring.broken
        assert any(0 in text.draft_rounds for text in ring.texts.values()), (
            "some roots were spoilt, and fed once more"
        )
    for text, plain in zip(written, wanted):
        excuses.compare(text, plain)
    excuses.settle()
