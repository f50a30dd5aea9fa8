"""Bars on stderr for what takes long; nothing at all where nobody watches.

Refuses to know what is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specsot_app.fleets import Fleet, Opener, Wanted, open_fleet


def bars(err: TextIO) -> Progress:
    """Gone when they are done."""
    console = Console(file=err)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


@contextmanager
def counting_bar(err: TextIO, what: str, total: int) -> Generator[Callable[[], None]]:
    """A bar that the yielded function moves on by one."""
    with bars(err) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def open_with_progress(err: TextIO) -> Opener:
    """open_fleet, with a bar while it loads."""

    async def opener(wanted: Wanted) -> Fleet:
        if wanted.master is not None:
            return await open_fleet(wanted)
        with bars(err) as progress:
            task = progress.add_task("loading", total=None)

            def watch(what: str, there: int, total: int) -> None:
                progress.update(task, description=f"loading {what}", completed=there, total=total)

            return await open_fleet(wanted, watch)

    return opener
