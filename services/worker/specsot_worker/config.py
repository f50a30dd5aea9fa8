"""The options of a worker's process.

Torch is not even imported before these are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from specsot.members import Range
from specsot.service.command import read
from specsot.service.option_table import POSITIVE, Kind, Option
from specsot.service.options import (
    LAYERS,
    OF_WORKER,
    MemberOptions,
    ModelOptions,
    ServiceOptions,
    check_member,
)
from specsot_worker.failpoints import Failpoint
from specsot_worker.failpoints import failpoint as read_failpoint


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """layers None: the master assigns a range. failpoint: for tests."""

    HEADING: ClassVar[str] = "Worker"

    model: Annotated[ModelOptions, OF_WORKER]
    layers: Annotated[
        Range | None,
        Option("Layers to run, such as 0:4.", kind=LAYERS, unset="those that the master assigns"),
    ] = None
    trace_laps: Annotated[int, Option("Trace one in so many laps of a traced request.", kind=POSITIVE)] = 16
    failpoint: Annotated[
        Failpoint | None,
        Option("For tests: [NAME:]hang@FRAME or [NAME:]die@FRAME.", kind=Kind("FAULT", read_failpoint)),
    ] = None
    member: MemberOptions = field(default_factory=MemberOptions)
    service: ServiceOptions = field(default_factory=ServiceOptions)


def read_config(arguments: Sequence[str] | None = None) -> WorkerConfig:
    """Exits with status 2 and one line when something is wrong."""
    about = "Run a range of the base model's layers in a SpecSoT ring."
    return read(
        "specsot-worker", WorkerConfig, about, arguments, check=lambda given: check_member(given.service)
    )
