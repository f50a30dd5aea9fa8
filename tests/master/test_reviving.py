"""A master that begins on what another wrote down: what does not play ends clearly, and nobody else with it.

`tests/faults/test_restart.py` tells how whole streams go on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specsot.errors import PlanError, Unavailable
from specsot_master.engine import Caller, RequestJournal
from specsot_master.journal import BranchRecord, FailedRecord, JournaledRequest, open_journal
from tests.master.letters import ANSWER, SAYS
from tests.master.stage import Stage
from tests.master.test_resuming import CONFIG, KEPT, kept_in, read, reading, revived, text_of

pytestmark = pytest.mark.slow


async def written(place: Path) -> tuple[JournaledRequest, int]:
    """A request in the middle of its branches, as its master leaves it, and the events its client has."""
    journal = open_journal(place, "m")
    stage = Stage(SAYS, seed=3, config=CONFIG, notes=RequestJournal(journal, lambda: 0.0))
    client = reading(stage.requests.generate(KEPT, Caller("mine", owner="alice")))
    while sum(one.opening.decodes for one in stage.ring.live.values()) < 2:
        await stage.step()
    (request,) = stage.engine.all_requests
    return await kept_in(place, journal, client), request.events.position


async def test_what_was_written_goes_on(tmp_path: Path) -> None:
    kept, told = await written(tmp_path)
    assert kept.owner == "alice"
    assert kept.wording
    stage = Stage(SAYS, config=CONFIG)
    events = await revived(stage, kept, told)
    assert text_of(events) == ANSWER


def spoil(kept: JournaledRequest, kind: str) -> JournaledRequest:
    if kind == "first prompt":
        return replace(kept, wording="0" * 16)
    if kind == "branch prompt":
        records = (
            replace(one, wording="0" * 16) if isinstance(one, BranchRecord) else one for one in kept.records
        )
        return replace(kept, records=tuple(records))
    return replace(kept, records=(*kept.records, BranchRecord(99)))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("first prompt", "words its prompts differently now"),
        ("branch prompt", "words its prompts differently now"),
        ("no such branch", "cannot be played again"),
    ],
)
async def test_what_does_not_play_ends_alone_and_clearly(tmp_path: Path, kind: str, told: str) -> None:
    kept, read_so_far = await written(tmp_path)
    well = replace(kept, id="well")
    stage = Stage(SAYS, config=CONFIG)
    await stage.engine.revive([spoil(kept, kind), well])
    with pytest.raises(Unavailable, match=told):
        await read(stage.requests.generate(None, Caller("mine", owner="alice"), read_so_far + 1000))
    (events,) = await stage.play(reading(stage.requests.generate(None, Caller("well", owner="alice"), 0)))
    assert text_of(events) == ANSWER


async def test_a_record_that_cannot_even_be_asked_keeps_no_master_from_beginning(tmp_path: Path) -> None:
    kept, _ = await written(tmp_path)
    broken = replace(kept, id="broken", ask=None)  # type: ignore[arg-type]
    stage = Stage(SAYS, config=CONFIG)
    await stage.engine.revive([broken, kept])
    assert not stage.engine.has_request("broken")
    assert stage.engine.has_request("mine")


async def test_an_error_with_more_than_a_message_comes_back(tmp_path: Path) -> None:
    kept, told = await written(tmp_path)
    stage = Stage(SAYS, config=CONFIG)
    await stage.engine.revive([replace(kept, records=(*kept.records, FailedRecord("PlanError", "no plan")))])
    with pytest.raises(PlanError, match="no plan"):
        await read(stage.requests.generate(None, Caller("mine", owner="alice"), told))
