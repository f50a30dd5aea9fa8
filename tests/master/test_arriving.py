"""Long prompts on their way in: they are made into tokens beside everybody else's requests.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio

import pytest

from specsot.errors import InvalidRequest, Overloaded, TimedOut
from specsot.params import Ask, Message
from specsot_master.engine import EngineConfig
from specsot_master.engine.intake import THREAD_CHARACTERS
from specsot_master.text import Text
from tests.master.letters import ANSWER, DIRECT, SAYS, SOT, finished
from tests.master.stage import BASE, Gate, Stage

ENDLESS = Ask(prompt="word " * (THREAD_CHARACTERS // 4), mode="direct")  # more than the context holds


class Slow(Gate, Text):
    """Long texts take until they are let go."""

    def _token_ids(self, text: str, add_bos: bool) -> tuple[int, ...]:
        if len(text) >= THREAD_CHARACTERS:
            self.stop()
        return super()._token_ids(text, add_bos)


TURNS = tuple(Message(("user", "assistant")[n % 2], "a") for n in range(3999))  # more in the template's words


@pytest.mark.parametrize(
    "ask", [ENDLESS, Ask(prompt=ENDLESS.prompt, mode="sot"), Ask(messages=TURNS, mode="direct")]
)
async def test_others_go_on_while_a_long_prompt_is_made_into_tokens(ask: Ask) -> None:
    text = Slow(BASE)
    stage = Stage(SAYS, text=text)
    long = stage.listen(ask)
    await text.begun()
    assert finished(await stage.answer(SOT)).text == ANSWER
    assert not long.done()
    text.release()
    with pytest.raises(InvalidRequest, match="context length is 2048"):
        await long
    stage.assert_clean()


async def test_a_deadline_that_passes_meanwhile() -> None:
    text = Slow(BASE)
    stage = Stage(SAYS, text=text)
    with pytest.raises(TimedOut, match="the deadline passed while the request was looked into"):
        await stage.listen(ENDLESS, timeout=0.01)
    text.release()
    stage.assert_clean()


async def test_there_is_no_more_room_there_than_in_the_queue() -> None:
    text = Slow(BASE)
    stage = Stage(SAYS, text=text, config=EngineConfig(model="demo", queue=2))
    long = [stage.listen(ENDLESS) for _ in range(2)]
    await text.begun()
    with pytest.raises(Overloaded):
        await stage.listen(ENDLESS)
    text.release()
    await asyncio.wait(long)
    assert finished(await stage.answer(DIRECT)).text == SAYS["What is"]
    stage.assert_clean()
