"""`specsot eval`: quality and speed of planned answers against direct ones.

Refuses to know tasks and scores; specsot_app.eval does, and is imported only when asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specsot.errors import InvalidRequest
from specsot_app.commands import options
from specsot_app.running import run


def eval(
    ctx: typer.Context,
    tasks: Annotated[str, typer.Option(help="Which, such as planning,gsm8k.")] = "planning",
    prompts: Annotated[Path | None, typer.Option(help="JSON lines of your own, for one task.")] = None,
    num_samples: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each task, the first ones.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of records; a run goes on from there.")] = Path("eval"),
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 512,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    drafter: options.Drafter = None,
    dtype: options.Numbers = "auto",
    device: options.Device = "cpu",
    stages: options.Stages = None,
    layers: options.Layers = None,
    fleet: options.FleetKind = "embedded",
    master: options.Master = None,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
) -> int:
    """Ask a task's prompts directly and with a plan; tell quality, speed and where planning pays."""
    from specsot_app.eval.running import evaluate
    from specsot_app.eval.tasks import read_task
    from specsot_app.terminal.progress import opening

    names = [name.strip() for name in tasks.split(",")]
    if prompts is not None and len(names) != 1:
        raise InvalidRequest("prompts of your own are for one task", field="prompts")
    asked = [prompt for name in names for prompt in read_task(name, prompts)[:num_samples]]
    wanted = options.wanted_by(ctx.params)
    return run(evaluate(asked, wanted, max_new_tokens, output, sys.stdout, sys.stderr, opening(sys.stderr)))
