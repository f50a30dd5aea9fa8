"""Law 1 over a covering array: every two settings meet in a ring that writes what plain decoding writes.

Plain decoding is Transformers' for a base as it is; under a policy, or in fewer bits, it is that of a ring of
one stage without a drafter. The grids that vary a few settings fully are run by `make test-all`.
A new setting of a ring is a factor of this array, not a grid of its own: the array grows by a few rows, a
grid multiplies.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import pytest

from specsot.drafting import DraftOptions
from specsot.members import TreeShape
from specsot.params import MAX_TOKENS, HeadImportance, HeadWindows, Pruning, Sampling, Window
from specsot.service.options import DraftModelOptions
from specsot.transport.wire.values import MAX_NODES
from specsot_drafter.drafter import Drafter
from specsot_drafter.loader import DraftLoader
from tests.conftest import some
from tests.laws.drafters import hostile, knowing
from tests.laws.pairs import cover, met, pairs_of
from tests.laws.plain import Excuses, Plain, write_plainly
from tests.laws.ring import Setup, ring_of
from tests.models import SHALLOW

pytestmark = pytest.mark.torch

LIMIT, SHARED = 12, 21  # tokens written; tokens of the forked prefix
FACTORS = {
    "links": ("local", "grpc", "curve", "ipc", "direct"),
    "drafter": ("none", "head", "knowing", "model", "ngram", "suffix", "hostile"),
    "policy": ("full", "window", "pruning", "heads"),
    "stages": ("1", "2", "3"),
    "sampling": ("greedy", "warm", "penalties"),
    "bits": ("fp32", "int8", "int4"),
    "shape": ("small", "deep", "wide"),
    "layout": ("packed", "batched"),
    "mode": ("p2p", "ring"),
    "prefix": ("forked", "own"),
    "frames": ("one", "stages", "short"),
}
# Frames in flight at most (None: one more than there are stages), and tokens of a frame at most.
FRAMES = {"one": (1, 512), "stages": (None, 512), "short": (6, 24)}
SAMPLINGS = {
    "greedy": Sampling(),
    "warm": Sampling(temperature=0.8, top_p=0.95, top_k=40),
    "penalties": Sampling(
        temperature=0.8, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias=((3, 2.5), (17, -4.0)),
    ),
}  # fmt: skip
SHAPES = {
    "small": TreeShape(3, 3, 8, fixed=True),
    "deep": TreeShape(6, 2, 14, fixed=True),
    "wide": TreeShape(2, 4, 9, fixed=True),
}
POLICIES = {
    "full": {},
    "window": {"window": Window(4, 24)},
    "pruning": {"pruning": Pruning(0.5, 16, 1)},
    "heads": {
        "heads": HeadWindows(tuple(((0, 1 + layer), (4, MAX_TOKENS)) for layer in range(SHALLOW.layers)))
    },
    "importance": {
        "pruning": Pruning(0.8, 16, 0),
        "importance": HeadImportance(tuple((layer / SHALLOW.layers, 1.0) for layer in range(SHALLOW.layers))),
    },
}
NUMBA = find_spec("numba") is not None
WRITTEN = "policy", "bits", "sampling"  # what decides what is written


def allowed(row: dict[str, str]) -> bool:
    """Fewer bits need numba; the prefix that these forks share has no policy, so they have none either."""
    return (NUMBA or row.get("bits", "fp32") == "fp32") and not (
        row.get("policy", "full") != "full" and row.get("prefix") == "forked"
    )


def written_with_others(row: dict[str, str]) -> bool:
    """A third of what decides, in which every two of it meet: each text is written plainly once, for all."""
    places = [FACTORS[name].index(row[name]) for name in WRITTEN if name in row]
    return allowed(row) and (not NUMBA or len(places) < len(WRITTEN) or sum(places) % 3 == 0)


# Left to `make test-all`: `ipc`, as `curve` has ZMQ sockets, too; `ngram` and `suffix`, which test_forks has;
# and `hostile`, which test_drafters has.
LEFT = {"links": ("ipc",), "drafter": ("ngram", "suffix", "hostile")}
USUAL = {
    name: tuple(one for one in values if one not in LEFT.get(name, ())) for name, values in FACTORS.items()
}
# Pruning by the importance of heads takes the paths of "pruning" and of "heads", so it meets the other
# settings in two rows of its own: over links that encode openings, and with drafts that are accepted.
BY_IMPORTANCE: tuple[dict[str, str], ...] = (
    {
        "links": "grpc", "drafter": "knowing", "policy": "importance", "stages": "2", "sampling": "warm",
        "bits": "fp32", "shape": "deep", "layout": "packed", "mode": "ring", "prefix": "own",
        "frames": "stages",
    },
    {
        "links": "local", "drafter": "head", "policy": "importance", "stages": "3", "sampling": "greedy",
        "bits": "fp32", "shape": "small", "layout": "batched", "mode": "p2p", "prefix": "own",
        "frames": "short",
    },
)  # fmt: skip
ROWS, GRID = cover(USUAL, written_with_others), cover(FACTORS, allowed)


def test_every_pair_of_settings_meets_in_a_row() -> None:
    for rows, factors in ((ROWS, USUAL), (GRID, FACTORS)):
        assert {pair for row in rows for pair in met(row)} >= pairs_of(factors, allowed)
        assert all(allowed(dict(pair)) for row in rows for pair in combinations(row.items(), 2))
        assert len(rows) <= 36
    assert len({tuple(row[name] for name in WRITTEN) for row in ROWS}) <= 12


def prompts_of(count: int) -> list[list[int]]:
    """A beginning they share; some repeat themselves, so that there is something to look up."""
    rng = random.Random(3)
    prefix = [rng.randrange(200) for _ in range(SHARED)]
    return [prefix + [rng.randrange(200) for _ in range(1 + 5 * n)] * (1 + n % 2) for n in range(count)]


class Plainly:
    """What is written plainly, once for each of: policy, bits, sampling."""

    def __init__(self, base: Path) -> None:
        self._base, self._known = base, dict[tuple[str, str, str], list[Plain]]()

    async def texts(self, row: dict[str, str]) -> list[Plain]:
        key = row["policy"], row["bits"], row["sampling"]
        if key not in self._known:
            self._known[key] = await self._write(*key)
        return self._known[key]

    async def _write(self, policy: str, bits: str, sampling: str) -> list[Plain]:
        prompts, how = prompts_of(3), SAMPLINGS[sampling]
        if (policy, bits) == ("full", "fp32"):
            return [write_plainly(self._base, tuple(one), LIMIT, how, 7, n) for n, one in enumerate(prompts)]
        async with ring_of(Setup(self._base, quantization=bits_of(bits))) as ring:
            texts = await ring.write_all(prompts, LIMIT, how, **POLICIES[policy])
        return [Plain(tuple(text), (1.0,) * LIMIT) for text in texts]


def bits_of(bits: str):
    return None if bits == "fp32" else bits


@pytest.fixture(scope="module")
def plainly(models: tuple[Path, Path]) -> Plainly:
    return Plainly(models[0])


def drafter_of(kind: str, models: tuple[Path, Path], known: list[list[int]], most: int):
    """Who drafts, but for nobody and a head: a model that is the base, repetition, one that knows, one that
    knows and spoils its trees. most: nodes of one of these.
    """
    base, _ = models
    if kind == "hostile":
        return hostile(base, known, most)
    if kind == "knowing":
        return knowing(base, known, skill=0.9)
    if kind not in ("model", "ngram", "suffix"):
        return None

    def make(name, address, dialer, compute):
        options = DraftOptions("linear", depth=4, tuner="fixed") if kind == "model" else DraftOptions()
        draft = base if kind == "model" else None
        drafts = DraftModelOptions(
            base, dtype="fp32", kv_memory=1 << 26, drafter=kind, draft_model=draft, drafting=options
        )
        return Drafter(DraftLoader(drafts, name, address), dialer, compute)

    return make


async def test_every_policy_matters(plainly: Plainly) -> None:
    matter = ("window", "penalties"), ("pruning", "warm"), ("heads", "greedy"), ("importance", "greedy")
    for policy, sampling in matter:
        row = {"bits": "fp32", "sampling": sampling}
        assert await plainly.texts(row | {"policy": policy}) != await plainly.texts(row | {"policy": "full"})


ALL_ROWS = *ROWS, *BY_IMPORTANCE, *GRID


@pytest.mark.parametrize(
    "row",
    some(ALL_ROWS, *range(len(ROWS) + len(BY_IMPORTANCE))),
    ids=["-".join(row.values()) for row in ALL_ROWS],
)
async def test_law_1_every_two_settings(models, plainly: Plainly, row: dict[str, str]) -> None:
    base, head = models
    prompts, plain, excuses = prompts_of(3), await plainly.texts(row), Excuses()
    known = [[*prompt, *one.tokens] for prompt, one in zip(prompts, plain)]
    max_in_flight, rows = FRAMES[row["frames"]]
    # A message with more nodes ends the link between two processes, and nothing else.
    most = 5000 if row["links"] == "local" else MAX_NODES
    with ThreadPoolExecutor(1) as thread:
        setup = Setup(
            base,
            head if row["drafter"] == "head" else None,
            int(row["stages"]),
            row["layout"],
            SHAPES[row["shape"]],
            rows=rows,
            drafter=drafter_of(row["drafter"], models, known, most),
            links=row["links"],
            comm_mode=row["mode"],
            quantization=bits_of(row["bits"]),
            draft_timeout=0.2 if row["drafter"] == "hostile" else 10.0,
            reading=thread if row["links"] == "direct" else None,  # as on GPUs
            max_in_flight=max_in_flight,
        )
        async with ring_of(setup) as ring:
            shared = SHARED if row["prefix"] == "forked" else 0
            texts = await ring.write_all(
                prompts, LIMIT, SAMPLINGS[row["sampling"]], shared, **POLICIES[row["policy"]]
            )
            assert not ring.broken
            draft_rounds = [draft_round for text in ring.texts.values() for draft_round in text.draft_rounds]
    for text, one in zip(texts, plain):
        excuses.compare(text, one)
    excuses.settle()
    if row["drafter"] == "knowing" and row["shape"] != "wide" and row["frames"] != "short":
        assert sum(draft_rounds) / len(draft_rounds) > 1.5, "deep paths must really have been accepted"
