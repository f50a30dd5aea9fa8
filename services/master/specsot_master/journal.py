"""The journal: saves resumable requests and their tokens in an SQLite file, to resume them after a restart.

Only the owner of the file can read it, because it holds questions and answers. Times in records are seconds
since the request arrived.
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
from specsot_master.core.records import (
    AdmittedRecord,
    BranchRecord,
    CancelledRecord,
    FailedRecord,
    Record,
    ReopenedRecord,
    StepRecord,
    fingerprint_of,
)
from specsot_master.core.request import RequestState


@dataclass(frozen=True, slots=True)
class JournaledRequest:
    """A request as the journal keeps it.

    id: The request's id.
    client: The client to which the queue's fairness counts the request.
    ask: What was asked for.
    seed: The seed that the request named, or that the master drew for it.
    began: The arrival, in seconds of the wall clock.
    records: What happened to the request, in order; empty for a new request.
    owner: The owner of the credential that may resume and cancel the request; "" if anyone who knows the id
        may.
    wording: A fingerprint of the first prompt; "" if unknown.
    """

    id: str
    client: str
    ask: Ask
    seed: int
    began: float
    records: tuple[Record, ...] = ()
    owner: str = ""
    wording: str = ""


# The word by which a record of each class begins in the file; files of earlier versions hold these words.
_NAMES: dict[type[Record], str] = {
    AdmittedRecord: "begun",
    BranchRecord: "branched",
    StepRecord: "heard",
    ReopenedRecord: "again",
    CancelledRecord: "stopped",
    FailedRecord: "failed",
}


def encode_record(record: Record) -> str:
    """Return a record as JSON text: an array of its kind and its fields in order, such as ["again",3]. The
    flag `plans` of an AdmittedRecord is written only if it is False, and outcomes are written without their
    sequence ids and nodes.

    record: what happened to a request.
    """
    parts: list[Any] = [getattr(record, one.name) for one in fields(record)]
    if isinstance(record, AdmittedRecord) and record.plans:
        parts.pop()
    if isinstance(record, StepRecord):
        parts[1] = [_encode_outcome(ordinal, outcome) for ordinal, outcome in record.outcomes]
    return json.dumps([_NAMES[type(record)], *parts], separators=(",", ":"))


def decode_record(encoded: str) -> Record:
    """Return the record of what `encode_record` returned. Sequence ids of outcomes are 0.

    encoded: the JSON text of a record.

    Raises ValueError for anything else, and TypeError for an outcome with too few or too many fields.
    """
    match json.loads(encoded):
        case ["begun", float(at), int(found)]:
            return AdmittedRecord(at, found)
        case ["begun", float(at), int(found), False]:
            return AdmittedRecord(at, found, plans=False)
        case ["branched", int(point), str(wording)]:
            return BranchRecord(point, wording)
        case ["heard", float(at), [*outcomes]]:
            return StepRecord(at, tuple(_decode_outcome(*one) for one in outcomes))
        case ["again", int(ordinal)]:
            return ReopenedRecord(ordinal)
        case ["stopped", float(at)]:
            return CancelledRecord(at)
        case ["failed", str(error), str(message)]:
            return FailedRecord(error, message)
        case _:
            raise ValueError(f"not a journal record: {encoded[:40]}")


def _encode_outcome(ordinal: int, outcome: Outcome) -> list[Any]:
    """Return the fields of an outcome that are needed to replay it, as a JSON array: no accepted nodes, no
    sequence id. The logprobs of the prompt are left out if there are none.

    ordinal: 0 for the skeleton or the answer, else the id of the point that the sequence writes.
    outcome: what a step did for the sequence.
    """
    end = outcome.end.value if outcome.end else None
    chances = [[one.logprob, one.top] for one in outcome.chances]
    prompt = [[[one.logprob, one.top] for one in outcome.prompt_chances]] if outcome.prompt_chances else []
    return [ordinal, outcome.draft_round, outcome.tokens, end, chances, *prompt]


def _decode_outcome(
    ordinal: int,
    draft_round: int,
    tokens: list[int],
    end: str | None,
    chances: list[Any],
    prompt_chances: Sequence[Any] = (),
) -> tuple[int, Outcome]:
    """Return (ordinal, outcome) of what `_encode_outcome` returned; the outcome's sequence id is 0.

    ordinal: 0 for the skeleton or the answer, else the id of the point that the sequence writes.
    draft_round: the number of the sequence's draft round.
    tokens: the accepted tokens.
    end: why the sequence ended, or None.
    chances: the logprobs of the tokens, as JSON arrays.
    prompt_chances: the logprobs of the prompt, as JSON arrays; empty if there are none.

    Raises ValueError for an unknown end.
    """
    decoded = Outcome(0, draft_round, (), tuple(tokens), End(end) if end else None, _decode_chances(chances))
    return ordinal, replace(
        decoded, prompt_chances=_decode_chances(prompt_chances)
    ) if prompt_chances else decoded


def _decode_chances(chances: Sequence[Any]) -> tuple[Logprob, ...]:
    """Return log probabilities from JSON arrays; empty for none.

    chances: one array [logprob, top] per token: its log probability, and [[token id, logprob], ...] of the
        likeliest tokens at its position.
    """
    return tuple(Logprob(logprob, tuple((token, other) for token, other in top)) for logprob, top in chances)


log = structlog.get_logger()

# Name of the journal's file in its directory.
JOURNAL_FILE = "journal.sqlite"
# Version of the file's contents. A file of another version is emptied when it is opened.
JOURNAL_FORMAT = 2

# What the client of such a request receives, and what the log says.
_UNREADABLE = "the journal's record of this request cannot be read"

# (request id, change): a new request, a further record of the request, or None to delete the request.
Change = tuple[str, JournaledRequest | Record | None]


class JournalFile:
    """The journal's SQLite file in one directory, which only one master can open at a time."""

    def __init__(self, directory: Path, model_fingerprint: str) -> None:
        """Open or create the file. A file of another format is emptied, too. Only its owner can read the
        file.

        directory: the directory of the file, which is created if it is missing.
        model_fingerprint: the fingerprint of the model; the contents for another model are deleted.

        Raises InvalidRequest if the file cannot be opened, for example because another master has it open.
        """
        self._path = directory / JOURNAL_FILE
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite creates its -wal and -shm files with the permissions of the main file.
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            self._data = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
            self._take(f"{JOURNAL_FORMAT} {model_fingerprint}")
        except (OSError, sqlite3.Error) as error:
            raise InvalidRequest(
                f"no journal in {directory}: {_open_error(error)}", field="journal"
            ) from None

    def read(self) -> tuple[JournaledRequest, ...]:
        """Return all requests with their records, in the order of arrival; empty for a new file. A record
        that cannot be read is replaced by one that fails its request.

        Unreadable requests are left out.
        """
        records: dict[str, list[Record]] = {}
        for request, text in self._data.execute("SELECT request, record FROM records ORDER BY rowid"):
            records.setdefault(request, []).append(_decoded(request, text))
        rows = self._data.execute(
            "SELECT id, client, ask, seed, began, owner, wording FROM requests ORDER BY rowid"
        )
        read = (_journaled(tuple(records.get(id, ())), id, *row) for id, *row in rows.fetchall())
        return tuple(one for one in read if one)

    def write(self, changes: Iterable[Change]) -> None:
        """Write changes in one transaction; either all of them are written or none. A change that cannot be
        encoded is replaced by the deletion of its request. Other changes of the batch are still written.

        changes: pairs of a request's id and what happened to it, in order.

        Raises sqlite3.Error or OSError if none of them could be written.
        """
        self._data.execute("BEGIN")
        try:
            for change in changes:
                self._try(change)
        except BaseException:
            self._data.execute("ROLLBACK")
            raise
        self._data.execute("COMMIT")

    def close(self) -> None:
        """Close the file, and keep its contents."""
        self._data.close()

    def remove(self) -> None:
        """Close and delete the file. Files that do not exist are ignored.

        A journal to which nothing is written any more must not stay: a restarted master would resume its
        requests at a position that clients have long passed.

        Raises OSError if a file cannot be deleted, and sqlite3.Error if it cannot be closed.
        """
        self.close()
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(JOURNAL_FILE + suffix).unlink(missing_ok=True)

    def _take(self, contents_mark: str) -> None:
        """Lock the file exclusively, and empty it unless it was written for this format and model.

        contents_mark: the format's version and the model's fingerprint.

        Raises sqlite3.Error if another process has the file open, or if it is no database.
        """
        run = self._data.execute
        run("PRAGMA locking_mode=EXCLUSIVE")
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=NORMAL")
        run("CREATE TABLE IF NOT EXISTS about(holds TEXT)")
        if run("SELECT holds FROM about").fetchall() != [(contents_mark,)]:
            self._begin(contents_mark)

    def _begin(self, contents_mark: str) -> None:
        """Create empty tables, in place of any others.

        contents_mark: the format's version and the model's fingerprint, which the file remembers.
        """
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
        run("INSERT INTO about VALUES (?)", (contents_mark,))

    def _try(self, change: Change) -> None:
        """Write one change. If it cannot be encoded, its request is deleted and will not survive a restart.
        The loss is logged.

        change: a request's id and what happened to it.

        Raises sqlite3.Error and OSError, which concern the whole file.
        """
        try:
            self._write(change)
        except (sqlite3.Error, OSError):
            raise
        except Exception as error:
            log.warning("a restart will lose this request", request_id=change[0], exc_info=error)
            self._discard(change[0])

    def _write(self, change: Change) -> None:
        """Insert a request or a record, or delete a request. A new request replaces one with the same id and
        its records.

        change: a request's id and what happened to it.

        Raises sqlite3.Error and OSError, and other exceptions for a change that cannot be encoded.
        """
        run = self._data.execute
        match change:
            case id, JournaledRequest(_, client, ask, seed, began, _, owner, wording):
                self._discard(id)
                asked = encode_ask(ask, id).SerializeToString()
                row = (id, client, asked, seed, began, owner, wording)
                run("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            case id, None:
                self._discard(id)
            case id, record:
                run("INSERT INTO records VALUES (?, ?)", (id, encode_record(record)))  # pyrefly: ignore[bad-argument-type]

    def _discard(self, request_id: str) -> None:
        """Delete a request and its records; an unknown id is ignored.

        request_id: the request's id.
        """
        self._data.execute("DELETE FROM records WHERE request = ?", (request_id,))
        self._data.execute("DELETE FROM requests WHERE id = ?", (request_id,))


def _decoded(request_id: str, encoded: str) -> Record:
    """Return a decoded record. In place of an unreadable one, return a record that fails its request, and log
    a warning.

    request_id: the id of the request, for the log.
    encoded: the JSON text of the record.
    """
    try:
        return decode_record(encoded)
    except Exception as error:
        log.warning("request lost", request_id=request_id, reason=_UNREADABLE, exc_info=error)
        return FailedRecord("Unavailable", _UNREADABLE)


def _journaled(records: tuple[Record, ...], request_id: str, *columns: Any) -> JournaledRequest | None:
    """Return the request of a table row, or None (and a warning in the log) if the row cannot be read.

    records: the request's records, in order.
    request_id: the request's id.
    columns: the further columns of the table: client, ask, seed, began, owner, wording.
    """
    try:
        client, ask, seed, began, owner, wording = columns
        asked = decode_ask(master_pb2.GenerateRequest.FromString(ask))
        return JournaledRequest(request_id, client, asked, seed, began, records, owner, wording)
    except Exception as error:
        log.warning("request lost", request_id=request_id, reason=_UNREADABLE, exc_info=error)
        return None


def _open_error(error: OSError | sqlite3.Error) -> str:
    """Return in words why the journal's file cannot be opened: another master has it open, the operating
    system's reason, or the error's own text.

    error: what opening it has raised.
    """
    taken = isinstance(error, sqlite3.Error) and error.sqlite_errorcode == sqlite3.SQLITE_BUSY
    if taken:
        return "another master has it open, and only one may"
    return (isinstance(error, OSError) and error.strerror) or str(error)


class Journal:
    """Writes changes to the journal's file in batches, in a thread, so that the event loop does not wait for
    the disk.

    One batch is being written while the next one collects; `secure` waits for both. If the file cannot be
    written, the journal is deleted and later changes are ignored. The attribute `kept` holds the requests
    that the file contained when it was opened.
    """

    def __init__(self, store: JournalFile, thread: Executor) -> None:
        """Read the requests that the file contains.

        store: the opened file.
        thread: an executor with one thread, in which the file is written.
        """
        self.kept = store.read()
        self._store = store
        self._thread = thread
        self._waiting: list[Change] = []
        self._writing: asyncio.Task[None] | None = None
        # Done when the batch that collects now has been written.
        self._landing: asyncio.Future[None] | None = None
        # Done when the batch that is being written has been written.
        self._flying: asyncio.Future[None] | None = None
        self._lost = False

    async def secure(self) -> None:
        """Wait until everything that was put so far has been written, or the journal has been given up.
        Return at once if nothing waits. Cancelling the call does not stop the writing.
        """
        batch = self._landing or self._flying
        if batch is not None:
            await asyncio.shield(batch)

    async def close(self) -> None:
        """Write everything that was put, then close the file; a journal that was given up has no file any
        more.
        """
        await self.secure()
        if not self._lost:
            self._store.close()

    def put(self, request_id: str, change: JournaledRequest | Record | None) -> None:
        """Add a change to the next batch. Nothing happens if the journal has been given up. The change is
        written in the background; an event loop must run.

        request_id: the request's id.
        change: a new request, a further record of the request, or None to delete the request.
        """
        if self._lost:
            return
        self._waiting.append((request_id, change))
        loop = asyncio.get_running_loop()
        self._landing = self._landing or loop.create_future()
        self._writing = self._writing or start(self._write())

    async def _write(self) -> None:
        """Write the collected changes in batches until none is left. A failed write deletes the journal.
        Waiting calls of `secure` return after each batch, also after a failed one.
        """
        loop = asyncio.get_running_loop()
        while self._landing is not None:
            batch = self._waiting
            self._waiting = []
            self._flying = self._landing
            self._landing = None
            try:
                await loop.run_in_executor(self._thread, self._store.write, batch)
            except Exception as error:  # Callers of `secure` must continue, whatever the error is.
                self._give_up(error)
            self._flying.set_result(None)
        self._writing = self._flying = None

    def _give_up(self, error: Exception) -> None:
        """Delete the journal after a failed write; the master continues without it, and later changes are
        ignored. The changes that wait are dropped, and the loss is logged. Errors of the deletion are
        ignored.

        error: what the write has raised.
        """
        self._lost = True
        self._waiting = []
        log.error("journal deleted after a failed write: a restart will lose every request", exc_info=error)
        with contextlib.suppress(sqlite3.Error, OSError):
            self._store.remove()


def open_journal(directory: Path, model_fingerprint: str) -> Journal:
    """Open the journal of a directory, with a thread that writes it.

    directory: the directory of the journal's file, which is created if it is missing.
    model_fingerprint: the fingerprint of the model; the contents for another model are deleted.

    Raises InvalidRequest if the file cannot be opened.
    """
    return Journal(
        JournalFile(directory, model_fingerprint), ThreadPoolExecutor(1, thread_name_prefix="journal")
    )


class RequestJournal:
    """The journal as engines use it: records resumable requests, and does nothing without a journal."""

    def __init__(self, journal: Journal | None = None, wall_clock: Callable[[], float] = time.time) -> None:
        """Use a journal, or none.

        journal: the journal, or None to keep nothing.
        wall_clock: returns seconds of a clock that continues while no master runs. The argument `now` of the
            methods is in seconds of the engine's clock, which starts anew with each process.
        """
        self._journal = journal
        self._wall = wall_clock

    def record_arrival(self, request: RequestState, now: float) -> None:
        """Record a new request, if it is resumable and there is a journal. A request that is not resumable is
        ignored. The arrival is recorded in wall-clock time, with a fingerprint of the request's wording.

        request: the request, with its prompts made.
        now: the present time, in seconds of the engine's clock.
        """
        if self._journal and request.ask.resumable:
            began = self._wall() - (now - request.since)
            wording = fingerprint_of(request.wording)
            journaled = JournaledRequest(
                request.id, request.client, request.ask, request.seed, began, (), request.owner, wording
            )
            self._journal.put(request.id, journaled)

    def age(self, journaled: JournaledRequest) -> float:
        """Return how many seconds ago a request arrived, at least 0.

        journaled: the request as the journal keeps it.
        """
        return max(self._wall() - journaled.began, 0.0)

    def record(self, request: RequestState, record: Record) -> None:
        """Record what happened to a request, if the request is resumable and there is a journal.

        request: the request, resumable or not.
        record: what happened, with times in seconds since the request's arrival.
        """
        if self._journal and request.ask.resumable:
            self._journal.put(request.id, record)

    def branch_record(self, point: int, wording: Sequence[int]) -> BranchRecord:
        """Return the record of an opened branch. With a journal it holds a fingerprint of the branch's
        wording, without one "".

        point: the id of the branch's point.
        wording: the token ids of the branch's prompt after the request's common prefix.
        """
        return BranchRecord(point, fingerprint_of(wording) if self._journal else "")

    def forget(self, request_id: str) -> None:
        """Delete a request from the journal; an unknown id is ignored, and without a journal nothing happens.

        request_id: the id under which the request was opened.
        """
        if self._journal:
            self._journal.put(request_id, None)

    async def secure(self, request: RequestState) -> None:
        """Wait until the journal holds everything that the request's client is about to see. Return at once
        for a request that is not resumable, or without a journal.

        request: the request whose events are about to be sent.
        """
        if self._journal and request.ask.resumable:
            await self._journal.secure()
