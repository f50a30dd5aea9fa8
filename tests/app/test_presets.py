"""Presets: what they fill in, what wins over them, and that every service hears of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specsot.errors import InvalidRequest
from specsot.params import Window
from specsot.service.command import TableCommand
from specsot.service.option_table import build, made_of
from specsot_app.api import SpecSoT, fleet_of
from specsot_app.commands.chat import chat
from specsot_app.commands.infer import InferOptions, infer
from specsot_app.commands.serve import serve
from specsot_app.core.ask import OPTIONS, PRESETS, ask_of, asked, filled, fleet_with, request_with
from specsot_app.fleet.options import OWN_DRAFTER_WAIT, FleetOptions, models_of
from specsot_app.fleet.service_specs import services_of
from specsot_master.core.ring.ring_state import DRAFTER_WAIT_SECONDS


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_made_of_settings_that_there_are(preset: str) -> None:
    models_of(fleet_of(fleet_with(preset, {})))
    request = request_with(preset, {})
    assert set(request) <= set(OPTIONS)
    assert (ask_of("What?", **request).window is None) == (preset == "short")


def test_what_is_given_wins() -> None:
    given = {"preset": "small", "quantization": "int4", "draft_depth": None, "model": "m"}
    wanted, asked = fleet_of(given), build(InferOptions, filled("small", {"recent": 100}))
    assert (wanted.quantization, wanted.draft_dtype, wanted.drafting.depth) == ("int4", "fp16", 3)
    assert (asked.attention.sinks, asked.attention.recent) == (4, 100)
    assert build(InferOptions, {}).attention.sinks is None
    with pytest.raises(InvalidRequest, match="preset must be one of short, long, small, got 'tiny'"):
        fleet_with("tiny", {})


def test_little_memory_is_what_the_seed_says() -> None:
    """Base int8, head fp16, KV as computed, 4 + 252 rows, K = 3; on a CPU the head's matrices are int8."""
    wanted = fleet_of({"preset": "small"})
    assert (wanted.quantization, wanted.drafter_dtype, wanted.kv_cache_dtype) == ("int8", "fp16", "auto")
    assert (wanted.drafting.depth, wanted.drafter_quantization) == (3, "int8")
    assert replace(wanted, device="cuda").drafter_quantization is None
    assert ask_of("What?", **request_with("small", {})).window == Window(4, 252)


def asked_by(given: dict[str, Any]) -> dict[str, Any]:
    """What a command's options ask of every request."""
    flags = {name.replace("_", "-"): value for name, value in given.items()}
    said = build(InferOptions, flags)
    return asked(said.request, said.sampling, said.attention, said.form)


@pytest.mark.parametrize("policy", [{"keep_ratio": 0.8}, {"skip_layers": 0}, {"head_aware": True}])
def test_another_policy_wins_over_the_window_of_a_preset(policy: dict[str, Any]) -> None:
    direct: dict[str, Any] = {"preset": "long", "mode": "direct", "head_aware": False}
    assert ask_of("What?", **asked_by(direct)).window == Window(4, 1020)
    asked = ask_of("What?", **asked_by(direct | policy))
    assert asked.window is None
    assert asked.pruning or asked.head_aware


def test_in_python_a_preset_is_for_every_question() -> None:
    model = SpecSoT.from_pretrained(demo="small", preset="long", draft_tokens=7)
    assert (model._options.drafting.depth, model._ask("What?", {}).window) == (7, Window(4, 1020))
    assert model._ask("What?", {"recent": 64}).window == Window(4, 64)
    with pytest.raises(InvalidRequest, match="preset must be one of"):
        SpecSoT.from_pretrained(demo="small", preset="tiny")


@pytest.mark.parametrize(
    ("field", "value"),
    [("quantization", "int3"), ("kv_cache_dtype", "fp8"), ("draft_dtype", "fp8"), ("draft_quantization", "")],
)
def test_an_unknown_word_is_refused(field: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} must be one of .*, got {value!r}"):
        fleet_of({field: value})


def test_base_and_head_receive_their_own_settings(tmp_path: Path) -> None:
    given = {"kind": "processes", "dtype": "fp32", "draft_dtype": "bf16"}
    wanted = made_of(FleetOptions, given | {"preset": "small"})
    master, *workers, drafter = services_of(wanted, models_of(wanted), 1, tmp_path)
    for worker in workers:
        said = " ".join(worker.arguments)
        assert "--dtype fp32 --quantization int8" in said
    assert "--dtype bf16 --quantization int8" in " ".join(drafter.arguments)
    assert "kv-cache" not in " ".join((*master.arguments, *drafter.arguments))
    assert "kv-cache-dtype auto" in " ".join(workers[0].arguments)


def test_workers_receive_the_same_number_of_bits(tmp_path: Path) -> None:
    wanted = FleetOptions(kind="processes", batch_invariant=True, draft_invariant=True)
    _, *workers, drafter = services_of(wanted, models_of(wanted), 1, tmp_path)
    for flag in ("--batch-invariant", "--draft-invariant"):
        assert all(f"{flag} on" in " ".join(worker.arguments) for worker in workers)
        assert flag not in drafter.arguments


def test_the_first_ring_waits_long_for_a_drafter_that_the_fleet_starts_itself(tmp_path: Path) -> None:
    wanted = FleetOptions(kind="processes")
    master, *_ = services_of(wanted, models_of(wanted), 1, tmp_path)
    assert f"--drafter-wait {OWN_DRAFTER_WAIT}" in " ".join(master.arguments)
    assert OWN_DRAFTER_WAIT > DRAFTER_WAIT_SECONDS
    plain = FleetOptions(kind="processes", drafter="none")
    master, *_ = services_of(plain, models_of(plain), 1, tmp_path)
    assert "--drafter-wait" not in master.arguments


def test_every_member_receives_the_memory_limit_of_its_pages(tmp_path: Path) -> None:
    wanted = made_of(FleetOptions, {"kind": "processes", "kv_memory": "64M"})
    master, *members = services_of(wanted, models_of(wanted), 1, tmp_path)
    assert all("--kv-memory 64M" in " ".join(member.arguments) for member in members)
    assert "--kv-memory" not in master.arguments
    assert wanted.kv_memory == 64 << 20
    with pytest.raises(InvalidRequest, match="kv_memory: 'lots' is no amount of memory"):
        fleet_of({"kv_memory": "lots"})


@pytest.mark.parametrize("word", [infer, chat, serve])
def test_words_that_load_a_model_take_the_memory_for_its_pages(word: TableCommand[Any]) -> None:
    assert "kv-memory" in {entry.flag for entry in word.entries}
