"""Log lines of a service, on stderr: for people, or one JSON object each.

Refuses to know what is logged; no line ever carries a prompt or an answer. A line about a request names
it as request_id, and its trace, where it has one, as trace_id.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from specsot.process.options import LogFormat

Line = MutableMapping[str, Any]


def write_logs(service: str, format: LogFormat, level: str) -> None:
    """Every later structlog line of this process, whichever thread writes it; as JSON with `service`."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            leave_absent_out,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if format == "json" else "%H:%M:%S"),
            *(_for_machines(service) if format == "json" else _for_people()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def leave_absent_out(logger: Any, method: str, line: Line) -> Line:
    """What is None is not told."""
    return {name: value for name, value in line.items() if value is not None}


QUOTED = frozenset(
    " \t=\r\n\"'"
)  # structlog shows a value with one of these as its repr, and others as they are


def escape(logger: Any, method: str, line: Line) -> Line:
    """A line stays one line, and no peer's words move the cursor of a terminal. JSON needs no such thing."""
    return {
        name: _shown(value)
        if isinstance(value, str) and (name == "event" or not QUOTED & set(value))
        else value
        for name, value in line.items()
    }


def _shown(text: str) -> str:
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _for_machines(service: str) -> list[Any]:
    def name(logger: Any, method: str, line: Line) -> Line:
        return {**line, "service": service}

    return [name, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _for_people() -> list[Any]:
    """A traceback without the values of its frames: they hold prompts."""
    plain = structlog.dev.plain_traceback
    return [escape, structlog.dev.ConsoleRenderer(0, sys.stderr.isatty(), exception_formatter=plain)]
