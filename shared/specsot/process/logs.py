"""Log lines of a service, on stderr: for people, or one JSON object each.

Refuses to know what is logged; no line ever carries a prompt or an answer.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from specsot.process.setting import LogFormat


def write_logs(service: str, format: LogFormat, level: str) -> None:
    """Every later structlog line of this process carries `service`."""
    look: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if format == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if format == "json" else "%H:%M:%S"),
            *look,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    if format == "json":
        structlog.contextvars.bind_contextvars(service=service)
