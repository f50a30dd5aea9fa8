"""Logs how long each phase of a start takes."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import structlog


@contextmanager
def timed_phase(event: str, **facts: object) -> Generator[dict[str, object]]:
    """Log what the body has done, with its seconds, once it has ended. Nothing is logged after an error.

    event: What the body does, in the past tense.
    facts: What else is logged. The body may add to the dictionary that it gets.
    """
    began = time.monotonic()
    yield facts
    structlog.get_logger().info(event, **facts, seconds=round(time.monotonic() - began, 1))
