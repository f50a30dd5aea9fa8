"""`specsot train`: an EAGLE-3 head for a base, from text.

Refuses to know how one is trained; specsot_lab.train does, and is imported only when asked for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specsot_app.commands import options
from specsot_app.fleets import Dtype, overrides_of
from specsot_app.fleets import Wanted as Fleet


def train(
    output: Annotated[
        Path, typer.Option(help="Where the head goes, and the run's state; goes on from there.")
    ],
    model: Annotated[Path, typer.Option(help="The base's directory.")],
    questions: Annotated[
        list[Path] | None,
        typer.Option(
            help="File or folder of questions, one a line or JSON lines; the base answers them. Repeatable."
        ),
    ] = None,
    phrasing: Annotated[
        list[str] | None,
        typer.Option(help="How a line of text is asked, such as 'Explain {}.'; repeatable."),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="File or folder of conversations (JSON lines) or plain text; repeatable."),
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="A head to go on from, or to widen; else a new one.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps; 0 measures the head to start from.")] = 2000,
    batch_tokens: Annotated[int, typer.Option(help="Positions of a step.")] = 16384,
    learning_rate: Annotated[float, typer.Option(help="AdamW's, at its peak.")] = 1e-3,
    depth: Annotated[int, typer.Option(help="Steps of the training-time test.")] = 7,
    length: Annotated[int, typer.Option(help="Positions of a row; longer ones are cut.")] = 1024,
    held_out: Annotated[float, typer.Option(help="Share of the questions that are only measured.")] = 0.03,
    every: Annotated[int, typer.Option(help="Steps between measurements and checkpoints.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order.")] = 0,
    draft_vocab: Annotated[int | None, typer.Option(help="Ids the head drafts: the most frequent.")] = None,
    intermediate: Annotated[
        int | None, typer.Option(help="Width of its MLP; the base's if not given.")
    ] = None,
    aux_layers: options.AuxLayers = None,
    direct: Annotated[
        float, typer.Option(help="Share of the questions also answered without a plan.")
    ] = 0.25,
    answer_tokens: Annotated[int, typer.Option(help="Of a branch or a direct answer, at most.")] = 256,
    together: Annotated[int, typer.Option(help="Answers written side by side.")] = 64,
    dtype: Annotated[Dtype, typer.Option(help="Of the base; bf16 trains in mixed precision.")] = "auto",
    device: options.Device = "cpu",
) -> int:
    """Train an EAGLE-3 head on what a base itself writes, or on conversations; tell its acceptance."""
    from specsot_lab.train import running
    from specsot_lab.train.settings import AnswerOptions, HeadPlan, Learning, TrainOptions

    wanted = TrainOptions(
        model,
        output,
        tuple(questions or ()),
        tuple(phrasing or ("{}",)),
        tuple(data or ()),
        start,
        HeadPlan(draft_vocab, intermediate, overrides_of(Fleet(aux_layers=aux_layers)).aux_layers),
        Learning(
            steps=steps,
            batch_tokens=batch_tokens,
            rate=learning_rate,
            depth=depth,
            length=length,
            held_out=held_out,
            every=every,
            seed=seed,
        ),
        AnswerOptions(direct, answer_tokens=answer_tokens, together=together),
        dtype,
        device,
    )
    return running.train(wanted, sys.stdout, sys.stderr)
