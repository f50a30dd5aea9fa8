"""Law 1 with trees that travel in parts: stages compute parts of one tree at a time, and no token changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from specsot.core.frames import Frame
from specsot.members import TreeShape
from specsot.params import Sampling
from specsot.transport.wire.values import MAX_NODES
from specsot_worker.observer import WorkerObserver
from specsot_worker.worker import Worker
from tests.cut_trees import cut_into
from tests.laws.drafters import add_sometimes, hostile, knowing
from tests.laws.plain import Excuses, Plain, write_plainly
from tests.laws.ring import Setup, ring_of
from tests.laws.test_pairs import NUMBA, SAMPLINGS, prompts_of
from tests.model.tiny import write_model
from tests.models import SHALLOW, write_base

pytestmark = pytest.mark.torch

LIMIT = 12
DEEP = TreeShape(6, 2, 14, fixed=True)


@dataclass
class Cuts(WorkerObserver):
    """Counts the frames that a stage computes: (part, last part)."""

    seen: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])

    def computed(self, frame: Frame, seconds: float) -> None:
        self.seen[frame.part, frame.last_part] += 1


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as one:
        yield one


def plain_texts(base: Path, sampling: Sampling) -> list[Plain]:
    return [write_plainly(base, tuple(prompt), LIMIT, sampling, 7, 0) for prompt in prompts_of(3)]


async def compare(setup: Setup, sampling: Sampling, plain: list[Plain]) -> Counter[tuple[int, int]]:
    """Write the prompts one after the other; return the parts that the last stage computed."""
    excuses, cuts = Excuses(), Cuts()
    last = f"worker-{setup.stages - 1}"
    setup = replace(setup, watch=lambda name: cuts if name == last else None)
    async with ring_of(setup) as ring:
        for prompt, wanted in zip(prompts_of(3), plain):
            sequence = await ring.open(prompt, limit=LIMIT, sampling=sampling, seed=7)
            excuses.compare(await ring.written(sequence), wanted)
        assert not ring.broken
    excuses.settle()
    return cuts.seen


@pytest.mark.parametrize(
    ("stages", "parts", "links", "layout", "sampling", "drafter"),
    [
        (1, 3, "local", "packed", "greedy", "knowing"),
        (2, 2, "grpc", "batched", "warm", "knowing"),
        (2, 8, "local", "packed", "penalties", "knowing"),
        (3, 3, "curve", "packed", "greedy", "hostile"),
        (3, 4, "local", "batched", "warm", "hostile"),
        (4, 3, "grpc", "packed", "greedy", "head"),
        (2, 3, "direct", "packed", "greedy", "hostile"),
        (4, 64, "local", "batched", "greedy", "knowing"),
    ],
)
async def test_law_1_trees_in_parts(models, thread, stages, parts, links, layout, sampling, drafter) -> None:
    base, head = models
    how = SAMPLINGS[sampling]
    plain = plain_texts(base, how)
    known = [[*prompt, *one.tokens] for prompt, one in zip(prompts_of(3), plain)]
    most = 500 if links == "local" else MAX_NODES
    makers = {"knowing": knowing(base, known, skill=0.9), "hostile": hostile(base, known, most), "head": None}
    setup = Setup(
        base,
        head if drafter == "head" else None,
        stages,
        layout,
        DEEP,
        drafter=makers[drafter],
        links=links,
        draft_timeout=0.2 if drafter == "hostile" else 10.0,
        reading=thread if links == "direct" else None,  # as on GPUs
        make_depth=cut_into(parts),
    )
    seen = await compare(setup, how, plain)
    assert any(last for _, last in seen), "some trees really travelled in parts"


FAMILIES = {
    "sliding windows": (
        "gemma3_text",
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "gated delta layers": ("qwen3_next", {"num_hidden_layers": 6, "layer_types": None}),
    "latent attention": ("deepseek_v3", {"num_hidden_layers": 4}),
}


@pytest.mark.parametrize("family", FAMILIES)
async def test_law_1_trees_in_parts_of_other_layers(tmp_path: Path, family: str) -> None:
    kind, more = FAMILIES[family]
    write_model(tmp_path, kind, vocab_size=200, **more)
    plain = plain_texts(tmp_path, Sampling())
    known = [[*prompt, *one.tokens] for prompt, one in zip(prompts_of(3), plain)]
    drafter = knowing(tmp_path, known, skill=0.9)
    setup = Setup(tmp_path, None, 2, shape=DEEP, drafter=drafter, make_depth=cut_into(3))
    seen = await compare(setup, Sampling(), plain)
    assert seen[1, 2], "second parts were computed"


@pytest.mark.skipif(not NUMBA, reason="fewer bits need numba")
async def test_law_1_trees_in_parts_in_int8_write_what_whole_trees_write(models) -> None:
    base, _ = models
    async with ring_of(Setup(base, quantization="int8")) as ring:
        plain = [Plain(tuple(text), (1.0,) * LIMIT) for text in await ring.write_all(prompts_of(3), LIMIT)]
    known = [[*prompt, *one.tokens] for prompt, one in zip(prompts_of(3), plain)]
    setup = Setup(
        base,
        None,
        3,
        shape=DEEP,
        drafter=knowing(base, known),
        quantization="int8",
        make_depth=cut_into(4),
    )
    await compare(setup, Sampling(), plain)


async def test_law_1_a_draft_with_non_finite_rows_in_another_part_changes_no_token(models, tmp_path) -> None:
    """Its rows meet those of later parts in the KV pages."""
    plain = plain_texts(models[0], Sampling())
    texts = [[*prompt, *one.tokens] for prompt, one in zip(prompts_of(3), plain)]
    bad = next(token for token in range(200) if not any(token in text for text in texts))
    base = write_base(tmp_path / "base", SHALLOW, poison=bad)
    drafter = knowing(base, texts, vary=partial(add_sometimes, bad))
    await compare(Setup(base, None, 2, drafter=drafter, make_depth=cut_into(8)), Sampling(), plain)


async def test_parts_that_do_not_matter_any_more_are_not_computed_by_the_last_stage(models) -> None:
    base, _ = models
    plain = plain_texts(base, Sampling())
    known = [[*prompt, *one.tokens] for prompt, one in zip(prompts_of(3), plain)]
    right, wrong = [
        await compare(
            Setup(base, None, 2, shape=DEEP, drafter=knowing(base, known, skill), make_depth=cut_into(4)),
            Sampling(),
            plain,
        )
        for skill in (1.0, 0.0)
    ]
    assert right[3, 3]
    assert not wrong[3, 3]
    assert wrong[0, 3]


async def test_law_4_cancels_between_parts_change_no_other_text(models) -> None:
    base, _ = models
    plain = plain_texts(base, Sampling())
    known = [[*prompt, *one.tokens] for prompt, one in zip(prompts_of(3), plain)]
    setup = Setup(base, None, 3, shape=DEEP, drafter=knowing(base, known), make_depth=cut_into(3))
    async with ring_of(setup) as ring:
        free = [part.free_pages for part in ring.parts.values() if isinstance(part, Worker)]
        for cut_after in range(1, 12):
            sequence = await ring.open(prompts_of(3)[2], limit=LIMIT, seed=7)
            await ring.heard(sequence, cut_after)
            await ring.close(sequence)
        sequence = await ring.open(prompts_of(3)[0], limit=LIMIT, seed=7)
        assert tuple(await ring.written(sequence)) == plain[0].tokens
        while free != [part.free_pages for part in ring.parts.values() if isinstance(part, Worker)]:
            await ring.let_others_run()
        assert not ring.broken


@pytest.mark.parametrize("part", [0, 1])
async def test_law_4_a_stage_that_goes_between_parts_ends_the_epoch_with_a_reason(models, part: int) -> None:
    base, _ = models
    plain = plain_texts(base, Sampling())
    known = [[*prompt, *one.tokens] for prompt, one in zip(prompts_of(3), plain)]
    leaving: list[asyncio.Event] = []

    class Leaves(WorkerObserver):
        """The middle stage goes once it has computed this part."""

        def computed(self, frame: Frame, seconds: float) -> None:
            if (frame.part, frame.last_part) == (part, 2):
                leaving[0].set()

    setup = Setup(
        base,
        None,
        3,
        shape=DEEP,
        drafter=knowing(base, known),
        watch=lambda name: Leaves() if name == "worker-1" else None,
        make_depth=cut_into(3),
    )
    async with ring_of(setup) as ring:
        leaving.append(ring.leaving["worker-1"])
        sequence = await ring.open(prompts_of(3)[0], limit=LIMIT, seed=7)
        written = await ring.written(sequence)
        assert ring.broken
        assert tuple(written) == plain[0].tokens[: len(written)]
