"""Who drafts, from the outside: options, refusals, and answers that do not depend on it."""

import asyncio
from pathlib import Path
from threading import current_thread

import pytest

from specsot.drafting import DraftOptions
from specsot.errors import InvalidRequest
from specsot.service.option_table import arguments_of
from specsot.service.options import DraftModelOptions
from specsot_app.api import fleet_of
from specsot_app.cli import main
from specsot_app.core.ask import ask_of
from specsot_app.fleet.embedded import EmbeddedFleet, EmbeddedOptions, Threads
from specsot_app.fleet.fitting import plan_fleet
from specsot_app.fleet.opening import open_fleet
from specsot_app.fleet.options import FleetOptions, models_of
from specsot_app.fleet.service_specs import services_of
from specsot_drafter.config import read_config
from specsot_drafter.drafter import Drafter
from specsot_drafter.loader import DraftLoader
from specsot_worker.loader import StageLoader
from specsot_worker.worker import Worker
from tests.drafter.mtp import split_pair, write_pair

pytestmark = pytest.mark.torch

QUESTION = "Give an overview of Stages of Sleep."
ASK = dict(mode="sot", max_new_tokens=128)


async def answers(wanted: FleetOptions, *drafters: str | None) -> list[str]:
    """What a fleet answers, asked for each of these at once."""
    fleet = await open_fleet(wanted)

    async def answer(drafter: str | None) -> str:
        events = [one async for one in fleet.generate(ask_of(QUESTION, **ASK, drafter=drafter))]
        return events[-1].event.text

    try:
        return await asyncio.gather(*map(answer, drafters))
    finally:
        await fleet.close()


async def test_the_answer_is_the_same_with_every_drafter(demo_model):
    base = str(demo_model / "base")
    (plain,) = await answers(FleetOptions(dtype="fp32", drafter="none"), None)
    for wanted, drafters in (
        (FleetOptions(dtype="fp32"), (None, "eagle", "ngram", "none")),
        (FleetOptions(dtype="fp32", drafter="ngram"), (None, "ngram", "none")),
        (
            fleet_of(dict(dtype="fp32", drafter="model", draft_model=base, draft_depth=3)),
            (None, "model", "ngram"),
        ),
    ):
        assert await answers(wanted, *drafters) == [plain] * len(drafters), wanted


async def test_an_embedded_drafter_is_updated_on_the_thread_that_verifies(demo_model):
    told, threads = set[str](), Threads()

    class Near(Drafter):
        def start_drafts(self, verification=None):
            told.add(current_thread().name)
            return super().start_drafts(verification)

    weights = DraftModelOptions(demo_model / "base", draft_model=demo_model / "eagle3")
    options = EmbeddedOptions(weights)
    parts = {
        "worker-0": lambda name, *ways: Worker(StageLoader(options.member_options(name), name), *ways),
        "drafter": lambda name, *ways: Near(DraftLoader(options.member_options(name), name), *ways),
    }
    fleet = await EmbeddedFleet.start(options, parts, threads=threads)
    events = [one async for one in fleet.generate(ask_of(QUESTION, max_new_tokens=9))]
    await fleet.close()
    assert events
    assert told == {threads.executor_of(weights.device).submit(lambda: current_thread().name).result()}


async def test_a_drafter_the_fleet_has_not_is_refused_naming_those_it_has():
    with pytest.raises(InvalidRequest, match="drafter model is not in this fleet, which has ngram, none"):
        await answers(FleetOptions(drafter="ngram"), "model")
    with pytest.raises(InvalidRequest, match="which has none"):
        await answers(FleetOptions(drafter="none"), "eagle")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"drafter": "magic"}, "drafter"),
        ({"drafter": "model"}, "draft_model"),
        ({"drafter": "eagle", "model": "BASE"}, "draft_model"),
        ({"draft_mode": "pruned"}, "draft_mode"),
        ({"draft_depth": 0}, "draft_depth"),
        ({"drafter": "ngram", "draft_threshold": 2.0}, "draft_threshold"),
        ({"tuner": "guess"}, "tuner"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_loaded(demo_model, wrong, field):
    given = {name: str(demo_model / "base") if value == "BASE" else value for name, value in wrong.items()}
    with pytest.raises(InvalidRequest) as refused:
        models_of(fleet_of(given))
    assert refused.value.field == field


def test_an_mtp_layer_of_the_base_drafts_unless_another_drafter_is_named(tmp_path, demo_model):
    base, alone = write_pair(tmp_path / "base", "qwen2").directory, tmp_path / "alone"
    for given, found in (
        ({}, ("mtp", base)),
        ({"drafter": "mtp"}, ("mtp", base)),
        ({"drafter": "none"}, ("none", None)),
        ({"drafter": "ngram"}, ("ngram", None)),
        ({"draft_model": str(demo_model / "eagle3")}, ("eagle", demo_model / "eagle3")),
    ):
        models = models_of(fleet_of({"model": str(base), **given}))
        assert (models.drafts, models.draft) == found
    split_pair(write_pair(tmp_path / "other", "qwen2"), alone)
    assert models_of(fleet_of({"model": str(tmp_path / "other")})).drafts == "suffix"
    apart = models_of(fleet_of({"model": str(tmp_path / "other"), "draft_model": str(alone)}))
    assert (apart.drafts, apart.draft) == ("mtp", alone)


def test_a_process_that_drafts_with_the_mtp_layer_of_its_base(tmp_path):
    base = write_pair(tmp_path / "base", "qwen2").directory
    wanted = FleetOptions(model=str(base))
    drafter = services_of(wanted, models_of(wanted), 50999, tmp_path)[-1]
    for arguments in (list(drafter.arguments), ["--drafter", "mtp", "--model", str(base)]):
        read = read_config(arguments).draft
        assert (read.drafts, read.draft) == ("mtp", base)


def test_the_plan_of_a_fleet_counts_an_mtp_layer_of_its_model(tmp_path):
    base = write_pair(tmp_path / "base", "qwen2").directory
    plan = plan_fleet(FleetOptions(model=str(base)))
    assert plan.draft == "the MTP layer of base"
    assert plan.draft_own > 0
    assert plan_fleet(FleetOptions(model=str(base), drafter="none")).draft == ""
    alone = split_pair(write_pair(tmp_path / "other", "qwen2"), tmp_path / "alone")
    apart = plan_fleet(FleetOptions(model=str(tmp_path / "other"), draft_model=str(alone)))
    assert (apart.draft, apart.draft_own) == ("the MTP layer of alone", plan.draft_own)


def test_drafter_processes_get_the_options_of_the_embedded_drafter(tmp_path, demo_model):
    sizes = dict(draft_depth=6, draft_breadth=3, draft_nodes=40, draft_threshold=0.2)
    how = dict(drafter="model", draft_mode="pruned", tuner="seed", blend=False, **sizes)
    wanted = fleet_of(dict(draft_model=str(demo_model / "base"), **how))
    assert wanted.drafting == DraftOptions("pruned", 6, 3, 40, 0.2, "seed", False)
    drafter = services_of(wanted, models_of(wanted), 50999, tmp_path)[-1]
    read = read_config(list(drafter.arguments))
    assert (read.draft.drafter, read.draft.drafting) == ("model", wanted.drafting)
    assert read.draft.draft == demo_model / "base"
    usual = ("--draft-threshold", "0.03", "--tuner", "measured", "--blend", "yes")
    assert arguments_of(DraftOptions()) == usual


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--drafter", "model"], "--drafter model needs --draft-model"),
        (["--drafter", "magic", "--draft-model", "x"], "'magic' is not one of"),
        (["--draft-model", "x", "--draft-mode", "pruned"], "draft_mode pruned is for a draft model"),
        (["--drafter", "ngram", "--draft-tokens", "99"], "draft_depth must be in 1 .. 64"),
        (["--drafter", "ngram", "--draft-threshold", "1"], "draft_threshold must be a probability below 1"),
    ],
)
def test_the_drafters_own_command_line_refuses_in_one_line(capsys, words, said):
    with pytest.raises(SystemExit) as left:
        read_config(["--model", "m", "--master", "127.0.0.1:1", *words])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [],
            [
                "nothing will be drafted: no head was found for base, and it has no MTP layer",
                "to draft, name a head by --draft-model, or give --drafter suffix, which needs no model",
            ],
        ),
        (["--drafter", "none"], ["nothing will be drafted: --drafter none was given"]),
        (["--drafter", "suffix"], []),
        (["--draft-model", "{head}"], []),
    ],
    ids=["no head", "none", "suffix", "a head"],
)
def test_serve_says_at_its_start_that_nothing_will_be_drafted_and_what_to_do(
    given: list[str],
    said: list[str],
    demo_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def end(*_: object) -> None:
        return None

    monkeypatch.setattr("specsot_app.commands.serve.run_fleet", end)
    words = [word.format(head=demo_model / "eagle3") for word in given]
    assert main(["serve", "--port", "0", "--model", str(demo_model / "base"), *words]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "draft" in line]
    assert lines == [f"specsot: {line}" for line in said]
