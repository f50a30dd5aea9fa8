"""`specsot bench`: measurements, each as a word of its own.

Refuses to know what is measured; specsot_app.bench does, and is imported only when asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure this machine.", rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measure this machine."""


@app.command("demo")
def demo(
    runs: Annotated[int, typer.Option(help="Paired runs of each comparison.")] = 30,
    output: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file.")
    ] = None,
) -> int:
    """Plain, drafted and planned answers of the demo model, side by side."""
    from specsot_app.bench import demo as room

    return room.measure(runs, output)
