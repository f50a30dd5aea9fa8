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
from specsot.params import MAX_FORM_BYTES, Ask, Message, refuse
from specsot.service.command import Example, command
from specsot.service.option_table import Offer, option
from specsot_app.core.ask import AttentionOptions, FormOptions, RequestOptions, SamplingOptions, ask_of, asked
from specsot_app.fleet.devices import CHOSEN_DEVICE, DEVICE_HELP
from specsot_app.fleet.opening import Opener, has_drafter, open_fleet, prepared, print_template_notice
from specsot_app.fleet.options import FleetOptions
from specsot_app.runtime import run_until_signal

if TYPE_CHECKING:
    from specsot.core.view import View
    from specsot_app.terminal.show import OutputFormat, Streams, Summary


# Error text if no question was given.
NO_QUESTION = 'a question is needed: specsot infer "How can I sleep better?"'
# Separates two answers in a file or a pipe.
BETWEEN = "\n---\n"


@dataclass(frozen=True, slots=True)
class InferOptions:
    """Options of `specsot infer`.

    question: The question; None or "-": it is read from stdin.
    json: True: print one JSON object for each event.
    compare: True: afterwards, answer the other way, with or without a plan.
    system_prompt: System message before the question; empty: none.
    request: Options of the request.
    sampling: Sampling options of the request.
    attention: KV policy of the request.
    form: Form that the answer must have.
    fleet: Options of the fleet that answers.
    """

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
    system_prompt: str = option("", "System message, before the question.", tier="expert")
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
def infer(options: InferOptions) -> int:
    """Answer one question: show the plan, its branches side by side, the merged answer and statistics.

    \f The exit status is 1 if the request failed, else 0, also for an answer that was cut at its limit.
    InvalidRequest is raised for an empty question, a missing question at a terminal, and, with --compare, a
    request that cannot have a plan, before anything is loaded. Ctrl-C raises KeyboardInterrupt.
    """
    fleet = options.fleet
    schema = options.form.json_schema
    keywords = asked(options.request, options.sampling, options.attention, options.form) | {
        "model": fleet.model if fleet.master else None,
        "drafter": fleet.drafter,
        "json_schema": read_schema(schema) if schema is not None else None,
    }
    question = options.question if options.question not in (None, "-") else read_question()
    if not question.strip():
        raise InvalidRequest(NO_QUESTION, field="prompt")
    messages = (Message("system", options.system_prompt), Message("user", question))
    ask = ask_of(messages if options.system_prompt else question, **keywords)
    if options.compare:
        with_other_mode(ask)
    fleet = prepared(fleet, sys.stderr)
    from specsot_app.terminal.show import Streams, format_for, open_with_progress

    streams = Streams(sys.stdout, sys.stderr)
    output_format = format_for(streams, options.json)
    opener = open_with_progress(sys.stderr)
    return run_until_signal(answer(ask, fleet, streams, output_format, opener, options.compare))


def read_question() -> str:
    """Return the question from a pipe, without surrounding white space; it may be empty.

    Raises InvalidRequest at a terminal, with a text that says how to ask.
    """
    if sys.stdin.isatty():
        raise InvalidRequest(NO_QUESTION, field="prompt")
    return sys.stdin.read().strip()


def read_schema(schema: str) -> str:
    """Return the JSON schema that --json-schema gives: itself, or the text of the file that it names.

    The file is read up to one byte more than MAX_FORM_BYTES, so that a longer one is refused later.

    Spaces before "{" are ignored. A file that is not UTF-8 raises as well.

    schema: A text that begins with "{", or the name of a file.
    Raises InvalidRequest for a name of no readable file.
    """
    if schema.lstrip().startswith("{"):
        return schema
    try:
        with Path(schema).open(encoding="utf-8") as file:
            return file.read(MAX_FORM_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise refuse(f"json_schema: {schema!r} is neither a schema nor a file to read ({reason})") from None


def with_other_mode(ask: Ask, planned: bool = False) -> Ask:
    """Return the same question with a plan, or without one if the first answer was planned.

    The second answer without a plan is not polished.

    ask: The first request.
    planned: True if its answer was planned.
    Raises InvalidRequest if the request cannot have a plan.
    """
    if planned:
        return replace(ask, mode="direct", polish=False)
    return replace(ask, mode="sot")


async def answer(
    ask: Ask,
    options: FleetOptions,
    streams: Streams,
    output_format: OutputFormat,
    opener: Opener = open_fleet,
    compare: bool = False,
) -> int:
    """Open the fleet, show the answer to one request, close the fleet; return 1 if the request failed, else
    0.

    With `compare`, a first answer whose plan was dropped gives a remark and no second answer. The exit
    status depends on the first answer alone. The fleet is closed in every case; what it raises is passed on.

    ask: The request.
    options: Options of the fleet to open.
    streams: The streams of answers and of remarks.
    output_format: Format in which the events are shown: live panels, plain text or JSON lines.
    opener: Opens the fleet.
    compare: True: afterwards, answer the other way and show both durations.
    """
    from specsot_app.core.answer_view import has_no_plan, summary
    from specsot_app.terminal.show import show

    async def show_answer(shown_ask: Ask, make_summary: Summary) -> View:
        """Send a request, show its events, and return the last view.

        shown_ask: The request to send.
        make_summary: Makes the line below the answer from the last view.
        """
        async with aclosing(cast("AsyncGenerator[Numbered]", fleet.generate(shown_ask))) as events:
            return await show(events, output_format, streams, make_summary)

    fleet = await opener(options)
    try:
        info = await fleet.info()
        print_template_notice(info, streams.err)
        drafter = has_drafter(info) and ask.drafter != "none"
        first = await show_answer(ask, lambda view: summary(view, drafter))
        if compare and has_no_plan(first.finished):
            print(f"nothing to compare with: {NO_PLAN}", file=streams.err)
        elif compare and first.finished:
            other_ask = with_other_mode(ask, planned=bool(first.panels))
            if output_format == "plain":
                print(BETWEEN, file=streams.out, flush=True)
            await show_answer(other_ask, lambda view: summary(first, drafter, view.finished, "--compare"))
    finally:
        await fleet.close()
    return 1 if first.finished is None or first.finished.reason is Reason.FAILED else 0
