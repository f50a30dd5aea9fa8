"""Logs how long each phase of a start takes."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import structlog


@contextmanager
def timed_phase(event: str, **facts: object) -> Generator[dict[str, object]]:
    """Log what the body of the `with` statement has done, and in how many seconds, once it has ended. Nothing
    is logged if the body raises an error.

    event: What the body has done, such as "captured graphs".
    facts: Further keys and values of the log line. They are yielded as a dictionary, to which the body may
        add what it finds out.
    """
    began = time.monotonic()
    yield facts
    structlog.get_logger().info(event, **facts, seconds=round(time.monotonic() - began, 1))
