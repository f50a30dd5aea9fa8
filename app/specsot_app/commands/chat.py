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
from specsot_app.core.ask import AttentionOptions, RequestOptions, SamplingOptions, ask_of, asked
from specsot_app.fleet.devices import CHOSEN_DEVICE, DEVICE_HELP
from specsot_app.fleet.opening import Opener, has_drafter, open_fleet, prepared
from specsot_app.fleet.options import FleetOptions

if TYPE_CHECKING:
    from specsot_app.terminal.chat import ChatHistory
    from specsot_app.terminal.line_input import LineInput
    from specsot_app.terminal.show import Streams

# Exit status after SIGTERM: 128 + 15.
TERMINATED = 143


OF_CHAT = Offer(
    without=("devices", "transport", "comm_mode", "hop_dtype"), defaults=CHOSEN_DEVICE, help=DEVICE_HELP
)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of `specsot chat`."""

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
def chat(given: ChatOptions) -> int:
    """Hold a conversation: questions and answers in turn, until Ctrl-D. /help lists the commands.

    Ctrl-C stops the answer that is being written; between answers it leaves the chat.
    """
    fleet = given.fleet
    keywords = asked(given.request, given.sampling, given.attention) | {
        "model": fleet.model if fleet.master else None,
        "drafter": fleet.drafter,
    }
    ask_of("What cannot be asked?", **keywords)
    fleet = prepared(fleet, sys.stderr)
    from specsot_app.terminal.chat import ChatHistory
    from specsot_app.terminal.line_input import input_from
    from specsot_app.terminal.show import Streams, open_with_progress

    streams = Streams(sys.stdout, sys.stderr)
    keyboard = input_from(sys.stdin, sys.stdout, state_folder() / "questions")
    talk = ChatHistory(given.request.mode, given.system_prompt, seed=given.sampling.seed)
    signal.signal(signal.SIGTERM, leave)
    return converse(fleet, talk, keywords, keyboard, streams, open_with_progress(sys.stderr))


def leave(number: int, frame: FrameType | None) -> None:
    """End the process by an exception, so that the fleet is closed on the way out."""
    raise SystemExit(TERMINATED)


def converse(
    wanted: FleetOptions,
    talk: ChatHistory,
    asked: Mapping[str, Any],
    keyboard: LineInput,
    streams: Streams,
    opener: Opener = open_fleet,
) -> int:
    """Open the fleet, run the chat, and close the fleet; return the exit status."""
    from specsot_app.runtime import BackgroundLoop
    from specsot_app.terminal.chat import Chat
    from specsot_app.terminal.show import format_for

    def asker(talk: ChatHistory, question: str) -> Ask:
        polish = bool(asked.get("polish")) and talk.mode != "direct"
        return ask_of(
            talk.with_question(question), **{**asked, "mode": talk.mode, "polish": polish, "seed": talk.seed}
        )

    background = BackgroundLoop()
    try:
        fleet = background.run(opener(wanted))
        try:
            told = background.run(fleet.info())
            known = told.models
            drafter = has_drafter(told) and asked.get("drafter") != "none"
            positions = known[0].max_positions if known else None
            if sys.stdin.isatty():
                print(
                    f"{known[0].name} · {positions} positions · /help" if known else "/help", file=streams.err
                )
            manner = format_for(streams, False)
            return Chat(background, fleet, asker, keyboard, streams, manner, positions, drafter).go_on(talk)
        finally:
            background.run(fleet.close())
    finally:
        background.stop()
