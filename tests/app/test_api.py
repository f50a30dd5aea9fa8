"""The Python API over a fleet that tells stories: async, plain, and the seeds' call."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from logging.handlers import BufferingHandler

import pytest

from specsot import SpecSoT
from specsot.errors import InvalidRequest, ModelError, Overloaded, Unavailable
from specsot.events import Finished
from specsot_app import api
from specsot_app.fleet.options import FleetOptions
from specsot_app.runtime import BackgroundLoop
from tests.app.stories import MERGED, PLANNED, StoryFleet


class Place:
    """Opens one fleet and remembers it."""

    def __init__(self, fleet: StoryFleet) -> None:
        self.fleet, self.opened = fleet, 0

    async def open(self, wanted: FleetOptions) -> StoryFleet:
        self.opened += 1
        return self.fleet


@pytest.fixture
def place() -> Place:
    return Place(StoryFleet(PLANNED))


@pytest.fixture
def model(place: Place):
    with SpecSoT(FleetOptions(), place.open) as model:
        yield model


async def test_an_answer_holds_text_branches_and_figures(model: SpecSoT) -> None:
    answer = await model.generate("Why do we sleep?")
    assert str(answer) == answer.text == MERGED
    assert [branch.text for branch in answer.branches] == ["Slow waves.", "Dreams.", "Rest."]
    assert (answer.seed, answer.tokens, answer.statistics.steps) == (7, (5, 6, 7), 24)
    assert answer.skeleton.startswith("[PLAN]")


async def test_a_stream_yields_every_event_in_order(model: SpecSoT) -> None:
    assert [event async for event in model.stream("Why?")] == list(PLANNED)


async def test_leaving_a_stream_early_cancels_its_request(model: SpecSoT, place: Place) -> None:
    events = model.stream("Why?")
    await anext(events)
    await events.aclose()
    assert place.fleet.left_early == 1


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What the test logs. It replaces pytest's `caplog`, because pyproject.toml leaves that plugin out."""
    handler = BufferingHandler(1000)
    logging.root.addHandler(handler)
    yield handler.buffer
    logging.root.removeHandler(handler)


def test_a_stream_that_outlives_its_loop_is_closed_in_silence(
    model: SpecSoT, place: Place, records: list[logging.LogRecord]
) -> None:
    """As where an exception leaves the loop over it: its traceback holds the stream."""
    streams = [model.stream("Why?")]

    async def begin() -> None:
        await anext(streams[0])

    asyncio.run(begin())
    assert place.fleet.left_early == 1
    assert records == []


async def test_cancelling_the_caller_cancels_the_request(place: Place) -> None:
    waiting = asyncio.Event()

    class Endless(StoryFleet):
        async def generate(self, ask):
            try:
                waiting_in_caller.call_soon_threadsafe(waiting.set)
                await asyncio.Event().wait()
                yield
            finally:
                self.left_early += 1

    waiting_in_caller = asyncio.get_running_loop()
    place.fleet = Endless(PLANNED)
    async with SpecSoT(FleetOptions(), place.open) as model:
        task = asyncio.create_task(model.generate("Why?"))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert place.fleet.left_early == 1
    assert place.fleet.closed == 1


def test_plain_callers_need_no_loop(model: SpecSoT, place: Place) -> None:
    assert model.generate_sync("Why?").text == MERGED
    assert model.generate_sync("Why?", temperature=0.5).text == MERGED
    assert place.opened == 1
    assert place.fleet.asks[1].sampling.temperature == 0.5


def test_threads_that_ask_first_at_the_same_time_share_one_fleet(
    model: SpecSoT, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting the loop takes long enough here for all threads to find that none has been started."""
    loops = list[BackgroundLoop]()

    class SlowLoop(BackgroundLoop):
        def __init__(self) -> None:
            time.sleep(0.05)
            super().__init__()
            loops.append(self)

    monkeypatch.setattr(api, "BackgroundLoop", SlowLoop)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(model.generate_sync, [f"Why {number}?" for number in range(8)]))
    assert {answer.text for answer in answers} == {MERGED}
    assert (len(loops), place.opened) == (1, 1)


async def test_questions_at_once_share_one_fleet(model: SpecSoT, place: Place) -> None:
    answers = await asyncio.gather(*(model.generate(f"Why {n}?") for n in range(4)))
    assert {answer.text for answer in answers} == {MERGED}
    assert place.opened == 1


@pytest.mark.torch
def test_the_seeds_call_returns_ids_and_stats(model: SpecSoT, place: Place) -> None:
    ids, stats = model.generate(
        task_prompt="Why?", max_new_tokens=50, temperature=0.0, top_p=0.0, enable_parallel=True
    )
    assert model.tokenizer.decode(ids[0], skip_special_tokens=True) == MERGED
    assert (stats["mode"], stats["total_tokens"], stats["time_ms"]) == ("specsot", 60, 500.0)
    assert stats["tokens"] == len(ids[0])
    assert stats["peak_memory_mb"] > 1
    ask = place.fleet.asks[0]
    assert (ask.prompt, ask.mode, ask.limits.max_new_tokens) == ("Why?", "auto", 50)


async def test_a_bad_value_is_refused_before_the_fleet_starts(model: SpecSoT, place: Place) -> None:
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        await model.generate("Why?", max_new_tokens=0)
    assert place.opened == 0


async def test_the_fleets_error_reaches_the_caller(place: Place) -> None:
    place.fleet = StoryFleet(PLANNED[:2], Overloaded("full", 2.0))
    async with SpecSoT(FleetOptions(), place.open) as model:
        with pytest.raises(Overloaded, match="full"):
            await model.generate("Why?")


async def test_a_stream_that_just_ends_is_an_error(place: Place) -> None:
    place.fleet = StoryFleet(PLANNED[:5])
    async with SpecSoT(FleetOptions(), place.open) as model:
        with pytest.raises(Unavailable, match="ended before"):
            await model.generate("Why?")


def test_a_fleet_that_failed_to_open_may_be_tried_again(place: Place) -> None:
    class Late(Place):
        async def open(self, wanted: FleetOptions) -> StoryFleet:
            self.opened += 1
            if self.opened == 1:
                raise Unavailable("not yet")
            return self.fleet

    late = Late(place.fleet)
    with SpecSoT(FleetOptions(), late.open) as model:
        with pytest.raises(Unavailable, match="not yet"):
            model.generate_sync("Why?")
        assert model.generate_sync("Why?").text == MERGED


def test_generation_in_a_forked_process_raises_because_the_model_stays_with_the_parent(
    model: SpecSoT,
) -> None:
    """No process would answer in the forked process."""
    model.generate_sync("Why?")
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            model.generate_sync("Why?")
        except Unavailable:
            model.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert model.generate_sync("Why?").text == MERGED


def test_closing_ends_the_fleet_once(place: Place) -> None:
    model = SpecSoT(FleetOptions(), place.open)
    model.generate_sync("Why?")
    model.close()
    model.close()
    assert place.fleet.closed == 1
    with pytest.raises(Unavailable, match="closed"):
        model.generate_sync("Why?")


async def test_awaiting_a_model_starts_its_fleet(place: Place) -> None:
    model = await SpecSoT(FleetOptions(), place.open)
    assert place.opened == 1
    events = [event async for event in model.stream("Why?")]
    assert isinstance(events[-1], Finished)
    model.close()


def test_unknown_models_and_options_are_named() -> None:
    with pytest.raises(ModelError, match="no/such/where: no such file or directory"):
        SpecSoT.from_pretrained(model="no/such/where")
    with pytest.raises(InvalidRequest, match="no option is called 'colour'"):
        SpecSoT.from_pretrained(demo="small", colour="red")
    with pytest.raises(InvalidRequest, match="dtype must be one of"):
        SpecSoT.from_pretrained(demo="small", dtype="int3")
    with pytest.raises(InvalidRequest, match="model_format must be one of safetensors, bin, got 'onnx'"):
        SpecSoT.from_pretrained(demo="small", model_format="onnx")


def test_the_seeds_spelling_opens_the_demo_model(demo_model) -> None:
    model = SpecSoT.from_pretrained(
        base_model_path=str(demo_model / "base"),
        ea_model_path=str(demo_model / "eagle3"),
        use_eagle3=True,
        device_map="cpu",
    )
    assert model.tokenizer.decode(model.tokenizer("Explain sleep.")["input_ids"]).endswith("Explain sleep.")
    model.close()


def test_the_tokenizer_of_a_fleet_elsewhere_stays_there() -> None:
    with pytest.raises(Unavailable, match="with the master"):
        SpecSoT.connect("127.0.0.1:1").tokenizer  # noqa: B018


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_importing_specsot_limits_how_long_threads_spin_unless_the_user_says(
    given: dict[str, str], spins: str
) -> None:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    code = "import specsot, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=mine | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == spins
