"""`specsot chat`: a conversation at the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from specsot.checkpoint.cache import state_folder
from specsot.params import Ask
from specsot.service.command import Example, command
from specsot.service.option_table import Offer, option
from specsot.service.runtime_env import TERMINATED
from specsot_app.core.ask import AttentionOptions, RequestOptions, SamplingOptions, ask_of, asked
from specsot_app.fleet.devices import CHOSEN_DEVICE, DEVICE_HELP
from specsot_app.fleet.opening import Opener, has_drafter, open_fleet, prepared, print_template_notice
from specsot_app.fleet.options import FleetOptions

if TYPE_CHECKING:
    from specsot_app.terminal.chat import ChatHistory
    from specsot_app.terminal.line_input import LineInput
    from specsot_app.terminal.show import Streams


# The options of a fleet that a chat offers.
OF_CHAT = Offer(
    without=("devices", "transport", "comm_mode", "hop_dtype"), defaults=CHOSEN_DEVICE, help=DEVICE_HELP
)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of `specsot chat`.

    system_prompt: System message before the conversation; empty: none.
    request: Options of every question's request.
    sampling: Sampling options of every question.
    attention: KV policy of every question.
    fleet: Options of the fleet that answers.
    """

    HEADING: ClassVar[str] = "Conversation"

    system_prompt: str = option("", "System message, before the conversation.")
    request: RequestOptions = field(default_factory=RequestOptions)
    sampling: Annotated[SamplingOptions, Offer(without=("logit_bias", "logprobs"))] = field(
        default_factory=SamplingOptions
    )
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    fleet: Annotated[FleetOptions, OF_CHAT] = field(default_factory=FleetOptions)


EXAMPLES = (
    Example("specsot chat --model models/llama", "Talk to a model"),
    Example('specsot chat --system-prompt "Answer in one sentence."', "With a system message"),
)


@command(ChatOptions, examples=EXAMPLES)
def chat(options: ChatOptions) -> int:
    """Hold a conversation: questions and answers in turn, until Ctrl-D. /help lists the commands.

    Ctrl-C stops the answer that is being written; between answers it leaves the chat.

    \f The exit status is 1 if a question was not answered, TERMINATED after SIGTERM, else 0. Options that no
    request could have raise InvalidRequest before anything is loaded. The questions are kept in a file of
    this user's state, for the next chat.
    """
    fleet = options.fleet
    keywords = asked(options.request, options.sampling, options.attention) | {
        "model": fleet.model if fleet.master else None,
        "drafter": fleet.drafter,
    }
    ask_of("What cannot be asked?", **keywords)
    fleet = prepared(fleet, sys.stderr)
    from specsot_app.terminal.chat import ChatHistory
    from specsot_app.terminal.line_input import LineInput
    from specsot_app.terminal.show import Streams, open_with_progress

    streams = Streams(sys.stdout, sys.stderr)
    keyboard = LineInput(sys.stdin, sys.stdout, state_folder() / "questions")
    history = ChatHistory(options.request.mode, options.system_prompt, seed=options.sampling.seed)
    signal.signal(signal.SIGTERM, leave)
    return converse(fleet, history, keywords, keyboard, streams, open_with_progress(sys.stderr))


def leave(signal_number: int, frame: FrameType | None) -> None:
    """End the process with status TERMINATED, so that the fleet is closed on the way out.

    signal_number: Number of the signal; it is not used.
    frame: The interrupted stack frame, which Python passes to a signal handler; it is not used.
    Raises SystemExit always.
    """
    raise SystemExit(TERMINATED)


def converse(
    options: FleetOptions,
    history: ChatHistory,
    request_options: Mapping[str, Any],
    keyboard: LineInput,
    streams: Streams,
    opener: Opener = open_fleet,
) -> int:
    """Open the fleet, run the chat, and close the fleet; return the exit status: 1 if a question was not
    answered, else 0.

    At a terminal, a line on the error stream names the model and its positions first. Polishing is left out
    in mode "direct". The fleet is closed and the background loop stopped in every case; what opening raises
    is passed on.

    options: Options of the fleet to open.
    history: The conversation to begin with.
    request_options: Keywords of `ask_of` that hold for every question.
    keyboard: The source of the user's lines.
    streams: The streams of answers and of remarks.
    opener: Opens the fleet.
    """
    from specsot_app.runtime import BackgroundLoop
    from specsot_app.terminal.chat import Chat
    from specsot_app.terminal.show import format_for

    def make_ask(history: ChatHistory, question: str) -> Ask:
        """Return the request for a question; the history decides its mode and seed.

        history: The conversation before the question.
        question: The text that the user sent.
        """
        polish = bool(request_options.get("polish")) and history.mode != "direct"
        return ask_of(
            history.with_question(question),
            **{**request_options, "mode": history.mode, "polish": polish, "seed": history.seed},
        )

    background = BackgroundLoop()
    try:
        fleet = background.run(opener(options))
        try:
            info = background.run(fleet.info())
            models = info.models
            print_template_notice(info, streams.err)
            has_drafter_in_use = has_drafter(info) and request_options.get("drafter") != "none"
            positions = models[0].max_positions if models else None
            if sys.stdin.isatty():
                print(
                    f"{models[0].name} · {positions} positions · /help" if models else "/help",
                    file=streams.err,
                )
            output_format = format_for(streams, False)
            return Chat(
                background, fleet, make_ask, keyboard, streams, output_format, positions, has_drafter_in_use
            ).run(history)
        finally:
            background.run(fleet.close())
    finally:
        background.stop()
