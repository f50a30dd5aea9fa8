"""The journal: what was written comes back as it was, for its owner alone; what fails leaves nothing behind.

`tests/faults/test_restart.py` tells how they go on.
"""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.core.frames import End, Logprob, Outcome
from specsot.errors import InvalidRequest
from specsot.params import Ask, Limits, Sampling
from specsot_master.journal import (
    JOURNAL_FILE,
    AdmittedRecord,
    BranchRecord,
    CancelledRecord,
    Change,
    FailedRecord,
    Journal,
    JournaledRequest,
    JournalFile,
    Record,
    ReopenedRecord,
    StepRecord,
    open_journal,
)

CHANCES = (Logprob(-0.1 - 0.2, ((5, -0.25), (7, -1e-9))), Logprob(-1.5))
RECORDS: tuple[Record, ...] = (
    AdmittedRecord(0.1, 64),
    StepRecord(0.2, ((0, Outcome(0, 0, (), (5, 6), None, CHANCES)), (2, Outcome(0, 3, (), (), End.FAILED)))),
    BranchRecord(2, "abc"),
    ReopenedRecord(0),
    CancelledRecord(3.0),
    FailedRecord("Unavailable", 'worker-1 said "no"\n'),
)
ASK = Ask(prompt="你好?", sampling=Sampling(temperature=0.7), seed=2**62, resumable=True)
KEPT = JournaledRequest("mine", "10.0.0.7", ASK, 2**62, 1.7e9 + 0.25)
OWNED = replace(KEPT, owner="somebody", wording="abc")


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    store = JournalFile(tmp_path / "new", "model-1")
    others = {id: replace(KEPT, id=id) for id in ("b", "c")}
    store.write([(OWNED.id, OWNED), *(("mine", record) for record in RECORDS), *others.items()])
    store.write([("b", None)])
    store.close()
    again = JournalFile(tmp_path / "new", "model-1")
    assert again.read() == (replace(OWNED, records=RECORDS), replace(KEPT, id="c"))
    again.close()
    other = JournalFile(tmp_path / "new", "model-2")
    assert other.read() == (), "another model would go on with other words"
    other.close()


def test_it_is_its_owners_alone(tmp_path: Path) -> None:
    store = JournalFile(tmp_path, "model")
    store.write([(KEPT.id, KEPT)])
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    with pytest.raises(InvalidRequest, match=f"no journal in {tmp_path}: another master has it"):
        JournalFile(tmp_path, "model")
    store.close()


class Full(JournalFile):
    def write(self, changes: Iterable[Change]) -> None:
        raise sqlite3.OperationalError("database or disk is full")


async def test_a_journal_that_cannot_be_written_is_no_journal(tmp_path: Path) -> None:
    """Half of one would send clients back to where they have been."""
    journal = Journal(Full(tmp_path, "model"), ThreadPoolExecutor(1))
    journal.put(KEPT.id, KEPT)
    await journal.secure()
    assert not (tmp_path / JOURNAL_FILE).exists()
    journal.put("mine", RECORDS[0])
    await journal.secure()
    await journal.close()


async def test_secure_waits_for_all_that_happened(tmp_path: Path) -> None:
    journal = Journal(JournalFile(tmp_path, "model"), ThreadPoolExecutor(1))
    for number in range(3):
        journal.put(str(number), replace(KEPT, id=str(number)))
        await journal.secure()
        journal.put(str(number), RECORDS[0])
    await journal.close()
    again = JournalFile(tmp_path, "model")
    assert [len(one.records) for one in again.read()] == [1, 1, 1]
    again.close()


async def test_what_cannot_be_written_is_lost_alone(tmp_path: Path) -> None:
    """An ask that no message can hold, an outcome that no JSON can: everybody else's is written."""
    journal = open_journal(tmp_path, "m")
    huge = replace(ASK, limits=Limits(max_parallel=1 << 40))
    unspeakable = BranchRecord(2, object())  # type: ignore[arg-type]
    for id, ask in (("first", ASK), ("huge", huge), ("odd", ASK), ("last", ASK)):
        journal.put(id, replace(KEPT, id=id, ask=ask))
    for id, record in (("odd", unspeakable), ("last", RECORDS[0])):
        journal.put(id, record)
    async with asyncio.timeout(60):
        await journal.secure()
        await journal.close()
    again = JournalFile(tmp_path, "m")
    assert [(one.id, len(one.records)) for one in again.read()] == [("first", 0), ("last", 1)]
    again.close()


class Odd(JournalFile):
    def write(self, changes: Iterable[Change]) -> None:
        raise ValueError("not one of sqlite's")


async def test_no_request_waits_for_a_failed_journal(tmp_path: Path) -> None:
    journal = Journal(Odd(tmp_path, "model"), ThreadPoolExecutor(1))
    journal.put(KEPT.id, KEPT)
    async with asyncio.timeout(60):
        await journal.secure()
    assert not (tmp_path / JOURNAL_FILE).exists()


def test_what_cannot_be_read_is_lost_alone(tmp_path: Path) -> None:
    store = JournalFile(tmp_path, "m")
    store.write(
        [(id, replace(KEPT, id=id)) for id in ("a", "b", "c")] + [("b", RECORDS[0]), ("c", RECORDS[0])]
    )
    store._data.execute("UPDATE requests SET ask = x'ffff' WHERE id = 'a'")
    store._data.execute("UPDATE records SET record = '[\"begun\"]' WHERE request = 'b'")
    first, second = store.read()
    assert first.id == "b"
    assert isinstance(first.records[0], FailedRecord)
    assert second == replace(KEPT, id="c", records=RECORDS[:1])
    store.close()
