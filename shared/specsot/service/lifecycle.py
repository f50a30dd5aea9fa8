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

# Exit status of a program that failed.
FAILED = 1
# Exit status of a program whose options, files or peers are wrong, so that another start would fail too.
WRONG_INPUT = 2

Work = Callable[[asyncio.Event], Awaitable[None]]


def run_service(
    program: str, work: Work, prepare: Callable[[], object] = lambda: None, leave_seconds: float | None = None
) -> int:
    """Run `work(leaving)` on an event loop and return the exit status: 0 if the work ends without an error.
    SIGTERM and SIGINT set `leaving`.

    If the work raises Hung, the process ends at once, because Python would wait for the thread that hangs.
    Errors are written to stderr in one line: the status is WRONG_INPUT for InvalidRequest, ModelError and
    Refused, which another start would meet again, and FAILED for all others, whether or not they are a
    SpecsotError.

    program: the program's name, for the line that reports an error.
    work: runs the service until the event that it is given is set.
    prepare: called before `work`, for what may take long, such as fetching a model. A signal during this call
        ends the process at once.
    leave_seconds: seconds after a signal in which the process ends, even if its threads still load or fetch.
        None: no limit.

    KeyboardInterrupt and SystemExit are raised unchanged. After `leave_seconds`, the process ends with status
    0.
    """
    try:
        prepare()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_stopped(work, leave_seconds))
    except (InvalidRequest, ModelError, Refused) as error:  # Starting the program again would fail again.
        return _report(program, str(error), WRONG_INPUT)
    except Hung as error:
        os._exit(_report(program, str(error), FAILED))
    except SpecsotError as error:
        return _report(program, str(error), FAILED)
    except Exception as error:
        log.debug("failed", exc_info=error)
        return _report(program, f"{type(error).__name__}: {error}".splitlines()[0], FAILED)
    return 0


async def _until_stopped(work: Work, leave_seconds: float | None) -> None:
    """Run the work, and set its event at the first SIGTERM or SIGINT. Raises what the work raises.

    work: runs the service until the event that it is given is set.
    leave_seconds: seconds after a signal in which the process ends, or None for no limit.

    Every further signal sets the event again and starts a further timer. The process ends with status 0 once
    a timer has expired.
    """
    leaving, loop = asyncio.Event(), asyncio.get_running_loop()

    def leave() -> None:
        """Set the event, and start the timer that ends the process if it does not end by itself."""
        leaving.set()
        if leave_seconds is not None:
            end_timer = threading.Timer(leave_seconds, os._exit, (0,))
            # As a daemon, the timer still runs while Python waits for other threads.
            end_timer.daemon = True
            end_timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave)
    await work(leaving)


def _report(program: str, line: str, status: int) -> int:
    """Write an error to stderr and return the exit status.

    program: name of the program, before the line.
    line: the error in one line.
    status: the exit status.
    """
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
    """Remove the fields of a log line whose value is None.

    logger, method: given by structlog, not needed.
    line: the fields of the log line, by name.
    """
    return {name: value for name, value in line.items() if value is not None}


# structlog writes the repr of a value with one of these characters, and other values unchanged.
QUOTED = frozenset(" \t=\r\n\"'")


def escape(logger: Any, method: str, line: Line) -> Line:
    """Escape unprintable characters, so that a log line stays one line and cannot control the terminal.

    JSON lines are escaped by their encoder.

    logger, method: given by structlog, not needed.
    line: the fields of the log line, by name.
    """
    return {
        name: _escaped(value)
        if isinstance(value, str) and (name == "event" or not QUOTED & set(value))
        else value
        for name, value in line.items()
    }


def _escaped(text: str) -> str:
    r"""Return a text whose unprintable characters are written as in Python source: a newline becomes "\\n".

    text: a field of a log line.
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _for_machines(service: str) -> list[Any]:
    """Return the structlog processors that render a log line as JSON, in order: time stamp in UTC, name of
    the service, traceback of an exception, JSON.

    service: the value of `service` in lines that have none of their own.
    """

    def name(logger: Any, method: str, line: Line) -> Line:
        """Add the service's name to a log line, unless it has one.

        logger, method: given by structlog, not needed.
        line: the fields of the log line, by name.
        """
        return {"service": service, **line}

    stamp = structlog.processors.TimeStamper(fmt="iso")
    return [stamp, name, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _for_people() -> list[Any]:
    """Return the structlog processors that render a log line as text, in order: time of day in local time,
    escapes for control characters, the text, which is colored only on a terminal.

    Tracebacks are written without the values of local variables, because these contain prompts.
    """
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    plain = structlog.dev.plain_traceback
    return [stamp, escape, structlog.dev.ConsoleRenderer(0, sys.stderr.isatty(), exception_formatter=plain)]
