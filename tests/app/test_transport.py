"""How members reach each other, as it is asked for on command lines."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from specsot.service.option_table import InactiveOption
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


def test_the_master_gets_the_transport_option_and_passes_it_to_the_members(
    demo_model: Path, tmp_path: Path
) -> None:
    wanted = FleetOptions(kind="processes", model=str(demo_model / "base"), transport="zmq", comm_mode="ring")
    master, *members = services_of(wanted, models_of(wanted), 5, tmp_path, None, PRIVATE)
    words = " ".join(master.arguments)
    assert "--transport zmq --comm-mode ring" in words
    assert not any("--transport" in member.arguments for member in members)
