"""`specsot serve`: master, workers and drafter as processes of this machine, until told to stop.

Refuses to know how a service works; it starts them and passes their lines on.
"""

from __future__ import annotations

from typing import Annotated

import typer

from specsot_app.fleets import Dtype


def serve(
    port: Annotated[int, typer.Option(help="Where the master listens.")] = 50050,
    workers: Annotated[int, typer.Option(help="Layer ranges, one process each.")] = 2,
    model: Annotated[str | None, typer.Option(help="Model directory; the demo if not given.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Directory of the EAGLE-3 head.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Numbers to compute with.")] = "auto",
) -> int:
    """Start a whole fleet here; Ctrl-C ends it."""
    raise SystemExit((port, workers, model, draft_model, dtype))
