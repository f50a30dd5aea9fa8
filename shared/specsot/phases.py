"""Logs how long each phase of a process's start takes: each phase in a line of its own when the phase ends,
and all phases of a worker's start in one line when the worker is ready.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import structlog

# Seconds by phase of this process's start, such as {"captured_graphs_steps_s": 1.2}. None after `log_start`.
_start: defaultdict[str, float] | None = defaultdict(float)


@contextmanager
def timed_phase(event: str, **facts: object) -> Generator[dict[str, object]]:
    """Log what the body of the `with` statement has done, and in how many seconds, once it has ended. Nothing
    is logged if the body raises an error.

    event: What the body has done, such as "captured graphs".
    facts: Further keys and values of the log line. They are yielded as a dictionary, to which the body may
        add what it finds out. The phase's key in the line of `log_start` consists of the event and the value
        of `what`, or else of `drafter`: the event "captured graphs" with what="steps" is
        `captured_graphs_steps_s`. Phases with the same key are added up.
    """
    began = time.monotonic()
    yield facts
    seconds = time.monotonic() - began
    add_phase(f"{event} {facts.get('what', facts.get('drafter', ''))}", seconds)
    structlog.get_logger().info(event, **facts, seconds=round(seconds, 1))


def add_phase(phase: str, seconds: float) -> None:
    """Count a phase of this process's start, so that `log_start` logs it. Nothing is logged now. Nothing
    happens after `log_start`.

    phase: What was done, in words. The key in the log line is these words, joined: "read vocabulary" becomes
        `read_vocabulary_s`. The seconds of phases with the same words are added up.
    seconds: Duration of the phase.
    """
    # Another thread may log the start meanwhile.
    phases = _start
    if phases is not None:
        phases["_".join([*phase.split(), "s"])] += seconds


def note_imported() -> None:
    """Count the seconds since this process began as the phase `imported`. Call this when the modules are
    imported and before the model is loaded; whatever the process did until then is included, such as reading
    options. Only the first call counts. Nothing happens after `log_start`.
    """
    phases = _start
    if phases is not None and "imported_s" not in phases:
        add_phase("imported", process_seconds())


def log_start() -> None:
    """Log the seconds since this process began, and the seconds of each phase so far, in one line. Only the
    first call logs anything: if a process runs several members, the first one that is ready ends the start.

    The seconds of the phases do not add up to those of the start: phases of different threads may overlap,
    and some work belongs to no phase.
    """
    global _start
    phases = _start
    _start = None
    if phases is not None:
        # Copied first, as another thread may end a phase meanwhile.
        rounded = {phase: round(seconds, 1) for phase, seconds in phases.copy().items()}
        structlog.get_logger().info("started", seconds=round(process_seconds(), 1), **rounded)


def process_seconds() -> float:
    """Return the seconds since this process began, in steps of 10 ms. Outside of Linux, return the processor
    time that the process has used instead, which is shorter if the process has waited.
    """
    if sys.platform != "linux":
        return time.process_time()
    with open("/proc/self/stat", encoding="utf-8") as stat:
        # The second field, the program's name in parentheses, may contain spaces, so count from the closing
        # parenthesis: "12 (a b) S 1 ..." -> words[0] is "S", the third field. words[19] is the 22nd field:
        # the clock ticks from booting to the start of this process.
        words = stat.read().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(words[19]) / os.sysconf("SC_CLK_TCK")
