"""A fleet that answers by echoing, at length when asked to, and `specsot chat` over it as a program.

A question "long ..." is written on and on, until somebody cancels it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

from specsot.core.info import Info, ModelInfo
from specsot.errors import ContextLengthExceeded, Unavailable
from specsot.events import Event, Finished, MergedText, Numbered, Planned, Reason, Started, Statistics
from specsot.params import Ask
from specsot_app.fleet.options import FleetOptions

POSITIONS = 100  # characters of a conversation, that is


class TalkativeFleet:
    """`asked`: what came. `writing`: set once a long answer has begun."""

    def __init__(self, positions: int = POSITIONS, no_chat_template: bool = False) -> None:
        self.asked: list[Ask] = []
        self.writing, self.closed = threading.Event(), 0
        self._positions, self._cancelled = positions, asyncio.Event()
        self._model = ModelInfo("echo", "", 1, positions, no_chat_template=no_chat_template)

    async def generate(self, ask: Ask) -> AsyncGenerator[Numbered]:
        question = ask.messages[-1].content
        if question == "broken":
            raise Unavailable("the ring broke")
        length = sum(len(message.content) for message in ask.messages)
        if length > self._positions:
            raise ContextLengthExceeded.of(self._positions, length, 0)
        self.asked.append(ask)
        written = ""
        yield Numbered(0, Started("r-1", "echo", ask.mode, 1, length))
        yield Numbered(1, Planned(()))
        for place, word in enumerate(["yes,", " ", question], start=2):
            yield Numbered(place, MergedText(len(written), word))
            written += word
        if question.startswith("long"):
            self.writing.set()
            await self._cancelled.wait()
        yield Numbered(9, self._end(written, length))

    def _end(self, written: str, length: int) -> Event:
        reason = Reason.CANCELLED if self._cancelled.is_set() else Reason.STOP
        self._cancelled.clear()
        return Finished(reason, written, (), Statistics(merged_tokens=3, prompt_tokens=length))

    async def cancel(self, request: str) -> bool:
        self._cancelled.set()
        return True

    async def info(self) -> Info:
        return Info(models=(self._model,))

    async def close(self) -> None:
        self.closed += 1


async def opened(wanted: FleetOptions) -> TalkativeFleet:
    return TalkativeFleet()


if __name__ == "__main__":
    from specsot_app.commands.chat import converse, leave
    from specsot_app.terminal.chat import ChatHistory
    from specsot_app.terminal.line_input import LineInput
    from specsot_app.terminal.show import Streams

    keyboard = LineInput(sys.stdin, sys.stdout, Path(os.environ["XDG_STATE_HOME"]) / "questions")
    streams = Streams(sys.stdout, sys.stderr)
    signal.signal(signal.SIGTERM, leave)
    sys.exit(converse(FleetOptions(), ChatHistory(), {}, keyboard, streams, opened))
