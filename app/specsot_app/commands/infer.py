"""`specsot infer`: one question, answered before your eyes.

Refuses to know how a fleet works and how an answer is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from specsot.drafting import DraftMode, TunerName
from specsot.errors import InvalidRequest
from specsot.events import Numbered, Reason
from specsot.forms import MAX_FORM_BYTES, refuse
from specsot.members import Layout, WeightFormat
from specsot.params import Ask, DrafterName, Mode
from specsot_app.asking import ask_of
from specsot_app.fleets import Dtype, Kind, Opener, Wanted, models_of, open_fleet
from specsot_app.running import run

if TYPE_CHECKING:
    from specsot_app.terminal.show import Manner, Streams


def infer(
    question: Annotated[str | None, typer.Argument(help="The question; or through a pipe.")] = None,
    mode: Annotated[Mode, typer.Option(help="auto: the model chooses; sot: a plan; direct: none.")] = "auto",
    drafter: Annotated[
        DrafterName | None, typer.Option(help="Who drafts; if not given, a head where there is one.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens of the whole answer.")] = None,
    max_branch_tokens: Annotated[int | None, typer.Option(help="Tokens of one branch.")] = None,
    max_parallel: Annotated[int | None, typer.Option(help="Branches written at once.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the most likely token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of probability to draw from.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Tokens to draw from; 0 for all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least share of the likeliest token's probability.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divides logits of what stands there already; 1 for none.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Off the logits of what was written already.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, for each time it was written.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=VALUE: what a token's logit gains; repeatable.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: tokens' log-probabilities and so many others'.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a branch; repeatable.")] = None,
    constraint: Annotated[bool, typer.Option(help="Hold the plan to its grammar.")] = True,
    json_schema: Annotated[
        str | None, typer.Option(help="The answer is JSON of this schema: a file, or the schema itself.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.")] = False,
    regex: Annotated[str | None, typer.Option(help="The whole answer matches this regex.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is one of these texts; repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model directory; the demo if not given.")] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Directory of the EAGLE head, or of the small model.")
    ] = None,
    draft_format: Annotated[
        WeightFormat, typer.Option(help="bin: the head's pytorch_model.bin.")
    ] = "safetensors",
    model_format: Annotated[
        WeightFormat, typer.Option(help="bin: the model's pytorch_model.bin.")
    ] = "safetensors",
    drafter_rope_theta: Annotated[
        float | None, typer.Option(help="The head's rotary base, if its config is wrong.")
    ] = None,
    aux_layers: Annotated[
        str | None, typer.Option(help="Layers whose input the head reads, such as 2,16,29.")
    ] = None,
    draft_mode: Annotated[
        DraftMode | None, typer.Option(help="A chain, a tree, or (of a model) a pruned tree.")
    ] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="How deep drafts go at most.")] = None,
    draft_breadth: Annotated[int | None, typer.Option(help="Children of every node of a tree.")] = None,
    draft_nodes: Annotated[int | None, typer.Option(help="Nodes of a tree at most.")] = None,
    draft_threshold: Annotated[
        float | None, typer.Option(help="Pruned: nothing below nodes less likely than this.")
    ] = None,
    tuner: Annotated[
        TunerName, typer.Option(help="Who decides how much is drafted; seed and fixed are for comparisons.")
    ] = "measured",
    blend: Annotated[bool, typer.Option(help="Let what the text suggests join the drafts.")] = True,
    dtype: Annotated[Dtype, typer.Option(help="Numbers to compute with.")] = "auto",
    device: Annotated[str, typer.Option(help="Torch device of an embedded fleet.")] = "cpu",
    branch_layout: Annotated[Layout, typer.Option(help="How branches lie in a frame.")] = "batched",
    stages: Annotated[int | None, typer.Option(help="Layer ranges the model is cut into.")] = None,
    layers: Annotated[str | None, typer.Option(help="The ranges themselves, such as 0:4,4:8.")] = None,
    fleet: Annotated[Kind, typer.Option(help="In this process, or three kinds of processes.")] = "embedded",
    master: Annotated[str | None, typer.Option(help="host:port of a master that runs already.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> int:
    """Answer one question: plan, branches side by side, merged answer, figures."""
    wanted = Wanted(
        kind=fleet,
        master=master,
        model=model,
        draft_model=draft_model,
        draft_format=draft_format,
        model_format=model_format,
        drafter_rope_theta=drafter_rope_theta,
        aux_layers=aux_layers,
        dtype=dtype,
        device=device,
        stages=stages,
        layers=layers,
        drafter=drafter,
        draft_mode=draft_mode,
        draft_tokens=draft_tokens,
        draft_breadth=draft_breadth,
        draft_nodes=draft_nodes,
        draft_threshold=draft_threshold,
        tuner=tuner,
        blend=blend,
        layout=branch_layout,
    )
    if master is None:
        models_of(wanted)  # what cannot be is told before anything is loaded
    ask = ask_of(
        question if question not in (None, "-") else read_question(),
        model=model if master else None,
        mode=mode,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        max_branch_tokens=max_branch_tokens,
        max_parallel=max_parallel,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        logprobs=logprobs,
        seed=seed,
        stop=stop,
        constraint=constraint,
        json_schema=read_schema(json_schema) if json_schema is not None else None,
        json_object=json_object,
        regex=regex,
        choice=choice or None,
    )
    from specsot_app.terminal.show import Streams, manner_of

    streams = Streams(sys.stdout, sys.stderr)
    return run(answer(ask, wanted, streams, manner_of(streams, json)))


def read_question() -> str:
    """The question from a pipe; a person at a terminal is told how to ask."""
    if sys.stdin.isatty():
        raise InvalidRequest('a question is needed: specsot infer "Explain photosynthesis."', field="prompt")
    return sys.stdin.read().strip()


def read_schema(given: str) -> str:
    """A schema as it was written on the command line, or the text of the file that was named there."""
    if given.lstrip().startswith("{"):
        return given
    try:
        with Path(given).open(encoding="utf-8") as file:
            return file.read(MAX_FORM_BYTES + 1)
    except (OSError, ValueError) as error:
        raise refuse(f"json_schema: {given!r} is neither a schema nor a file to read ({error})") from None


async def answer(
    ask: Ask, wanted: Wanted, streams: Streams, manner: Manner, opener: Opener = open_fleet
) -> int:
    """Open the fleet, show the request, close the fleet; 1 when the request failed."""
    from specsot_app.terminal.show import show

    fleet = await opener(wanted)
    try:
        async with aclosing(cast("AsyncGenerator[Numbered]", fleet.generate(ask))) as events:
            view = await show(events, manner, streams)
    finally:
        await fleet.close()
    return 1 if view.finished is None or view.finished.reason is Reason.FAILED else 0
