"""`specsot infer`: answers one question, streamed to the terminal or as JSON."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

from specsot.errors import InvalidRequest
from specsot.events import NO_PLAN, Numbered, Reason
from specsot.params import MAX_FORM_BYTES, Ask, refuse
from specsot.service.command import Example, command
from specsot.service.option_table import Offer, option
from specsot_app.core.ask import AttentionOptions, FormOptions, RequestOptions, SamplingOptions, ask_of, asked
from specsot_app.fleet.devices import CHOSEN_DEVICE, DEVICE_HELP
from specsot_app.fleet.opening import Opener, has_drafter, open_fleet, prepared
from specsot_app.fleet.options import FleetOptions
from specsot_app.runtime import run_until_signal

if TYPE_CHECKING:
    from specsot.core.view import View
    from specsot_app.terminal.show import OutputFormat, Streams, Summary


NO_QUESTION = 'a question is needed: specsot infer "How can I sleep better?"'
# Separates two answers in a file or a pipe.
BETWEEN = "\n---\n"


@dataclass(frozen=True, slots=True)
class InferOptions:
    """Options of `specsot infer`."""

    HEADING: ClassVar[str] = "Output"

    question: str | None = option(
        None,
        "The question; read from stdin if not given, or if -.",
        positional=True,
    )
    json: bool = option(False, "Print one JSON object per event.")
    compare: bool = option(
        False,
        "Then answer the other way as well, with or without a plan, and print both times.",
        tier="expert",
    )
    request: RequestOptions = field(default_factory=RequestOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    form: FormOptions = field(default_factory=FormOptions)
    fleet: Annotated[FleetOptions, Offer(defaults=CHOSEN_DEVICE, help=DEVICE_HELP)] = field(
        default_factory=FleetOptions
    )


EXAMPLES = (
    Example('specsot infer "How can I sleep better?"', "Ask SmolLM2"),
    Example(
        'specsot infer --model models/llama --draft-model models/llama-eagle3 "Why?"', "With an EAGLE head"
    ),
    Example('specsot infer --master 10.0.0.1:50050 "Why?"', "Ask a fleet that runs already"),
    Example('specsot infer --json --mode direct "Why?" | jq .', "Events for a program"),
)


@command(InferOptions, examples=EXAMPLES)
def infer(given: InferOptions) -> int:
    """Answer one question: show the plan, its branches side by side, the merged answer and statistics."""
    fleet = given.fleet
    schema = given.form.json_schema
    keywords = asked(given.request, given.sampling, given.attention, given.form) | {
        "model": fleet.model if fleet.master else None,
        "drafter": fleet.drafter,
        "json_schema": read_schema(schema) if schema is not None else None,
    }
    question = given.question if given.question not in (None, "-") else read_question()
    if not question.strip():
        raise InvalidRequest(NO_QUESTION, field="prompt")
    ask = ask_of(question, **keywords)
    if given.compare:
        other_way(ask)
    fleet = prepared(fleet, sys.stderr)
    from specsot_app.terminal.show import Streams, format_for, open_with_progress

    streams = Streams(sys.stdout, sys.stderr)
    manner = format_for(streams, given.json)
    opener = open_with_progress(sys.stderr)
    return run_until_signal(answer(ask, fleet, streams, manner, opener, given.compare))


def read_question() -> str:
    """Return the question from a pipe. At a terminal, raises InvalidRequest, which says how to ask."""
    if sys.stdin.isatty():
        raise InvalidRequest(NO_QUESTION, field="prompt")
    return sys.stdin.read().strip()


def read_schema(given: str) -> str:
    """Return the schema that was given on the command line, or the text of the file that was named.

    Raises InvalidRequest if it is neither.
    """
    if given.lstrip().startswith("{"):
        return given
    try:
        with Path(given).open(encoding="utf-8") as file:
            return file.read(MAX_FORM_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise refuse(f"json_schema: {given!r} is neither a schema nor a file to read ({why})") from None


def other_way(ask: Ask, planned: bool = False) -> Ask:
    """Return the same question with a plan, or without one if the first answer was `planned`. Raises
    InvalidRequest.
    """
    if planned:
        return replace(ask, mode="direct", polish=False)
    return replace(ask, mode="sot")


async def answer(
    ask: Ask,
    wanted: FleetOptions,
    streams: Streams,
    manner: OutputFormat,
    opener: Opener = open_fleet,
    compare: bool = False,
) -> int:
    """Open the fleet, show the request, close the fleet; return 1 if the request failed, else 0.

    compare: afterwards, answer the other way and show both durations.
    """
    from specsot_app.core.answer_view import has_no_plan, summary
    from specsot_app.terminal.show import show

    async def showing(asked: Ask, line: Summary) -> View:
        async with aclosing(cast("AsyncGenerator[Numbered]", fleet.generate(asked))) as events:
            return await show(events, manner, streams, line)

    fleet = await opener(wanted)
    try:
        drafter = has_drafter(await fleet.info()) and ask.drafter != "none"
        first = await showing(ask, lambda view: summary(view, drafter))
        if compare and has_no_plan(first.finished):
            print(f"nothing to compare with: {NO_PLAN}", file=streams.err)
        elif compare and first.finished:
            other = other_way(ask, planned=bool(first.panels))
            if manner == "plain":
                print(BETWEEN, file=streams.out, flush=True)
            await showing(other, lambda view: summary(first, drafter, view.finished, "--compare"))
    finally:
        await fleet.close()
    return 1 if first.finished is None or first.finished.reason is Reason.FAILED else 0
