"""A plain lap that is begun before its frame comes: the same text and pages, whatever comes instead of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from specsot.core.frames import Close, Fork, Lease, Open, Opening, Order  # noqa: E402
from specsot.core.pages import PageTable  # noqa: E402
from specsot.errors import ModelError  # noqa: E402
from specsot.members import Configuration, Range, Ready, Stage  # noqa: E402
from specsot.model.decoder import Decoder  # noqa: E402
from specsot.model.kv import KVPages  # noqa: E402
from specsot.model.lap_rows import FilledLap, LapRows, Outputs  # noqa: E402
from specsot.params import Sampling  # noqa: E402
from specsot.transport.links import Arrival  # noqa: E402
from specsot_app.eagle.generation import LapLoop  # noqa: E402
from specsot_worker import stage_timers  # noqa: E402
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget  # noqa: E402
from specsot_worker.core.sequencer import Sequencer  # noqa: E402
from specsot_worker.stage import DecoderStage  # noqa: E402
from specsot_worker.verifier import Verifier  # noqa: E402
from specsot_worker.worker import Worker  # noqa: E402
from tests.models import Shape, write_base  # noqa: E402

PAGES, PAGE, LEASE = 24, 4, 1000
STOP = 7
LENGTHS = {1: 30, 2: 40, 3: 21, 4: 9, 5: 12}  # tokens that each may write


class EagerLaps:
    """As graphs run frames, but kernel by kernel."""

    def __init__(self, decoder: Decoder, kv: KVPages) -> None:
        self._decoder, self._kv = decoder, kv
        self.launched = 0

    def run(self, rows: LapRows) -> Outputs | None:
        return self.launch(self.fill(rows), rows.entry)

    def fill(self, rows: LapRows) -> FilledLap:
        return FilledLap(rows, (), ())

    def launch(self, filled: FilledLap, entry: Any) -> Outputs:
        self.launched += 1
        decoder, rows = self._decoder, filled.rows
        self._kv.move(rows.moves)
        plan = decoder.plan(rows.spans, PAGE, "packed")
        at, slots = torch.tensor(rows.positions), torch.tensor(rows.slots)
        return decoder.forward(decoder.embed(torch.as_tensor(entry)), at, slots, plan, self._kv)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    base = write_base(tmp_path_factory.mktemp("base"), Shape(layers=4))
    return Decoder.load(base, None, torch.float32, "cpu")


def opened(sequence: int, fork: Fork | None = None, **more: Any) -> Open:
    own = tuple(range(sequence, sequence + 5))
    prompt = len(own) + (fork.length if fork else 0)
    opening = Opening(sequence, prompt, fork, drafted=False, limit=LENGTHS[sequence], **more)
    return Open(opening, own, LEASE)


def orders() -> dict[int, list[Order]]:
    """By lap: some begin together, others come and go while they write; one forks the prompt of another."""
    warm = Sampling(temperature=0.9)
    return {
        0: [opened(1), opened(2, sampling=warm, seed=5), opened(3, sampling=warm, stop_ids=(STOP,))],
        8: [opened(4, Fork(1, 5))],
        20: [Close(2)],
        26: [opened(5, sampling=warm, ordinal=1)],
    }


def laps_of(loop: LapLoop, due: dict[int, list[Order]]) -> Iterator[Any]:
    for lap in range(200):
        for order in due.pop(lap, []):
            loop.sequencer.apply_order(order)
        try:
            yield loop.turn()
        except ModelError:
            if not due:
                return


def write(decoder: Decoder, ahead: bool) -> tuple[dict[int, list[int]], DecoderStage, EagerLaps, int]:
    """What each sequence writes, and how many laps that took."""
    stage = DecoderStage(decoder, PAGES, PAGE, "packed")
    laps = EagerLaps(decoder, stage._kv)
    if ahead:
        stage.run_by(laps)
    budget, table = FrameBudget(64, 1, 1), PageTable(PAGES, PAGE)
    sequencer = Sequencer(1, budget, table, DraftTimeout(0.0, present=False))
    verifier = Verifier(decoder.logits, lambda _: None, None, stage.go_on if ahead else None)
    written, number = dict[int, list[int]](), 0
    for lap in laps_of(LapLoop(stage, verifier, sequencer), orders()):
        number += any(lap.frame.segments)
        for outcome in lap.result.outcomes:
            written.setdefault(outcome.sequence, []).extend(outcome.tokens)
    return written, stage, laps, number


def test_law_1_laps_that_are_begun_early_write_the_same(decoder: Decoder) -> None:
    wanted, plain, _, _ = write(decoder, ahead=False)
    found, stage, laps, number = write(decoder, ahead=True)
    assert {sequence: len(tokens) for sequence, tokens in wanted.items()}.keys() == LENGTHS.keys()
    assert found == wanted
    assert stage.table.free == plain.table.free == PAGES, "nothing is kept for laps that never came"
    assert stage.table.sequences == plain.table.sequences == frozenset()
    assert laps.launched > number, "some were begun for nothing"


class Here(Executor):
    """Does it at once."""

    def submit(self, work: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(work(*arguments, **more))
        return done


class Said(list[Any]):
    """A link, and a dialer of such."""

    async def send(self, message: Any) -> None:
        self.append(message)

    async def close(self) -> None: ...

    async def dial(self, *where: Any) -> Said:
        return self


class Provider:
    """See `StageProvider`: one stage of this decoder, which runs by laps as graphs do."""

    name, vocabulary, loaded, fetched = "w", 200, 0, 0

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def make_stage(self, configuration: Configuration, layers: Range) -> DecoderStage:
        self.stage = DecoderStage(self._decoder, configuration.pages, configuration.page_rows)
        self.laps = EagerLaps(self._decoder, self.stage._kv)
        self.stage.run_by(self.laps)
        return self.stage

    def make_verifier(self, stage: DecoderStage, configuration: Configuration) -> Verifier:
        return Verifier(self._decoder.logits, lambda _: None, None, stage.go_on)


@pytest.mark.parametrize(("arrived", "turns"), [(False, 4), (True, 31)])
async def test_a_worker_goes_on_by_itself_while_nobody_wants_anything(
    decoder: Decoder, arrived: bool, turns: int
) -> None:
    """Lap for lap it takes what has arrived, else, and nothing is begun that this might change."""
    provider, said = Provider(decoder), Said()
    part: Any = Worker(provider, said, Here(), clock=lambda: 0.0)  # type: ignore[arg-type]
    part.watch(lambda: arrived)
    stages = (Stage("w", "w", Range(0, decoder.config.layers)),)
    await part.configure(Configuration(1, "w", stages, PAGES, PAGE, slots=1, rows=64), said)
    assert said.pop() == Ready(1)
    said.clear()
    await part.handle(Arrival("master", opened(1)))
    taken = 0
    while await part.settle() is not None:
        taken += 1
    wanted, *_ = write(decoder, ahead=False)
    assert [token for result in said for one in result.outcomes for token in one.tokens] == wanted[1]
    assert provider.stage.table.free == PAGES
    assert provider.laps.launched == sum(result.rows > 0 for result in said), "none for nothing"
    assert taken == turns


async def test_a_lap_that_waits_for_its_lease_has_not_computed_meanwhile(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is begun, and its frame follows when its reader goes on."""
    now = [0.0]
    monkeypatch.setattr(stage_timers, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    provider, said = Provider(decoder), Said()
    part: Any = Worker(provider, said, Here(), clock=lambda: 0.0)  # type: ignore[arg-type]
    part.watch(lambda: False)
    stages = (Stage("w", "w", Range(0, decoder.config.layers)),)
    await part.configure(Configuration(1, "w", stages, PAGES, PAGE, slots=1, rows=64), said)
    await part.handle(Arrival("master", replace(opened(1), lease=10)))
    while await part.settle() is not None:
        pass
    said.clear()
    now[0] = 100.0
    await part.handle(Arrival("master", Lease(1, LEASE)))
    while await part.settle() is not None:
        pass
    assert len(said) > 2
    assert all(sum(result.seconds) < 50 for result in said)
