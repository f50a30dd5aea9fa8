"""The journal's file: an SQLite database that only its owner may read, for it holds questions and answers.

Refuses to know when anything is written. Called by one thread at a time.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import structlog

from specsot.errors import InvalidRequest
from specsot.v1 import master_pb2
from specsot.wire.requests import decode_ask, encode_ask
from specsot_master.journal.records import (
    FailedRecord,
    JournaledRequest,
    Record,
    decode_record,
    encode_record,
)

log = structlog.get_logger()

JOURNAL_FILE = "journal.sqlite"
JOURNAL_FORMAT = 2  # of what is in it; the one before it is taken over

_UNREADABLE = "what was written down of this request cannot be read any more"

Change = (
    JournaledRequest | tuple[str, Record] | str
)  # a request that came, what happened to one, one that is forgotten


class JournalFile:
    """One directory's journal. `model`: a fingerprint; what was written for another one is dropped."""

    def __init__(self, directory: Path, model: str) -> None:
        """Raises InvalidRequest: it cannot be had, perhaps because another master has it."""
        self._path = directory / JOURNAL_FILE
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))  # and so are those beside it
            self._data = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
            self._take(f"{JOURNAL_FORMAT} {model}")
        except (OSError, sqlite3.Error) as error:
            raise InvalidRequest(
                f"no journal in {directory}: {_open_error(error)}", field="journal"
            ) from None

    def read(self) -> tuple[JournaledRequest, ...]:
        """All requests, in the order in which they came."""
        records: dict[str, list[Record]] = {}
        for request, text in self._data.execute("SELECT request, record FROM records ORDER BY rowid"):
            records.setdefault(request, []).append(_decoded(request, text))
        rows = self._data.execute(
            "SELECT id, client, ask, seed, began, owner, wording FROM requests ORDER BY rowid"
        )
        read = (_journaled(tuple(records.get(row[0], ())), *row) for row in rows.fetchall())
        return tuple(one for one in read if one)

    def write(self, changes: Iterable[Change]) -> None:
        """All of them or none. Raises sqlite3.Error."""
        self._data.execute("BEGIN")
        try:
            for change in changes:
                self._try(change)
        except BaseException:
            self._data.execute("ROLLBACK")
            raise
        self._data.execute("COMMIT")

    def close(self) -> None:
        self._data.close()

    def remove(self) -> None:
        """What is not written on would send clients who come back to a place long passed."""
        self.close()
        for beside in ("", "-wal", "-shm"):
            self._path.with_name(JOURNAL_FILE + beside).unlink(missing_ok=True)

    def _take(self, about: str) -> None:
        run = self._data.execute
        run("PRAGMA locking_mode=EXCLUSIVE")
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=NORMAL")
        run("CREATE TABLE IF NOT EXISTS about(holds TEXT)")
        holds = run("SELECT holds FROM about").fetchall()
        if holds == [(about.replace(str(JOURNAL_FORMAT), str(JOURNAL_FORMAT - 1), 1),)]:
            for column in ("owner", "wording"):
                run(f"ALTER TABLE requests ADD COLUMN {column} TEXT NOT NULL DEFAULT ''")
            run("UPDATE about SET holds = ?", (about,))
        elif holds != [(about,)]:
            self._begin(about)

    def _begin(self, about: str) -> None:
        run = self._data.execute
        for table in ("about", "requests", "records"):
            run(f"DROP TABLE IF EXISTS {table}")
        run("CREATE TABLE about(holds TEXT)")
        run(
            "CREATE TABLE requests(id TEXT UNIQUE, client TEXT, ask BLOB, seed INTEGER, began REAL,"
            " owner TEXT NOT NULL DEFAULT '', wording TEXT NOT NULL DEFAULT '')"
        )
        run("CREATE TABLE records(request TEXT, record TEXT)")
        run("CREATE INDEX of_request ON records(request)")
        run("INSERT INTO about VALUES (?)", (about,))

    def _try(self, change: Change) -> None:
        """What cannot be written is lost alone: its request does not outlive this master."""
        try:
            self._write(change)
        except (sqlite3.Error, OSError):
            raise
        except Exception as error:
            id = (
                change
                if isinstance(change, str)
                else change.id
                if isinstance(change, JournaledRequest)
                else change[0]
            )
            log.warning("a restart will lose this request", request_id=id, exc_info=error)
            self._forget(id)

    def _write(self, change: Change) -> None:
        run = self._data.execute
        match change:
            case JournaledRequest(id, client, ask, seed, began, _, owner, wording):
                self._forget(id)
                asked = encode_ask(ask, id).SerializeToString()
                row = (id, client, asked, seed, began, owner, wording)
                run("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            case str():
                self._forget(change)
            case request, record:
                run("INSERT INTO records VALUES (?, ?)", (request, encode_record(record)))

    def _forget(self, id: str) -> None:
        self._data.execute("DELETE FROM records WHERE request = ?", (id,))
        self._data.execute("DELETE FROM requests WHERE id = ?", (id,))


def _decoded(request: str, text: str) -> Record:
    """One that makes no sense ends its request."""
    try:
        return decode_record(text)
    except Exception as error:
        log.warning("request lost", request_id=request, reason=_UNREADABLE, exc_info=error)
        return FailedRecord("Unavailable", _UNREADABLE)


def _journaled(
    records: tuple[Record, ...],
    id: str,
    client: str,
    ask: bytes,
    seed: int,
    began: float,
    owner: str,
    wording: str,
) -> JournaledRequest | None:
    try:
        asked = decode_ask(master_pb2.GenerateRequest.FromString(ask))
        return JournaledRequest(id, client, asked, seed, began, records, owner, wording)
    except Exception as error:
        log.warning("request lost", request_id=id, reason=_UNREADABLE, exc_info=error)
        return None


def _open_error(error: OSError | sqlite3.Error) -> str:
    taken = isinstance(error, sqlite3.Error) and error.sqlite_errorcode == sqlite3.SQLITE_BUSY
    return "another master has it; a second one does not stand by" if taken else str(error)
