"""The options of a worker process, and failpoints that tests of a fleet use.

This module does not import torch, so that options are checked before torch is loaded.
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
    """Block the calling thread for ever."""
    threading.Event().wait()


def die() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], None]] = {"hang": hang, "die": die}


@dataclass(slots=True)
class Failpoint:
    """A fault that a process causes at one of its frames, for tests.

    cause: Causes the fault.
    frame: Number of the frame, counted by this process from 1.
    worker_name: Name of the only worker that has the fault. None: every worker.
    _frames: Number of frames that this process has run so far.
    """

    cause: Callable[[], None]
    frame: int
    worker_name: str | None = None
    _frames: int = 0

    def count(self) -> None:
        """Count a frame that is about to run, and cause the fault if it is frame number `frame`. Nothing else
        happens at earlier and later frames.
        """
        self._frames += 1
        if self._frames == self.frame:
            self.cause()


def read_failpoint(text: str) -> Failpoint:
    """Return the failpoint that an option describes. Raises ValueError for any other text.

    text: "hang@20", or "worker-1:die@20" for the worker of that name only.

    The fault is `hang` or `die`, and the number that of the frame, counted from 1. Without a name, every
    worker has the fault.
    """
    match = re.fullmatch(r"(?:(.+):)?(\w+)@(\d+)", text)
    if match is None or match[2] not in FAULTS:
        kinds = " or ".join(f"{kind}@FRAME" for kind in FAULTS)
        raise ValueError(f"{text!r} is not [NAME:]{kinds}")
    return Failpoint(FAULTS[match[2]], int(match[3]), match[1])


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Options of a worker process.

    model: Base model and device.
    layers: Layer range to run. None: the master assigns one.
    trace_steps: One in this many steps of a traced request is traced, at least 1.
    failpoint: A fault for tests. None: no fault.
    member: Options of every member of a fleet, such as the address of its master.
    service: Options of every service, such as its address and logs.
    """

    HEADING: ClassVar[str] = "Worker"

    model: Annotated[ModelOptions, OF_WORKER]
    layers: Range | None = option(
        None, "Layers to run, such as 0:4.", kind=LAYERS, unset="those that the master assigns"
    )
    trace_steps: int = option(16, "Trace one in this many steps of a traced request.", kind=POSITIVE)
    failpoint: Failpoint | None = option(
        None, "For tests: [NAME:]hang@FRAME or [NAME:]die@FRAME.", kind=Kind("FAULT", read_failpoint)
    )
    member: MemberOptions = field(default_factory=MemberOptions)
    service: ServiceOptions = field(default_factory=ServiceOptions)


def read_config(arguments: Sequence[str] | None = None) -> WorkerConfig:
    """Read the options of a worker. Exit with status 2 and one line if something is wrong.

    arguments: The arguments without the program's name. None: those of the command line.
    """
    about = "Run a range of the base model's layers in a SpecSoT ring."
    return read(
        "specsot-worker", WorkerConfig, about, arguments, check=lambda given: check_member(given.service)
    )
