"""`specsot eval`: quality and speed of planned answers against direct ones.

Refuses to know tasks and scores; specsot_lab.eval does, and is imported only when asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specsot.errors import InvalidRequest
from specsot_app.commands import options
from specsot_app.event_loop import run_until_signal

if TYPE_CHECKING:
    from specsot_lab.eval.judge import Judge


def eval(
    ctx: typer.Context,
    tasks: Annotated[str, typer.Option(help="Which, such as planning,gsm8k.")] = "planning",
    prompts: Annotated[Path | None, typer.Option(help="JSON lines of your own, for one task.")] = None,
    num_samples: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each task, the first ones.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of records; a run goes on from there.")] = Path("eval"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the records in it first.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 512,
    judge: Annotated[
        str | None,
        typer.Option(
            help="OpenAI-compatible endpoint that compares the answers, such as http://host:8000/v1."
        ),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option(help="The model asked there; the key stands in SPECSOT_JUDGE_KEY.")
    ] = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    drafter: options.Drafter = None,
    preset: options.AnyPreset = None,
    dtype: options.Numbers = "auto",
    quantization: options.Rounding = None,
    kv_cache_dtype: options.KvNumbers = None,
    batch_invariant: options.BatchInvariant = False,
    draft_dtype: options.DraftNumbers = None,
    draft_quantization: options.DraftRounding = None,
    device: options.Device = "cpu",
    stages: options.Stages = None,
    layers: options.Layers = None,
    fleet: options.FleetKind = "embedded",
    master: options.Master = None,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
) -> int:
    """Ask a task's prompts directly and with a plan; tell quality, speed and where planning pays."""
    from specsot_app.terminal.show import open_with_progress
    from specsot_lab.eval.records import Folder
    from specsot_lab.eval.running import Run, evaluate, warmed
    from specsot_lab.eval.settings import settings_of
    from specsot_lab.eval.tasks import read_task

    names = list(dict.fromkeys(name.strip() for name in tasks.split(",")))
    if prompts is not None and len(names) != 1:
        raise InvalidRequest("prompts of your own are for one task", field="prompts")
    asked = [prompt for name in names for prompt in read_task(name, prompts)[:num_samples]]
    if not asked:
        raise InvalidRequest("there are no prompts to ask", field="prompts")
    what = Run(asked, options.wanted_by(ctx.params), max_new_tokens, Folder(output))
    referee = judge_of(judge, judge_model)
    if fresh:
        settings_of(what.wanted, max_new_tokens)  # a run that cannot begin forgets nothing
        what.folder.forget()
    return run_until_signal(
        evaluate(what, sys.stdout, sys.stderr, warmed(open_with_progress(sys.stderr)), referee)
    )


def judge_of(url: str | None, name: str | None, environment: Mapping[str, str] = os.environ) -> Judge | None:
    """As the command was told. Raises InvalidRequest."""
    if url is None and name is None:
        return None
    if url is None or name is None:
        raise InvalidRequest("a judge needs both --judge and --judge-model", field="judge")
    try:
        from specsot_lab.eval.judge_endpoint import Endpoint
    except ImportError:
        raise InvalidRequest("a judge needs openai: pip install openai", field="judge") from None
    return Endpoint(url, name, environment.get("SPECSOT_JUDGE_KEY", "").strip())
