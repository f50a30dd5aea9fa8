"""The journal: what was written comes back as it was, for its owner alone; what fails leaves nothing behind.

Refuses to know requests' lives; `tests/faults/test_restart.py` tells how they go on.
"""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.errors import InvalidRequest
from specsot.frames import Chance, End, Outcome
from specsot.params import Ask, Sampling
from specsot_master.journal import Again, Begun, Branched, Failed, Heard, Journal, Kept, Record, Stopped
from specsot_master.journal.store import FILE, Change, Store

CHANCES = (Chance(-0.1 - 0.2, ((5, -0.25), (7, -1e-9))), Chance(-1.5))
RECORDS: tuple[Record, ...] = (
    Begun(0.1, 64),
    Heard(0.2, ((0, Outcome(0, 0, (), (5, 6), None, CHANCES)), (2, Outcome(0, 3, (), (), End.FAILED)))),
    Branched(2),
    Again(0),
    Stopped(3.0),
    Failed("Unavailable", 'worker-1 said "no"\n'),
)
ASK = Ask(prompt="你好?", sampling=Sampling(temperature=0.7), seed=2**62, resumable=True)
KEPT = Kept("mine", "10.0.0.7", ASK, 2**62, 1.7e9 + 0.25)


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "new", "model-1")
    store.write(
        [KEPT, replace(KEPT, id="b"), *(("mine", record) for record in RECORDS), replace(KEPT, id="c")]
    )
    store.write(["b"])
    store.close()
    again = Store(tmp_path / "new", "model-1")
    assert again.read() == (replace(KEPT, records=RECORDS), replace(KEPT, id="c"))
    again.close()
    other = Store(tmp_path / "new", "model-2")
    assert other.read() == (), "another model would go on with other words"
    other.close()


def test_it_is_its_owners_alone(tmp_path: Path) -> None:
    store = Store(tmp_path, "model")
    store.write([KEPT])
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    with pytest.raises(InvalidRequest, match=f"no journal in {tmp_path}: another master has it"):
        Store(tmp_path, "model")
    store.close()


class Full(Store):
    def write(self, changes: Iterable[Change]) -> None:
        raise sqlite3.OperationalError("database or disk is full")


async def test_a_journal_that_cannot_be_written_is_no_journal(tmp_path: Path) -> None:
    """Half of one would send clients back to where they have been."""
    journal = Journal(Full(tmp_path, "model"), ThreadPoolExecutor(1))
    journal.begin(KEPT)
    await journal.secure()
    assert not (tmp_path / FILE).exists()
    journal.note("mine", RECORDS[0])
    await journal.secure()
    await journal.close()


async def test_secure_waits_for_all_that_happened(tmp_path: Path) -> None:
    journal = Journal(Store(tmp_path, "model"), ThreadPoolExecutor(1))
    for number in range(3):
        journal.begin(replace(KEPT, id=str(number)))
        await journal.secure()
        journal.note(str(number), RECORDS[0])
    await journal.close()
    again = Store(tmp_path, "model")
    assert [len(one.records) for one in again.read()] == [1, 1, 1]
    again.close()
