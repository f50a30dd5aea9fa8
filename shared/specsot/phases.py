"""Logs how long each phase of a start takes, and all phases in one line at the end."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import structlog

# Seconds by phase, since this process began, such as {"captured_graphs_steps_s": 1.2}. None once the start
# was logged.
_start: defaultdict[str, float] | None = defaultdict(float)


@contextmanager
def timed_phase(event: str, **facts: object) -> Generator[dict[str, object]]:
    """Log what the body of the `with` statement has done, and in how many seconds, once it has ended. Nothing
    is logged if the body raises an error.

    event: What the body has done, such as "captured graphs".
    facts: Further keys and values of the log line. They are yielded as a dictionary, to which the body may
        add what it finds out. `log_start` distinguishes phases of one event by their fact `what` or
        `drafter`.
    """
    began = time.monotonic()
    yield facts
    seconds = time.monotonic() - began
    add_phase(f"{event} {facts.get('what', facts.get('drafter', ''))}", seconds)
    structlog.get_logger().info(event, **facts, seconds=round(seconds, 1))


def add_phase(phase: str, seconds: float) -> None:
    """Count a phase of this process's start, without logging it. Nothing happens once the start was logged.

    phase: What was done, in words; phases of the same words are added up.
    seconds: How long that took.
    """
    if _start is not None:
        _start["_".join([*phase.split(), "s"])] += seconds


def note_imported() -> None:
    """Count the seconds since this process began as the phase `imported`, unless that was done before."""
    if _start is not None and "imported_s" not in _start:
        add_phase("imported", process_seconds())


def log_start() -> None:
    """Log the seconds since this process began, and those of each of its phases. Only the first call logs
    anything. Phases of different threads may overlap; the rest is time that no phase counts.
    """
    global _start
    phases = _start
    _start = None
    if phases is not None:
        rounded = {phase: round(seconds, 1) for phase, seconds in phases.items()}
        structlog.get_logger().info("started", seconds=round(process_seconds(), 1), **rounded)


def process_seconds() -> float:
    """Return the seconds since this process began. Outside of Linux, return the processor time that it has
    used.
    """
    if sys.platform != "linux":
        return time.process_time()
    with open("/proc/self/stat", encoding="utf-8") as stat:
        # The name of the program, in brackets, may have spaces; the 22nd word is the start after booting.
        words = stat.read().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(words[19]) / os.sysconf("SC_CLK_TCK")
