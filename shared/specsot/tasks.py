"""Starts background tasks whose failure is logged and handled, never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")
Failed = Callable[[BaseException], object]


def start(work: Coroutine[Any, Any, T], failed: Failed | None = None) -> asyncio.Task[T]:
    """A task on the running loop, for work that nobody awaits. What it raises is logged with its traceback as
    soon as it ends, and told to `failed`, which ends whatever depends on it.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(partial(_tell, work.__qualname__, failed))
    return task


def _tell(name: str, failed: Failed | None, task: asyncio.Task[Any]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    log.error("a background task failed", task=name, exc_info=error)
    if failed is not None:
        failed(error)
