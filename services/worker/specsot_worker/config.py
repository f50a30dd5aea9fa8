"""The options of a worker's process, and its failpoints for tests of a fleet.

Torch is not even imported before these are read.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from specsot.members import Range
from specsot.service.command import read
from specsot.service.option_table import POSITIVE, Kind, option
from specsot.service.options import (
    LAYERS,
    OF_WORKER,
    MemberOptions,
    ModelOptions,
    ServiceOptions,
    check_member,
)


def hang() -> None:
    threading.Event().wait()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], None]] = {"hang": hang, "die": die}


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


def read_failpoint(text: str) -> Failpoint:
    """ "hang@20", or "worker-1:die@20" where only one worker of that name shall. Raises ValueError."""
    found = re.fullmatch(r"(?:(.+):)?(\w+)@(\d+)", text)
    if found is None or found[2] not in FAULTS:
        kinds = " or ".join(f"{kind}@FRAME" for kind in FAULTS)
        raise ValueError(f"{text!r} is not [NAME:]{kinds}")
    return Failpoint(FAULTS[found[2]], int(found[3]), found[1])


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """layers None: the master assigns a range. failpoint: for tests."""

    HEADING: ClassVar[str] = "Worker"

    model: Annotated[ModelOptions, OF_WORKER]
    layers: Range | None = option(
        None, "Layers to run, such as 0:4.", kind=LAYERS, unset="those that the master assigns"
    )
    trace_laps: int = option(16, "Trace one in this many laps of a traced request.", kind=POSITIVE)
    failpoint: Failpoint | None = option(
        None, "For tests: [NAME:]hang@FRAME or [NAME:]die@FRAME.", kind=Kind("FAULT", read_failpoint)
    )
    member: MemberOptions = field(default_factory=MemberOptions)
    service: ServiceOptions = field(default_factory=ServiceOptions)


def read_config(arguments: Sequence[str] | None = None) -> WorkerConfig:
    """Exits with status 2 and one line when something is wrong."""
    about = "Run a range of the base model's layers in a SpecSoT ring."
    return read(
        "specsot-worker", WorkerConfig, about, arguments, check=lambda given: check_member(given.service)
    )
