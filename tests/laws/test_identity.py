"""Law 1: token identity with plain decoding, whatever the drafter, tree, layout, split or link."""

import random

import pytest

from specsot.members import TreeShape
from specsot.params import Sampling
from tests.conftest import some
from tests.laws.drafters import knowing
from tests.laws.plain import check_texts, write_plainly
from tests.laws.ring import Setup, ring_of

pytestmark = pytest.mark.torch

GREEDY, WARM = Sampling(), Sampling(temperature=0.8, top_p=0.95, top_k=40)
LIMIT = 20
SHAPES = [
    TreeShape(depth, top_k, nodes, fixed=True)
    for depth, top_k, nodes in [
        (1, 1, 2), (1, 4, 5), (2, 2, 4), (2, 3, 9), (3, 1, 5), (3, 2, 7),
        (3, 4, 16), (4, 3, 12), (5, 2, 10), (5, 4, 24), (6, 1, 8), (6, 5, 40),
    ]
]  # fmt: skip


@pytest.fixture
def many(request):
    """Prompts side by side; forty by `make test-all`."""
    return 40 if request.config.getoption("--full") else 16


def prompts_of(count, shared=0, seed=3):
    rng = random.Random(seed)
    prefix = [rng.randrange(200) for _ in range(shared)]
    return [prefix + [rng.randrange(200) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


async def compare(setup, prompts, sampling, shared=0, limit=LIMIT):
    async with ring_of(setup) as ring:
        texts = await ring.write_all(prompts, limit, sampling, shared)
        assert not ring.broken
        draft_rounds = [draft_round for text in ring.texts.values() for draft_round in text.draft_rounds]
    check_texts(setup.base, prompts, texts, limit, sampling)
    return draft_rounds


@pytest.mark.parametrize(
    ("stages", "layout", "sampling"),
    some(
        [
            (1, "packed", GREEDY),
            (1, "batched", WARM),
            (2, "packed", WARM),
            (2, "batched", GREEDY),
            (3, "packed", GREEDY),
            (3, "batched", WARM),
        ],
        5,
    ),
    ids=lambda value: str(getattr(value, "temperature", value)),
)
async def test_law_1_many_prompts_by_a_drafter_that_is_always_wrong(models, many, stages, layout, sampling):
    base, head = models
    setup = Setup(base, head, stages, layout)
    await compare(setup, prompts_of(many, shared=21), sampling, shared=21, limit=10)


@pytest.mark.parametrize("shape", some(SHAPES, 11), ids=lambda s: f"d{s.depth}k{s.top_k}n{s.nodes}")
async def test_law_1_twelve_tree_shapes(models, shape):
    base, head = models
    await compare(Setup(base, head, 1, "packed", shape), prompts_of(8), GREEDY)


@pytest.mark.parametrize("sampling", some([GREEDY, WARM], 1), ids=["T0", "T0.8"])
@pytest.mark.parametrize(
    ("stages", "layout", "links"),
    some([(1, "packed", "local"), (2, "batched", "local"), (3, "packed", "local"), (2, "packed", "grpc")], 2),
)
async def test_law_1_deep_trees_of_a_drafter_that_knows_much(models, stages, layout, links, sampling):
    base, _ = models
    prompts = prompts_of(8, shared=17)
    known = [
        [*prompt, *write_plainly(base, tuple(prompt), LIMIT, sampling, 7, n).tokens]
        for n, prompt in enumerate(prompts)
    ]
    shape = TreeShape(6, 2, 14, fixed=True)
    setup = Setup(base, None, stages, layout, shape, drafter=knowing(base, known), links=links)
    draft_rounds = await compare(setup, prompts, sampling, shared=17)
    assert sum(draft_rounds) / len(draft_rounds) > 2, "deep paths must really have been accepted"


async def test_law_1_where_stages_take_turns(models):
    base, head = models
    setup = Setup(base, head, 2, links="unix", max_in_flight=1)
    await compare(setup, prompts_of(4, shared=21), WARM, shared=21)


@pytest.mark.parametrize(("stages", "links"), some([(1, "local"), (3, "local"), (2, "unix")], 1))
async def test_law_1_when_everything_rides_along_from_neighbour_to_neighbour(models, stages, links):
    """Taps go round to the stages that tap, drafts come to stage 0 from the last one."""
    base, head = models
    setup = Setup(base, head, stages, links=links, comm_mode="ring")
    async with ring_of(setup) as ring:
        texts = await ring.write_all(prompts_of(4), LIMIT, GREEDY)
        drafted = ring.drafts
    check_texts(base, prompts_of(4), texts, LIMIT, GREEDY)
    assert drafted, "trees must really have come to stage 0"


@pytest.mark.parametrize(
    ("links", "mode"), some([("local", "p2p"), ("grpc", "p2p"), ("local", "ring"), ("unix", "ring")], 0, 3)
)
async def test_law_1_and_4_a_drafter_that_goes_mid_way_changes_nothing(models, links, mode):
    base, head = models
    prompts = prompts_of(6)
    setup = Setup(base, head, 2, links=links, comm_mode=mode, draft_timeout=0.5)  # for the last trees
    async with ring_of(setup) as ring:
        ids = [await ring.open(prompt, limit=LIMIT, seed=7, ordinal=n) for n, prompt in enumerate(prompts)]
        await ring.heard(ids[0], tokens=4)
        ring.leaving["drafter"].set()
        texts = [await ring.written(one) for one in ids]
        assert not ring.broken
    check_texts(base, prompts, texts, LIMIT, GREEDY)
