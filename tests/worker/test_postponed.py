"""A sequence whose form is still compiled: it waits, with its rows, and nobody else does."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch

from specsot.core.frames import (
    Close,
    End,
    Features,
    Fork,
    Frame,
    Open,
    Opening,
    PromptChunk,
    Result,
    tokens_of,
)
from specsot.core.overlap import OverlapState
from specsot.core.pages import PageTable
from specsot.errors import ModelError
from specsot.members import Configuration, Range, Ready, Stage
from specsot.params import Form
from specsot.transport.links import Arrival, Inbox, LocalLink
from specsot_model.core.kv_plan import plan_frame
from specsot_worker.feature_ring import FeatureRing
from specsot_worker.verifier import Verifier
from specsot_worker.worker import Worker
from tests.worker.one_thread import AnswerMessage, Here

SIZE = 16  # tokens of the vocabulary
HELD, FREE = 1, 2
FORM = Form("json_object")
CONFIGURATION = Configuration(
    1, "w", (Stage("w", "w", Range(0, 1)),), pages=64, page_rows=4, slots=4, rows=6, drafter="d"
)


class Even:
    """Even tokens alone; the state counts them."""

    def start(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return None if token % 2 else state + 1

    def finished(self, state: int) -> bool:
        return False

    def forced(self, state: int) -> tuple[int, ...]:
        return ()

    def mask(self, state: int, remaining: int) -> np.ndarray:
        return np.arange(SIZE) % 2 == 0

    def allows(self, state: int, token: int, remaining: int) -> bool:
        return token % 2 == 0


class Rows:
    """A range without layers: a row holds its token and position, and so does its feature."""

    def __init__(self, configuration: Configuration) -> None:
        self.table, self.layers = PageTable(configuration.pages, configuration.page_rows), Range(0, 1)

    def tap(self, layer: int, weight: object) -> None: ...

    def prompt_rows(self, rows: int) -> int:
        return rows

    def pause_compute_timer(self) -> None: ...

    def capture(self) -> None: ...

    def run(self, frame):
        places = plan_frame(self.table, frame).positions
        tokens = [token for segment in frame.segments for token in tokens_of(segment)]
        rows = torch.tensor(list(zip(tokens, places))) if tokens else None
        return replace(frame, hidden=rows, fused=rows, seconds=(0.1,))


class Provider:
    name, vocabulary = "w", SIZE

    def __init__(self, grammar: object) -> None:
        self.grammar = grammar

    def make_stage(self, configuration: Configuration, layers: Range) -> Rows:
        return Rows(configuration)

    def make_verifier(self, stage: Rows, configuration: Configuration) -> Verifier:
        store = FeatureRing(2, torch.int64, "cpu")
        return Verifier(self.logits, self.find, store)

    def find(self, opening: Opening):
        if opening.form and isinstance(self.grammar, Exception):
            raise self.grammar
        return self.grammar if opening.form else None

    def logits(self, rows):
        """Mostly odd tokens."""
        scores = torch.zeros(len(rows), SIZE)
        for row, (token, place) in zip(scores, rows.tolist()):
            row[(token * 5 + place * 2 + 1) % SIZE], row[(token + place) * 2 % SIZE] = 2.0, 1.0
        return scores


class Near:
    """A `ColocatedDrafter`, and its handle: it records the features that it is given, and drafts nothing."""

    state = OverlapState.IDLE

    def __init__(self, said: AnswerMessage) -> None:
        self._error_text = said

    def start_drafts(self, verification=None):
        return self

    def discard(self, sequence): ...

    def result(self, features, meanwhile):
        self._error_text += features
        meanwhile()
        return ()


def test_a_result_is_announced_before_a_drafter_on_this_thread_drafts() -> None:
    provider, events = Provider(None), AnswerMessage()
    stage = provider.make_stage(CONFIGURATION, Range(0, 1))
    verifier = provider.make_verifier(stage, CONFIGURATION)
    verifier.colocated.drafter = Near(events)  # type: ignore[assignment]
    prompt = PromptChunk(HELD, 0, (1, 2), True)
    frame = stage.run(Frame(1, 1, (Opening(HELD, 2, limit=9, drafted=True),), (prompt,)))
    verified = verifier.verify(frame, announce=events.append)
    assert verified.drafts == ()
    announced, features = events
    assert announced is verified.result
    assert features.feature_batches


class Lone:
    """One worker that is the whole ring, with a drafter that listens."""

    def __init__(self, grammar: object) -> None:
        self.said = AnswerMessage()
        self.part = Worker(Provider(grammar), self.said, Here(), clock=lambda: 0.0)

    async def open(self, sequence: int, **more) -> None:
        prompt = tuple(range(sequence, sequence + 9))  # takes two frames
        opening = Opening(sequence, len(prompt), limit=12, drafted=sequence == HELD, **more)
        await self.order(Open(opening, prompt, 100))

    async def order(self, order) -> None:
        await self.part.handle(Arrival("master", order))

    async def turn(self, steps: int = 100) -> float | None:
        """So many steps, or until nothing is due; when it wants to be called again."""
        wait: float | None = 0.0
        while steps and wait == 0.0:
            wait, steps = await self.part.run_due(), steps - 1
        return wait

    def ends(self) -> dict[int, End]:
        outcomes = [one for said in self.said if isinstance(said, Result) for one in said.outcomes]
        return {one.sequence: one.end for one in outcomes if one.end}

    def written(self, sequence: int) -> list[int]:
        outcomes = [one for said in self.said if isinstance(said, Result) for one in said.outcomes]
        return [token for one in outcomes if one.sequence == sequence for token in one.tokens]

    def taught(self) -> list[tuple[int, int]]:
        """(token, position) of everything the drafter was told."""
        told = [said.rows for said in self.said if isinstance(said, Features) and said.rows is not None]
        return [tuple(row) for rows in told for row in rows.to("cpu").tolist()]


async def lone(grammar: object, near: bool = False, draft_timeout: float = 0.0) -> Lone:
    """near: its drafter is on the same thread."""
    ring = Lone(grammar)
    if near:
        ring.said.drafter = LocalLink("w", Inbox(), drafter=Near(ring.said))  # type: ignore[assignment]
    await ring.part.configure(replace(CONFIGURATION, draft_timeout=draft_timeout), ring.said)
    assert ring.said.pop() == Ready(1)
    ring.said.clear()
    await ring.open(HELD, form=FORM)
    await ring.open(FREE)
    return ring


async def test_a_drafter_on_the_same_thread_has_sent_everything_when_it_is_queried() -> None:
    """What it says nothing of is not waited for, as another drafter's trees are."""
    far, near = await lone(Even(), False, 1.0), await lone(Even(), True, 1.0)
    assert await far.turn() == 1.0
    assert len(far.written(HELD)) == 1
    assert await near.turn() is None
    assert len(near.written(HELD)) == 12


async def test_a_slow_grammar_stalls_no_other_sequence() -> None:
    coming: Future[Even] = Future()
    ring = await lone(coming)
    soon = await ring.turn()
    assert (len(ring.written(FREE)), ring.written(HELD)) == (12, [])
    assert 0 < (soon or 0) < 0.1, "it looks again, but not all the time"
    coming.set_result(Even())
    assert await ring.turn() is None
    assert len(ring.written(HELD)) == 12
    assert not any(token % 2 for token in ring.written(HELD))


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("steps", range(1, 14))
async def test_whenever_a_grammar_arrives_the_sequence_and_its_features_are_the_same(
    steps: int, near: bool
) -> None:
    coming: Future[Even] = Future()
    prompt, late = await lone(Even()), await lone(coming, near)
    await prompt.turn()
    await late.turn(steps)
    coming.set_result(Even())
    await late.turn()
    for sequence in (HELD, FREE):
        assert late.written(sequence) == prompt.written(sequence)
    assert late.taught() == prompt.taught()
    if near:
        inbox = late.said.drafter._inbox  # type: ignore[attr-defined]
        assert not inbox.arrived(), "all of it is told in one way, and so in order"


async def test_who_is_closed_meanwhile_is_forgotten() -> None:
    coming: Future[Even] = Future()
    ring = await lone(coming)
    await ring.turn()
    await ring.order(Close(HELD))
    assert await ring.turn() is None
    coming.set_result(Even())
    assert await ring.turn() is None
    assert ring.written(HELD) == []
    assert ring.part.free_pages == CONFIGURATION.pages


@pytest.mark.parametrize("steps", [0, 1, 5])
async def test_law_6_a_fork_of_a_held_sequence_is_refused_without_effect_on_others(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No master does. Its drafter, which wants no features, was told of tokens that were not there."""
    monkeypatch.setattr(Provider, "make_verifier", lambda self, *_: Verifier(self.logits, self.find))
    coming: Future[Even] = Future()
    ring = await lone(coming)
    await ring.turn(steps)
    await ring.order(Open(Opening(3, 10, Fork(HELD, 8), limit=40), (3, 4), 100))
    await ring.turn(5)
    coming.set_result(Even())
    await ring.turn()
    assert ring.ends() == {3: End.FAILED, FREE: End.LENGTH, HELD: End.LENGTH}
    assert ring.part.free_pages == CONFIGURATION.pages


class Panic(BaseException):
    """As the library's own ones, it is no Exception."""


class Broken(Even):
    """One of its methods fails, from the n-th time on."""

    vocabulary = range(SIZE)  # type: ignore[assignment]

    def __init__(self, method: str, times: int, error: BaseException) -> None:
        whole, left = getattr(self, method), iter(range(times))

        def fail(*given):
            if next(left, None) is None:
                raise error
            return whole(*given)

        setattr(self, method, fail)


def failed(error: BaseException) -> Future:
    coming: Future[Even] = Future()
    coming.set_exception(error)
    return coming


@pytest.mark.parametrize(
    "grammar",
    [
        *(
            Broken(name, 0, ValueError("a bug"))
            for name in ("start", "advance", "finished", "forced", "mask", "allows")
        ),
        *(Broken(name, 3, Panic("a bug")) for name in ("advance", "finished", "forced", "mask", "allows")),
        ModelError("tokenizer.json: WordPiece is neither byte-level nor has byte fallback"),
        failed(ModelError("no tokens for the language")),
    ],
    ids=lambda grammar: type(grammar).__name__,
)
@pytest.mark.parametrize("late", [False, True])
async def test_law_6_a_failing_grammar_ends_only_its_own_sequence(grammar, late: bool) -> None:
    free = await lone(Even())
    await free.turn()
    coming: Future = Future()
    ring = await lone(coming if late and not isinstance(grammar, Exception) else grammar)
    if late:
        await ring.turn(2)
        if isinstance(grammar, Future):
            coming.set_exception(grammar.exception())
        elif not isinstance(grammar, Exception):
            coming.set_result(grammar)
    await ring.turn()
    assert ring.ends() == {HELD: End.FAILED, FREE: End.LENGTH}
    assert ring.written(FREE) == free.written(FREE)
    assert not any(token % 2 for token in ring.written(HELD)), "nothing that its grammar forbids was told"
    assert ring.part.free_pages == CONFIGURATION.pages
