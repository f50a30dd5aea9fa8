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
from specsot.transport.grpc_server import reason


class Wire(ABC):
    """A connection that carries the bytes of one link."""

    def encode(self, request: Message) -> bytes:
        """Return a message as the bytes that this connection carries.

        request: the protobuf message.
        """
        return request.SerializeToString()

    def write_now(self, data: bytes) -> bytes:
        """Write as much as possible without waiting, from any thread, and return the rest; all of it by
        default.

        data: an encoded message. Raises Unavailable once the connection has ended.
        """
        return data

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write a message, and return when there is room for more.

        data: an encoded message, or the rest of one.

        Raises Unavailable once the connection has ended.
        """

    @abstractmethod
    async def finish(self) -> None:
        """Declare that nothing more will be written. Does nothing if the connection has ended."""

    @abstractmethod
    async def wait_closed(self) -> None:
        """Wait until the peer has closed the connection, or the connection broke."""

    @abstractmethod
    async def hang_up(self) -> None:
        """Close the connection at once. What was not written is lost."""
        ...


# Links. Bounds the links to one member at once. Untuned.
MAX_PLACES = 256
# The beginning of the name of a private folder.
PREFIX = "specsot-"


class Places:
    """Allocates names of sockets and files in a private folder, at most MAX_PLACES at once.

    The folder exists only while a name is allocated or a file is left in it, so that a killed process leaves
    nothing but this folder behind.
    """

    def __init__(self, purpose: str, parent: Path | None = None) -> None:
        """Create an allocator without names.

        purpose: what the names are for, in the plural, for error messages, such as "links".
        parent: the directory in which the folder is created. None: the system's directory for temporary
            files.

        Nothing is created before the first name is allocated.
        """
        self._purpose = purpose
        self._parent = parent
        self._folder: Path | None = None
        self._numbers = itertools.count()
        self._allocated: set[Path] = set()

    def allocate(self, folder: bool = True) -> Path:
        """Allocate a name, and return its path.

        folder: True if a file will be created under the name, so that the folder must exist. Otherwise the
            name is relative and only counts toward the limit.

        Raises Overloaded if too many names are allocated, Unavailable if the folder cannot be created.

        Numbers are never used twice by the same object. The file itself is not created.
        """
        if len(self._allocated) >= MAX_PLACES:
            raise Overloaded(f"{MAX_PLACES} {self._purpose} are open already, which is the limit")
        place = (self._make_folder() if folder else Path()) / str(next(self._numbers))
        self._allocated.add(place)
        return place

    def free(self, place: Path, remove: bool = True) -> None:
        """Free a name, and delete the folder if no name is allocated and no file is left in it.

        place: the path that `allocate` returned.
        remove: True to delete the file under the name; otherwise the file stays until `close`.

        Does nothing for a name that is free already, except that its file is deleted with `remove`. A missing
        file is no error.
        """
        self._allocated.discard(place)
        if remove and self._folder:
            place.unlink(missing_ok=True)
        if self._folder and not self._allocated:
            # The folder may hold files that were not removed, or may be gone already.
            with suppress(OSError):
                self._folder.rmdir()
                self._folder = None

    def close(self) -> None:
        """Delete the folder and everything in it. Does nothing if there is no folder.

        Files that cannot be deleted are left without an error.
        """
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _make_folder(self) -> Path:
        """Return the private folder, which is created if it does not exist. Raises Unavailable if that
        fails.

        Only this user can access the folder. Its name begins with PREFIX.
        """
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
            except OSError as error:
                raise Unavailable(f"cannot create a folder for {self._purpose}: {reason(error)}") from None
        return self._folder


def is_private(place: Path) -> bool:
    """Return whether a path lies in a private folder of this user, where only SpecSoT can have created files.

    Returns False if the folder does not exist.

    place: path of a socket or a file, as a peer named it.

    True requires that the folder is a directory and no link, belongs to this user, gives no rights to others,
    and has a name that begins with PREFIX. The path itself need not exist.
    """
    try:
        folder = place.parent.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(folder.st_mode) and not folder.st_mode & 0o077
    return private and folder.st_uid == os.getuid() and place.parent.name.startswith(PREFIX)
