"""The interface of what carries a link's bytes, and names for sockets and files in a folder that only this
user may enter.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import tempfile
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import Message

from specsot.errors import Overloaded, Unavailable


class Wire(ABC):
    def encode(self, request: Message) -> bytes:
        """As it travels here."""
        return request.SerializeToString()

    def write_now(self, data: bytes) -> bytes:
        """Write what goes without waiting, from any thread; returns the rest. Raises Unavailable."""
        return data

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Returns when there is room for more. Raises Unavailable once it has ended."""

    @abstractmethod
    async def finish(self) -> None:
        """Nothing more will be written."""

    @abstractmethod
    async def wait_closed(self) -> None:
        """Returns when the peer has hung up, or the connection broke."""

    @abstractmethod
    async def hang_up(self) -> None: ...


MOST_PLACES = 256  # links to one member at once; not measured
PREFIX = "specsot-"  # of such a folder's name


class Places:
    """Free names, at most so many at once. The folder is there while any is taken, or something lies there:
    who is killed leaves nothing else.
    """

    def __init__(self, what: str, beside: Path | None = None) -> None:
        """what: they are for. beside: where the folder is to be; None: where the system keeps such."""
        self._what = what
        self._beside = beside
        self._folder: Path | None = None
        self._numbers = itertools.count()
        self._taken: set[Path] = set()

    def take(self, folder: bool = True) -> Path:
        """folder: something will lie there; else the name alone counts. Raises Overloaded, Unavailable."""
        if len(self._taken) >= MOST_PLACES:
            raise Overloaded(f"{MOST_PLACES} {self._what} come in already, more are not allowed")
        place = (self._room() if folder else Path()) / str(next(self._numbers))
        self._taken.add(place)
        return place

    def give_back(self, place: Path, remove: bool = True) -> None:
        """remove: what lies there; else it stays until `close`."""
        self._taken.discard(place)
        if remove and self._folder:
            place.unlink(missing_ok=True)
        if self._folder and not self._taken:
            with suppress(OSError):  # not empty, or gone
                self._folder.rmdir()
                self._folder = None

    def close(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _room(self) -> Path:
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._beside))
            except OSError as error:
                why = os.strerror(error.errno).lower() if error.errno else str(error)
                raise Unavailable(f"no folder for {self._what}: {why}") from None
        return self._folder


def is_private(place: Path) -> bool:
    """It is in such a folder of this user: nobody else can have put anything there, nor another program."""
    try:
        folder = place.parent.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(folder.st_mode) and not folder.st_mode & 0o077
    return private and folder.st_uid == os.getuid() and place.parent.name.startswith(PREFIX)
