"""A model that was trained to fork writes with a ring what the published procedure makes by Transformers.

The whole system in one process, on the tiny model of `tests/forking`: it writes its tags itself.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specsot.core.frames import Frame, PromptChunk, TreeSegment
from specsot.events import (
    BranchFinished,
    BranchStarted,
    BranchText,
    Event,
    Finished,
    MergedText,
    Planned,
    Reason,
)
from specsot.members import TreeShape
from specsot.params import Ask, DrafterName, Limits, Sampling
from specsot.service.membership import RingMember
from specsot.service.options import DraftModelOptions
from specsot.transport.links import Dialer
from specsot_app.fleet.embedded import EmbeddedFleet, EmbeddedOptions, MemberMaker
from specsot_drafter.drafter import Drafter
from specsot_drafter.loader import DraftLoader
from specsot_master.core.ring.ring_state import RingOptions
from specsot_worker.loader import StageLoader
from specsot_worker.observer import WorkerObserver
from specsot_worker.worker import Worker
from tests import forking
from tests.conftest import some
from tests.exact import pick, times_of
from tests.laws.plain import load
from tests.master.stage import of

pytestmark = pytest.mark.timeout(300)

GREEDY, WARM = Sampling(), Sampling(temperature=1.0, top_p=0.95)
MOST = 200  # tokens of a sequence, should it never end


@torch.inference_mode()
def write(
    base: Path, prompt: Sequence[int], stops: set[int], sampling: Sampling, seed: int, ordinal: int
) -> list[int]:
    """What plain decoding writes up to one of these tokens."""
    model, tokens, past, read = load(base), list(prompt), None, 0
    while len(tokens) < len(prompt) + MOST:
        out = model(input_ids=torch.tensor([tokens[read:]]), past_key_values=past, use_cache=True)
        past, read = out.past_key_values, len(tokens)
        times = times_of(prompt, tokens[len(prompt) :])
        tokens.append(pick(out.logits[0, -1], sampling, times, seed, ordinal, len(tokens)))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def weave(base: Path, prompt: Sequence[int], sampling: Sampling, seed: int) -> list[int]:
    """The answer by the procedure that ThreadWeaver publishes, one thread after another."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    outlined, closed, end = (tokenizer.token_to_id(one) for one in ("</Outlines>", "</Thread>", forking.END))
    context, threads = list(prompt), 0
    while True:
        context += write(base, context, {outlined, end}, sampling, seed, 0)
        if context[-1] != outlined:
            return context[len(prompt) :]
        block = tokenizer.decode(context, skip_special_tokens=False).rpartition("<Outlines>")[2]
        numbers = tuple(dict.fromkeys(re.findall(r"<Outline>\s*([0-9]+(?:\.[0-9]+)*)\s*:", block)))
        begun = tuple(context)
        for place, number in enumerate(numbers):
            head = tokenizer.encode(f"\n<Thread>\n{number}:", add_special_tokens=False).ids
            text = write(base, (*begun, *head), {closed, end}, sampling, seed, threads := threads + 1)
            assert text[-1] == closed
            joined = tokenizer.encode(f"<Thread>\n{number}:", add_special_tokens=False).ids if place else head
            context += (*joined, *text)
        context += tokenizer.encode("\n", add_special_tokens=False).ids


class Watch(WorkerObserver):
    """Keeps all frames that stage 0 sends."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def launched(self, frame: Frame, now: float) -> Frame:
        self.frames.append(frame)
        return frame


@asynccontextmanager
async def fleet(
    base: Path, watch: Watch, drafter: DrafterName, head: Path | None = None, stages: int = 2
) -> AsyncIterator[EmbeddedFleet]:
    weights = DraftModelOptions(base, dtype="fp32", kv_memory=1 << 26, drafter=drafter, draft_model=head)
    ring = RingOptions(page_rows=16, shape=TreeShape(4, 3, 12, fixed=True), draft_timeout=30.0)
    options = EmbeddedOptions(weights, ring, stages)

    def worker(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        looks = watch if name == "worker-0" else None
        return Worker(StageLoader(options.member_options(name), name), dialer, compute, observer=looks)

    def draft(name: str, dialer: Dialer, compute: Executor) -> RingMember:
        return Drafter(DraftLoader(options.member_options(name), name), dialer, compute)

    parts: dict[str, MemberMaker] = {f"worker-{n}": worker for n in range(stages)} | (
        {"drafter": draft} if options.drafts else {}
    )
    opened = await EmbeddedFleet.start(options, parts)
    try:
        yield opened
    finally:
        await opened.close()


async def events_of(opened: EmbeddedFleet, ask: Ask) -> list[Event]:
    return [numbered.event async for numbered in opened.generate(ask)]


def ask_for(things: Sequence[str], sampling: Sampling = GREEDY, seed: int = 3) -> Ask:
    limits, asked = Limits(max_new_tokens=400), forking.question(things)
    return Ask(prompt=asked, sampling=sampling, seed=seed, limits=limits, skip_special_tokens=False)


@cache
def expected(
    base: Path, things: tuple[str, ...], sampling: Sampling, seed: int
) -> tuple[tuple[int, ...], str]:
    """Tokens and text of an answer, without the end token."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    prompt = tokenizer.encode(forking.prompt_of(things), add_special_tokens=False).ids
    tokens = weave(base, prompt, sampling, seed)[:-1]
    return tuple(tokens), tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE head for the model, which knows nothing of it."""
    return forking.write_eagle_head(tmp_path_factory.mktemp("head") / "head")


@pytest.mark.parametrize("drafter", ["eagle", "suffix", "none"])
async def test_a_ring_writes_what_the_published_procedure_does(head: Path, drafter: DrafterName) -> None:
    watch, base, things = Watch(), forking.MODEL, forking.held_out()[-1]
    async with fleet(base, watch, drafter, head if drafter == "eagle" else None) as opened:
        events = await events_of(opened, ask_for(things))
    tokens, text = expected(base, things, GREEDY, 3)
    assert text == forking.answer_of(things), "it has learned it"
    (finished,) = of(Finished, events)
    assert (finished.text, finished.tokens) == (text, tokens)
    assert finished.reason is Reason.STOP
    assert "".join(one.text for one in of(MergedText, events)) == text
    check_events(events, things)
    check_frames(watch.frames, len(things))


def check_events(events: list[Event], things: Sequence[str]) -> None:
    """A fork, threads side by side, their join, and what is behind it."""
    (planned,) = of(Planned, events)
    assert [one.title for one in planned.points] == list(things)
    turns = [type(one) for one in events if isinstance(one, BranchStarted | BranchFinished)]
    assert turns == [BranchStarted] * len(things) + [BranchFinished] * len(things)
    for id, thing in enumerate(things, 1):
        body = "".join(one.text for one in of(BranchText, events) if one.branch == id)
        assert body == forking.thread(id, thing)[1].removesuffix("</Thread>")
    over = max(n for n, one in enumerate(events) if isinstance(one, BranchFinished))
    concluded = "".join(one.text for one in events[over:] if isinstance(one, MergedText))
    assert concluded.endswith(forking.concluded(things).removesuffix(forking.END))


def check_frames(frames: list[Frame], count: int) -> None:
    """Threads fork one prefix, share frames, and what joins them reads no more than they wrote."""
    openings = [one for frame in frames for one in frame.openings if one.decodes]
    solo, *threads, joined = openings
    assert [one.ordinal for one in openings] == [0, *range(1, count + 1), 0]
    (fork,) = {one.fork for one in threads}
    assert fork is not None
    assert fork.length > solo.prompt
    assert joined.fork == fork, "what was before the threads is not read again"
    read = {one.sequence: 0 for one in openings}
    for segment in (one for frame in frames for one in frame.segments):
        if isinstance(segment, PromptChunk) and segment.sequence in read:
            read[segment.sequence] += len(segment.tokens)
    assert read[joined.sequence] == joined.prompt - fork.length
    ids = {one.sequence for one in threads}
    beside = [
        {one.sequence for one in frame.segments if isinstance(one, TreeSegment)} & ids for frame in frames
    ]
    assert set().union(*(one for one in beside if len(one) > 1)) == ids, "each beside another"


@pytest.mark.parametrize("seed", some([4, 6], 0))
async def test_a_seed_draws_every_thread_by_itself(seed: int) -> None:
    things = forking.held_out()[8]
    async with fleet(forking.MODEL, Watch(), "suffix", stages=1) as opened:
        events = await events_of(opened, ask_for(things, WARM, seed))
    tokens, text = expected(forking.MODEL, things, WARM, seed)
    (finished,) = of(Finished, events)
    assert (finished.text, finished.tokens) == (text, tokens)


@pytest.mark.full
async def test_it_learns_to_fork_anew(tmp_path: Path) -> None:
    base = forking.train(tmp_path / "base")
    things = forking.held_out()[4]
    async with fleet(base, Watch(), "none", stages=1) as opened:
        events = await events_of(opened, ask_for(things))
    (finished,) = of(Finished, events)
    assert finished.text == forking.answer_of(things)
    assert len(of(BranchStarted, events)) == len(things)
