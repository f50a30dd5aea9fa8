"""The journal: resumable requests and their tokens in an SQLite file, to resume them after a restart.

The file can be read by its owner only, for it holds questions and answers. Times are seconds since the
request arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import structlog

from specsot.core.frames import End, Logprob, Outcome
from specsot.errors import InvalidRequest
from specsot.params import Ask
from specsot.tasks import start
from specsot.transport.wire.events import decode_ask, encode_ask
from specsot.v1 import master_pb2
from specsot_master.core.plans.prompts import PromptTurn
from specsot_master.core.records import (
    AdmittedRecord,
    BranchRecord,
    CancelledRecord,
    FailedRecord,
    LapRecord,
    Record,
    ReopenedRecord,
    fingerprint_of,
)
from specsot_master.core.request import RequestState


@dataclass(frozen=True, slots=True)
class JournaledRequest:
    """A request and its records. began: seconds of the wall clock at which it came.

    owner: whose it is, "" for nobody in particular.
    wording: a fingerprint of its first prompt, "" for unknown.
    """

    id: str
    client: str
    ask: Ask
    seed: int
    began: float
    records: tuple[Record, ...] = ()
    owner: str = ""
    wording: str = ""


_NAMES: dict[type[Record], str] = {
    AdmittedRecord: "begun",
    BranchRecord: "branched",
    LapRecord: "heard",
    ReopenedRecord: "again",
    CancelledRecord: "stopped",
    FailedRecord: "failed",
}


def encode_record(record: Record) -> str:
    parts: list[Any] = [getattr(record, one.name) for one in fields(record)]
    if isinstance(record, LapRecord):
        parts[1] = [_encode_outcome(ordinal, outcome) for ordinal, outcome in record.said]
    return json.dumps([_NAMES[type(record)], *parts], separators=(",", ":"))


def decode_record(text: str) -> Record:
    match json.loads(text):
        case ["begun", float(at), int(found)]:
            return AdmittedRecord(at, found)
        case ["branched", int(point), str(wording)]:
            return BranchRecord(point, wording)
        case ["heard", float(at), [*said]]:
            return LapRecord(at, tuple(_decode_outcome(*one) for one in said))
        case ["again", int(ordinal)]:
            return ReopenedRecord(ordinal)
        case ["stopped", float(at)]:
            return CancelledRecord(at)
        case ["failed", str(error), str(message)]:
            return FailedRecord(error, message)
        case _:
            raise ValueError(f"no record: {text[:40]}")


def _encode_outcome(ordinal: int, outcome: Outcome) -> list[Any]:
    """Only what plan and log look at."""
    end = outcome.end.value if outcome.end else None
    chances = [[one.logprob, one.top] for one in outcome.chances]
    prompt = [[[one.logprob, one.top] for one in outcome.prompt_chances]] if outcome.prompt_chances else []
    return [ordinal, outcome.step, outcome.tokens, end, chances, *prompt]


def _decode_outcome(
    ordinal: int,
    step: int,
    tokens: list[int],
    end: str | None,
    chances: list[Any],
    prompt: Sequence[Any] = (),
) -> tuple[int, Outcome]:
    told = Outcome(0, step, (), tuple(tokens), End(end) if end else None, _decode_chances(chances))
    return ordinal, replace(told, prompt_chances=_decode_chances(prompt)) if prompt else told


def _decode_chances(chances: Sequence[Any]) -> tuple[Logprob, ...]:
    return tuple(Logprob(logprob, tuple((token, other) for token, other in top)) for logprob, top in chances)


log = structlog.get_logger()

JOURNAL_FILE = "journal.sqlite"
JOURNAL_FORMAT = 2  # of what is in it; a file of another one is begun anew

_UNREADABLE = "what was written down of this request cannot be read any more"

Change = tuple[str, JournaledRequest | Record | None]  # of the request of this id; None: it is forgotten


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
        read = (_journaled(tuple(records.get(id, ())), id, *row) for id, *row in rows.fetchall())
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
        if run("SELECT holds FROM about").fetchall() != [(about,)]:
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
            log.warning("a restart will lose this request", request_id=change[0], exc_info=error)
            self._forget(change[0])

    def _write(self, change: Change) -> None:
        run = self._data.execute
        match change:
            case id, JournaledRequest(_, client, ask, seed, began, _, owner, wording):
                self._forget(id)
                asked = encode_ask(ask, id).SerializeToString()
                row = (id, client, asked, seed, began, owner, wording)
                run("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            case id, None:
                self._forget(id)
            case id, record:
                run("INSERT INTO records VALUES (?, ?)", (id, encode_record(record)))  # pyrefly: ignore[bad-argument-type]

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


def _journaled(records: tuple[Record, ...], id: str, *row: Any) -> JournaledRequest | None:
    try:
        client, ask, seed, began, owner, wording = row
        asked = decode_ask(master_pb2.GenerateRequest.FromString(ask))
        return JournaledRequest(id, client, asked, seed, began, records, owner, wording)
    except Exception as error:
        log.warning("request lost", request_id=id, reason=_UNREADABLE, exc_info=error)
        return None


def _open_error(error: OSError | sqlite3.Error) -> str:
    taken = isinstance(error, sqlite3.Error) and error.sqlite_errorcode == sqlite3.SQLITE_BUSY
    if taken:
        return "another master has it; a second one does not stand by"
    return (isinstance(error, OSError) and error.strerror) or str(error)


class Journal:
    """`kept`: what was there when it was opened."""

    def __init__(self, store: JournalFile, thread: Executor) -> None:
        self.kept = store.read()
        self._store = store
        self._thread = thread
        self._waiting: list[Change] = []
        self._writing: asyncio.Task[None] | None = None
        self._landing: asyncio.Future[None] | None = None  # of what waits
        self._flying: asyncio.Future[None] | None = None  # of what is being written
        self._lost = False

    async def secure(self) -> None:
        batch = self._landing or self._flying
        if batch is not None:
            await asyncio.shield(batch)

    async def close(self) -> None:
        await self.secure()
        if not self._lost:
            self._store.close()

    def put(self, id: str, what: JournaledRequest | Record | None) -> None:
        """A request that came, what happened to one, or None: it is forgotten."""
        if self._lost:
            return
        self._waiting.append((id, what))
        loop = asyncio.get_running_loop()
        self._landing = self._landing or loop.create_future()
        self._writing = self._writing or start(self._write())

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._landing is not None:
            batch = self._waiting
            self._waiting = []
            self._flying = self._landing
            self._landing = None
            try:
                await loop.run_in_executor(self._thread, self._store.write, batch)
            except Exception as error:  # whatever it is: who waits must go on
                self._give_up(error)
            self._flying.set_result(None)
        self._writing = self._flying = None

    def _give_up(self, error: Exception) -> None:
        self._lost = True
        self._waiting = []
        log.error("the journal is given up: a restart will lose every request", exc_info=error)
        with contextlib.suppress(sqlite3.Error, OSError):
            self._store.remove()


def open_journal(directory: Path, model: str) -> Journal:
    """model: the fingerprint of what answers. Raises InvalidRequest: it cannot be had."""
    return Journal(JournalFile(directory, model), ThreadPoolExecutor(1, thread_name_prefix="journal"))


class RequestJournal:
    """What an engine writes down: resumable requests, where there is a journal. now in seconds of the
    engine's clock. wall: seconds of a clock that goes on without the master.
    """

    def __init__(self, journal: Journal | None = None, wall: Callable[[], float] = time.time) -> None:
        self._journal = journal
        self._wall = wall

    def record_arrival(self, request: RequestState, now: float) -> None:
        if self._journal and request.ask.resumable:
            began = self._wall() - (now - request.since)
            wording = fingerprint_of(request.wording)
            kept = JournaledRequest(
                request.id, request.client, request.ask, request.seed, began, (), request.owner, wording
            )
            self._journal.put(request.id, kept)

    def age(self, kept: JournaledRequest) -> float:
        return max(self._wall() - kept.began, 0.0)

    def record(self, request: RequestState, record: Record) -> None:
        if self._journal and request.ask.resumable:
            self._journal.put(request.id, record)

    def branch_record(self, point: int, turn: PromptTurn) -> BranchRecord:
        """With a fingerprint of its prompt where that is written down."""
        return BranchRecord(point, fingerprint_of(turn.suffix) if self._journal else "")

    def forget(self, id: str) -> None:
        if self._journal:
            self._journal.put(id, None)

    async def secure(self, request: RequestState) -> None:
        """What its client is about to see is written down."""
        if self._journal and request.ask.resumable:
            await self._journal.secure()
