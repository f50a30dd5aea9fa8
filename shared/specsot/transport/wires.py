"""The interface of a link's connection, and names for sockets and files in a folder private to this user."""

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
    """A connection that carries the bytes of one link."""

    def encode(self, request: Message) -> bytes:
        """Return a message as the bytes that this connection carries."""
        return request.SerializeToString()

    def write_now(self, data: bytes) -> bytes:
        """Write as much as possible without waiting, from any thread, and return the rest.

        Raises Unavailable once the connection has ended.
        """
        return data

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write, and return when there is room for more. Raises Unavailable once the connection has ended."""

    @abstractmethod
    async def finish(self) -> None:
        """Declare that nothing more will be written."""

    @abstractmethod
    async def wait_closed(self) -> None:
        """Wait until the peer has closed the connection, or the connection broke."""

    @abstractmethod
    async def hang_up(self) -> None:
        """Close the connection."""
        ...


# Links. Bounds the links to one member at once. Untuned.
MOST_PLACES = 256
# The beginning of the name of a private folder.
PREFIX = "specsot-"


class Places:
    """Allocates names in a private folder, at most MOST_PLACES at once.

    The folder exists only while a name is allocated or a file is left in it, so that a killed process leaves
    nothing but this folder behind.
    """

    def __init__(self, what: str, beside: Path | None = None) -> None:
        """what: what the names are for, in the plural, for error messages.

        beside: the directory in which the folder is created. None: the system's directory for temporary
            files.
        """
        self._what = what
        self._beside = beside
        self._folder: Path | None = None
        self._numbers = itertools.count()
        self._taken: set[Path] = set()

    def take(self, folder: bool = True) -> Path:
        """Allocate a name.

        folder: True if a file will be created under the name, so that the folder must exist. Otherwise the
            name is relative and only counts toward the limit.

        Raises Overloaded if too many names are allocated, Unavailable if the folder cannot be created.
        """
        if len(self._taken) >= MOST_PLACES:
            raise Overloaded(f"{MOST_PLACES} {self._what} come in already, more are not allowed")
        place = (self._room() if folder else Path()) / str(next(self._numbers))
        self._taken.add(place)
        return place

    def give_back(self, place: Path, remove: bool = True) -> None:
        """Free a name. remove: delete the file under the name; otherwise the file stays until `close`."""
        self._taken.discard(place)
        if remove and self._folder:
            place.unlink(missing_ok=True)
        if self._folder and not self._taken:
            # The folder may hold files that were not removed, or may be gone already.
            with suppress(OSError):
                self._folder.rmdir()
                self._folder = None

    def close(self) -> None:
        """Delete the folder and everything in it."""
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
    """Return whether a path lies in a private folder of this user, where only SpecSoT can have created
    files.
    """
    try:
        folder = place.parent.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(folder.st_mode) and not folder.st_mode & 0o077
    return private and folder.st_uid == os.getuid() and place.parent.name.startswith(PREFIX)
