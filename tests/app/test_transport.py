"""How members reach each other, as it is asked for on command lines."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.service.option_table import InactiveOption
from specsot_app.fleet.opening import prepared
from specsot_app.fleet.options import FleetOptions, models_of
from specsot_app.fleet.service_specs import PRIVATE, services_of


@pytest.mark.parametrize("asked", [{"transport": "zmq"}, {"comm_mode": "ring"}])
def test_within_one_process_nothing_is_carried(demo_model: Path, asked: dict[str, str]) -> None:
    base = str(demo_model / "base")
    with pytest.warns(InactiveOption, match="has no effect in one process; --fleet processes starts several"):
        models_of(FleetOptions(model=base, **asked))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models_of(FleetOptions(kind="processes", model=base, **asked))


def test_what_members_run_with_has_no_effect_on_a_fleet_that_is_running() -> None:
    master = FleetOptions(master="127.0.0.1:50050", model="X", drafter="none", device="auto")
    told = "quantization int4, device cuda:7 have no effect on the fleet of a master that is running already"
    with pytest.warns(InactiveOption, match=f"^{told}$"):
        prepared(replace(master, quantization="int4", device="cuda:7"), io.StringIO())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(master, io.StringIO())


def test_the_master_gets_the_transport_option_and_passes_it_to_the_members(
    demo_model: Path, tmp_path: Path
) -> None:
    wanted = FleetOptions(kind="processes", model=str(demo_model / "base"), transport="zmq", comm_mode="ring")
    master, *members = services_of(wanted, models_of(wanted), 5, tmp_path, None, PRIVATE)
    words = " ".join(master.arguments)
    assert "--transport zmq --comm-mode ring" in words
    assert not any("--transport" in member.arguments for member in members)
