"""A worker that begins steps by itself, alone and with a drafter on its own thread."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specsot.core.frames import Drafts, Lease
from specsot.errors import Unavailable
from specsot.members import Configuration, Range, Ready, Stage
from specsot.transport.links import Arrival, Inbox, LocalLink
from specsot_drafter.drafter import Drafter
from specsot_drafter.proposers import Proposer
from specsot_model.decoder import Decoder
from specsot_worker import sampling, stage_timers, verifier
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier
from specsot_worker.worker import Worker
from tests.eager_steps import EagerSteps
from tests.models import Shape, write_base
from tests.worker.one_thread import AnswerMessage, Heads, Here
from tests.worker.test_next_step import (
    LEASE,
    PAGE,
    PAGES,
    SHAPE,
    Choosing,
    Erring,
    engine_of,
    opened,
    tells_early,
    write,
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    base = write_base(tmp_path_factory.mktemp("base"), Shape(layers=4))
    return Decoder.load(base, None, torch.float32, "cpu")


class Provider:
    """See `StageProvider`: one stage of this decoder, which runs by steps as graphs do."""

    name, vocabulary, loaded, fetched = "w", 200, 0, 0

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    accepts_device_trees = False

    def make_stage(self, configuration: Configuration, layers: Range) -> DecoderStage:
        self.stage = DecoderStage(self._decoder, configuration.pages, configuration.page_rows)
        if self.accepts_device_trees:
            self.stage.tap(2, torch.ones(4, self._decoder.config.hidden))
        self.steps = EagerSteps(self._decoder, self.stage._kv, self.stage._taps, self.accepts_device_trees)
        self.stage.run_by(self.steps)
        return self.stage

    def make_verifier(self, stage: DecoderStage, configuration: Configuration) -> Verifier:
        return Verifier(self._decoder.logits, lambda _: None, None, stage)


@pytest.mark.parametrize(("arrived", "turns"), [(False, 3), (True, 31)])
async def test_a_worker_continues_by_itself_while_no_message_has_arrived(
    decoder: Decoder, arrived: bool, turns: int
) -> None:
    """Step for step it takes what has arrived, else, and nothing is begun that this might change."""
    provider, said = Provider(decoder), AnswerMessage()
    part: Any = Worker(provider, said, Here(), clock=lambda: 0.0)  # type: ignore[arg-type]
    part.watch(lambda: arrived)
    stages = (Stage("w", "w", Range(0, decoder.config.layers)),)
    await part.configure(Configuration(1, "w", stages, PAGES, PAGE, slots=1, rows=64), said)
    assert said.pop() == Ready(1)
    said.clear()
    await part.handle(Arrival("master", opened(1)))
    taken = 0
    while await part.run_due() is not None:
        taken += 1
    wanted, *_ = write(decoder, ahead=False)
    assert [token for result in said for one in result.outcomes for token in one.tokens] == wanted[1]
    assert provider.stage.table.free == PAGES
    assert provider.steps.launched == sum(result.rows > 0 for result in said), "none for nothing"
    assert taken == turns


async def test_a_step_that_waits_for_its_lease_has_not_computed_meanwhile(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is begun, and its frame follows when its reader goes on."""
    now = [0.0]
    monkeypatch.setattr(stage_timers, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    provider, said = Provider(decoder), AnswerMessage()
    part: Any = Worker(provider, said, Here(), clock=lambda: 0.0)  # type: ignore[arg-type]
    part.watch(lambda: False)
    stages = (Stage("w", "w", Range(0, decoder.config.layers)),)
    await part.configure(Configuration(1, "w", stages, PAGES, PAGE, slots=1, rows=64), said)
    await part.handle(Arrival("master", replace(opened(1), lease=10)))
    while await part.run_due() is not None:
        pass
    said.clear()
    now[0] = 100.0
    await part.handle(Arrival("master", Lease(1, LEASE)))
    while await part.run_due() is not None:
        pass
    assert len(said) > 2
    assert all(sum(result.seconds) < 50 for result in said)


async def pair_of(
    decoder: Decoder, proposer: Proposer, accepts_device_trees: bool = False
) -> tuple[Any, Drafter, Provider, AnswerMessage, Inbox]:
    """A worker and a drafter on one thread; what the first one says, and what comes to the other's inbox."""
    provider, said, inbox = Provider(decoder), AnswerMessage(), Inbox()
    provider.accepts_device_trees = accepts_device_trees
    drafter = Drafter(Heads(engine_of(proposer)), said, Here())  # type: ignore[arg-type]
    said.drafter = LocalLink("w", inbox, drafter=drafter)
    part: Any = Worker(provider, said, Here(), clock=lambda: 0.0)  # type: ignore[arg-type]
    part.watch(lambda: False)
    stages = (Stage("w", "w", Range(0, decoder.config.layers)),)
    told = Configuration(
        1, "w", stages, PAGES, PAGE, SHAPE.slots, 64, drafter="d", shape=SHAPE, draft_timeout=0.0
    )
    await drafter.configure(replace(told, you="d"), said)
    await part.configure(told, said)
    said.clear()
    return part, drafter, provider, said, inbox


async def test_a_drafter_on_the_same_thread_is_queried_by_the_verifying_stage(decoder: Decoder) -> None:
    """Nothing is sent to it; and a result leaves when the next step has begun."""
    wanted, *_ = write(decoder, ahead=False)
    part, _, provider, said, inbox = await pair_of(decoder, Erring(wanted))
    launched = list[int]()
    send = said.send

    async def note(message: Any) -> None:
        launched.append(provider.steps.launched)
        await send(message)

    said.send = note  # type: ignore[method-assign]
    await part.handle(Arrival("master", opened(1, drafted=True)))
    while await part.run_due() is not None:
        pass
    assert [token for result in said for one in result.outcomes for token in one.tokens] == wanted[1]
    assert not any(isinstance(one, Drafts) for one in said)
    assert not inbox.arrived()
    trees = [sum(result.rows > 0 for result in said[:number]) for number in range(1, len(said) + 1)]
    early = [begun > frames for begun, frames in zip(launched, trees)]
    assert early[3:-2] == [True] * len(early[3:-2])
    assert provider.stage.table.free == PAGES
    assert provider.steps.launched == trees[-1], "none for nothing"


async def test_messages_are_handled_between_steps_although_the_next_one_is_always_launched(
    decoder: Decoder,
) -> None:
    """A prompt changes nothing about launched trees, but must not wait until none is launched."""
    both = [opened(sequence, drafted=True) for sequence in (1, 2)]
    wanted, *_ = write(decoder, ahead=False, due={0: [*both]})
    part, _, provider, said, _ = await pair_of(decoder, Erring(wanted, chains=True))
    provider.steps.accepts_device_tokens = True
    part.watch(lambda: True)
    for order in both:
        await part.handle(Arrival("master", order))
    confirmed = list[bool]()
    while await part.run_due() is not None:
        confirmed.append(part._active.verifier.next_confirmed)
    assert len(confirmed) >= sum(result.rows > 0 for result in said)
    assert sum(confirmed) > len(confirmed) / 2


async def hears_of_itself(drafter: Drafter, inbox: Inbox) -> None:
    """What failed on the worker's thread is raised where the drafter's own service sees it."""
    arrival = inbox.pop()
    assert arrival is not None
    with pytest.raises(Unavailable, match="d failed: AssertionError"):
        await drafter.handle(arrival)


async def test_what_goes_wrong_in_a_drafter_on_the_same_thread_is_its_own_affair(decoder: Decoder) -> None:
    wanted, *_ = write(decoder, ahead=False)
    proposer = Erring(wanted)
    part, drafter, provider, said, inbox = await pair_of(decoder, proposer)
    await part.handle(Arrival("master", opened(1, drafted=True)))
    for _ in range(40):
        await part.run_due()
        proposer.broken = True
    assert [token for result in said for one in result.outcomes for token in one.tokens] == wanted[1]
    assert provider.stage.table.free == PAGES
    await hears_of_itself(drafter, inbox)


async def test_a_choice_that_fails_on_a_device_is_the_drafters_affair(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was launched with it has never been."""
    wanted, *_ = write(decoder, ahead=False)
    monkeypatch.setattr(sampling, "choose_tokens", tells_early)
    monkeypatch.setattr(verifier, "find_targets", partial(sampling.find_targets, at_once=True))
    proposer = Choosing(wanted, 0)
    proposer.intact = 2
    part, drafter, provider, said, inbox = await pair_of(decoder, proposer, accepts_device_trees=True)
    await part.handle(Arrival("master", opened(1, drafted=True)))
    for _ in range(40):
        await part.run_due()
    assert proposer.intact == -1, "one was asked for that failed, and none behind it"
    assert provider.steps.unread
    assert [token for result in said for one in result.outcomes for token in one.tokens] == wanted[1]
    assert provider.stage.table.free == PAGES
    await hears_of_itself(drafter, inbox)
