"""Faults on demand: a worker that hangs or dies instead of computing its n-th frame. For tests of a fleet."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass


def hang() -> None:
    threading.Event().wait()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


KINDS: dict[str, Callable[[], None]] = {"hang": hang, "die": die}


@dataclass(slots=True)
class Failpoint:
    """act: what happens at frame number `frame` of the process. whom: the one worker it is for; None: all."""

    act: Callable[[], None]
    frame: int
    whom: str | None = None
    _frames: int = 0

    def count(self) -> None:
        """Another frame is about to run."""
        self._frames += 1
        if self._frames == self.frame:
            self.act()


def failpoint(text: str) -> Failpoint:
    """ "hang@20", or "worker-1:die@20" where only one worker of that name shall. Raises ValueError."""
    found = re.fullmatch(r"(?:(.+):)?(\w+)@(\d+)", text)
    if found is None or found[2] not in KINDS:
        kinds = " or ".join(f"{kind}@FRAME" for kind in KINDS)
        raise ValueError(f"{text!r} is not [NAME:]{kinds}")
    return Failpoint(KINDS[found[2]], int(found[3]), found[1])
