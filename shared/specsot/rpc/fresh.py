"""What is in files, read again as soon as they change: tokens and certificates are renewed in service.

Refuses to know what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from specsot.errors import SpecsotError

T = TypeVar("T")
Stamp = tuple[int, int, int] | None


class WatchedFiles(Generic[T]):
    """`read` is called at once, and may raise then. A later change that it refuses is logged.

    lost: what holds after such a change. None: what was read before, since two files that belong together
    never change in the same moment.
    """

    def __init__(self, paths: Iterable[Path], read: Callable[[], T], lost: T | None = None) -> None:
        self._paths, self._read, self._lost = tuple(paths), read, lost
        self._stamps = self._look()
        self._value = read()

    def value(self) -> T:
        """Of this moment; costs a look at each file."""
        stamps = self._look()
        if stamps != self._stamps:
            self._stamps = stamps
            self._renew()
        return self._value

    def _renew(self) -> None:
        import structlog  # only here: a client never comes this far, and should not wait for it

        log = structlog.get_logger()
        try:
            self._value = self._read()
        except SpecsotError as error:
            log.warning("files changed, and are not taken", reason=str(error))
            self._value = self._value if self._lost is None else self._lost
        else:
            log.info("files changed, and are taken", files=[str(path) for path in self._paths])

    def _look(self) -> tuple[Stamp, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> Stamp:
    """None: it is not there. Links are followed: that is how Kubernetes changes files."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
