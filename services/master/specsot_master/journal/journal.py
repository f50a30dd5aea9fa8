"""Writes down what happens to requests, in batches, beside everything else; and can be waited for.

Refuses to know what happens to them. A journal that cannot be written any more is given up, with its file.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import structlog

from specsot.tasks import start
from specsot_master.journal.records import JournaledRequest, Record
from specsot_master.journal.store import Change, JournalFile

log = structlog.get_logger()


class Journal:
    """`kept`: what was there when it was opened."""

    def __init__(self, store: JournalFile, thread: Executor) -> None:
        self.kept = store.read()
        self._store, self._thread = store, thread
        self._waiting: list[Change] = []
        self._writing: asyncio.Task[None] | None = None
        self._landing: asyncio.Future[None] | None = None  # of what waits
        self._flying: asyncio.Future[None] | None = None  # of what is being written
        self._lost = False

    def begin(self, request: JournaledRequest) -> None:
        self._put(request)

    def note(self, id: str, record: Record) -> None:
        self._put((id, record))

    def forget(self, id: str) -> None:
        self._put(id)

    async def secure(self) -> None:
        """Return once all that happened so far is in the file."""
        batch = self._landing or self._flying
        if batch is not None:
            await asyncio.shield(batch)

    async def close(self) -> None:
        """Once everything is written."""
        await self.secure()
        if not self._lost:
            self._store.close()

    def _put(self, change: Change) -> None:
        if self._lost:
            return
        self._waiting.append(change)
        loop = asyncio.get_running_loop()
        self._landing = self._landing or loop.create_future()
        self._writing = self._writing or start(self._write())

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._landing is not None:
            batch, self._waiting = self._waiting, []
            self._flying, self._landing = self._landing, None
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


def open_journal(directory: Path, model: str, thread: Executor | None = None) -> Journal:
    """model: the fingerprint of what answers. Raises InvalidRequest: it cannot be had."""
    return Journal(
        JournalFile(directory, model), thread or ThreadPoolExecutor(1, thread_name_prefix="journal")
    )
