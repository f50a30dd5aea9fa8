"""Runs a service from start to exit status: one event loop, two signals, one clear line when it fails.

Refuses to know what the service does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import structlog
import uvloop

from specsot.errors import Hung, InvalidRequest, ModelError, SpecsotError

log = structlog.get_logger()

FAILED, WRONG_INPUT = 1, 2  # exit statuses

Work = Callable[[asyncio.Event], Awaitable[None]]


def run_service(program: str, work: Work) -> int:
    """Run `work(leaving)`; SIGTERM and SIGINT set `leaving`. The exit status.

    Ends the process at once where a thread hangs: Python would wait for it.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_told(work))
    except (InvalidRequest, ModelError) as error:
        return _tell(program, str(error), WRONG_INPUT)
    except Hung as error:
        os._exit(_tell(program, str(error), FAILED))
    except SpecsotError as error:
        return _tell(program, str(error), FAILED)
    except Exception as error:
        log.debug("failed", exc_info=error)
        return _tell(program, f"{type(error).__name__}: {error}".splitlines()[0], FAILED)
    return 0


async def _until_told(work: Work) -> None:
    leaving, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leaving.set)
    await work(leaving)


def _tell(program: str, line: str, status: int) -> int:
    print(f"{program}: {line}", file=sys.stderr, flush=True)
    return status
