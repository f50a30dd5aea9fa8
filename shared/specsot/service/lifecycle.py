"""Runs a service from start to exit status: one event loop, two signals, log lines for people or as JSON."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import structlog
import uvloop

from specsot.errors import Hung, InvalidRequest, ModelError, Refused, SpecsotError
from specsot.service.options import LogFormat

log = structlog.get_logger()

# Exit statuses.
FAILED = 1
WRONG_INPUT = 2

Work = Callable[[asyncio.Event], Awaitable[None]]


def run_service(
    program: str, work: Work, first: Callable[[], object] = lambda: None, within: float | None = None
) -> int:
    """Run `work(leaving)` on an event loop and return the exit status. SIGTERM and SIGINT set `leaving`.

    If the work raises Hung, the process ends at once, because Python would wait for the thread that hangs.

    program: the program's name, for the line that reports an error.
    first: called before `work`, for what may take long, such as fetching a model. A signal during this call
        ends the process at once.
    within: seconds after a signal in which the process ends, even if its threads still load or fetch. None:
        no limit.
    """
    try:
        first()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_stopped(work, within))
    except (InvalidRequest, ModelError, Refused) as error:  # Starting the program again would fail again.
        return _tell(program, str(error), WRONG_INPUT)
    except Hung as error:
        os._exit(_tell(program, str(error), FAILED))
    except SpecsotError as error:
        return _tell(program, str(error), FAILED)
    except Exception as error:
        log.debug("failed", exc_info=error)
        return _tell(program, f"{type(error).__name__}: {error}".splitlines()[0], FAILED)
    return 0


async def _until_stopped(work: Work, within: float | None) -> None:
    leaving, loop = asyncio.Event(), asyncio.get_running_loop()

    def leave() -> None:
        leaving.set()
        if within is not None:
            last = threading.Timer(within, os._exit, (0,))
            # As a daemon, the timer still runs while Python waits for other threads.
            last.daemon = True
            last.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    await work(leaving)


def _tell(program: str, line: str, status: int) -> int:
    print(f"{program}: {line}", file=sys.stderr, flush=True)
    return status


Line = MutableMapping[str, Any]


def write_logs(service: str, format: LogFormat, level: str) -> None:
    """Configure structlog for the whole process.

    service: the value of `service` in JSON lines that have none of their own.
    format: "json", or text for people.
    level: lines below this level are dropped.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            leave_absent_out,
            structlog.processors.add_log_level,
            *(_for_machines(service) if format == "json" else _for_people()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def leave_absent_out(logger: Any, method: str, line: Line) -> Line:
    """Remove the fields of a log line whose value is None."""
    return {name: value for name, value in line.items() if value is not None}


# structlog writes the repr of a value with one of these characters, and other values unchanged.
QUOTED = frozenset(" \t=\r\n\"'")


def escape(logger: Any, method: str, line: Line) -> Line:
    """Escape unprintable characters, so that a log line stays one line and cannot control the terminal.

    JSON lines are escaped by their encoder.
    """
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
        return {"service": service, **line}

    stamp = structlog.processors.TimeStamper(fmt="iso")
    return [stamp, name, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _for_people() -> list[Any]:
    """Return the processors for text lines, with local time.

    Tracebacks are written without the values of local variables, because these contain prompts.
    """
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    plain = structlog.dev.plain_traceback
    return [stamp, escape, structlog.dev.ConsoleRenderer(0, sys.stderr.isatty(), exception_formatter=plain)]
