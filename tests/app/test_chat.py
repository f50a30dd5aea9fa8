"""Conversations with a fleet that echoes: what is sent, remembered, left out, stopped, refused."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specsot.params import Ask, Message
from specsot_app.cli import main
from specsot_app.commands.chat import converse
from specsot_app.commands.infer import answer
from specsot_app.fleet.options import FleetOptions
from specsot_app.terminal.chat import HELP, ChatHistory, wrapped_help
from specsot_app.terminal.show import Streams
from tests.app.talkative import TalkativeFleet


class Script:
    """A person who types these lines; a line of `meanwhile` comes once a long answer is being written."""

    def __init__(self, fleet: TalkativeFleet, lines: Sequence[str], meanwhile: Sequence[str] = ()) -> None:
        self._fleet, self._lines, self._meanwhile = fleet, iter(lines), list(meanwhile)

    def read(self, prompt: str) -> str | None:
        line = next(self._lines, None)
        if line == "^C":
            raise KeyboardInterrupt
        return line

    def during(self, work: Future[Any]) -> Iterator[str]:
        if self._meanwhile and self._fleet.writing.wait(100):
            yield from self._meanwhile
            self._meanwhile = []
        wait([work])


class Session:
    def __init__(
        self,
        *lines: str,
        meanwhile: Sequence[str] = (),
        positions: int = 1000,
        no_chat_template: bool = False,
        **talk: Any,
    ) -> None:
        self.fleet = TalkativeFleet(positions, no_chat_template)
        out, err = io.StringIO(), io.StringIO()

        async def opener(wanted: FleetOptions) -> TalkativeFleet:
            return self.fleet

        script = Script(self.fleet, lines, meanwhile)
        self.status = converse(
            FleetOptions(), replace(ChatHistory(seed=7), **talk), {}, script, Streams(out, err), opener
        )
        self.out, self.err = out.getvalue(), err.getvalue()

    def sent(self, number: int) -> list[str]:
        return [message.content for message in self.fleet.asked[number].messages]


def test_a_model_without_a_chat_template_is_announced() -> None:
    notice = "specsot: echo has no chat template: a base model may continue the question"
    assert Session("Why?", no_chat_template=True).err.startswith(notice)
    assert "template" not in Session("Why?").err


def test_one_answer_of_a_model_without_a_chat_template_is_announced() -> None:
    streams = Streams(io.StringIO(), io.StringIO())

    async def opener(wanted: FleetOptions) -> TalkativeFleet:
        return TalkativeFleet(no_chat_template=True)

    ask = Ask(messages=(Message("user", "Why?"),))
    assert asyncio.run(answer(ask, FleetOptions(), streams, "plain", opener)) == 0
    assert streams.err.getvalue().startswith("specsot: echo has no chat template: ")


def test_every_question_is_sent_with_the_whole_conversation() -> None:
    session = Session("a?", "/mode sot", "b?", "/clear", "c?", system="Be brief.")
    assert session.out == "yes, a?\nyes, b?\nyes, c?\n"
    assert session.sent(1) == ["Be brief.", "a?", "yes, a?", "b?"]
    assert session.sent(2) == ["Be brief.", "c?"]
    assert [ask.mode for ask in session.fleet.asked] == ["auto", "sot", "sot"]
    assert {ask.seed for ask in session.fleet.asked} == {7}
    assert (session.status, session.fleet.closed) == (0, 1)


def test_a_stopped_answer_stays_as_far_as_it_was_written() -> None:
    session = Session("long one", "then?", meanwhile=["/stop"])
    assert session.out == "yes, long one\nyes, then?\n"
    assert "; stopped\n" in session.err
    assert session.sent(1) == ["long one", "yes, long one", "then?"]
    assert session.status == 0


def test_the_last_question_is_answered_the_other_way_for_comparison_and_not_remembered() -> None:
    session = Session("/compare", "a?", "/compare", "b?")
    assert session.err.startswith("no question was answered yet\n")
    assert "0.0 s (3 tokens); direct, by /compare: 0.0 s (3 tokens); 3 tokens in 0 steps" in session.err
    assert [ask.mode for ask in session.fleet.asked] == ["auto", "sot", "auto"]
    assert session.sent(1) == ["a?"]
    assert session.sent(2) == ["a?", "yes, a?", "b?"]


def test_an_answer_is_tried_again_in_its_place() -> None:
    session = Session("/retry", "a?", "b?", "/seed 9", "/retry", "c?")
    assert session.sent(2) == ["a?", "yes, a?", "b?"]
    assert session.sent(3) == ["a?", "yes, a?", "b?", "yes, b?", "c?"]
    assert [ask.seed for ask in session.fleet.asked] == [7, 7, 9, 9]
    assert {ask.sampling.temperature for ask in session.fleet.asked} == {0.0}, "a seed was chosen"
    drawn = Session("a?", "/retry", "b?", seed=None)
    assert [ask.sampling.temperature for ask in drawn.fleet.asked] == [0.0, 0.7, 0.0]
    assert session.err.startswith("no question was answered yet\n")


def test_an_option_that_cannot_be_applied_is_reported_and_the_others_apply() -> None:
    lines = [
        "/mode fast",
        "/mode",
        "/stop it",
        "/seed -1",
        f"/seed {2**63}",
        f"/seed {'9' * 5000}",
        "/load",
        "",
        "/help",
        "/stop",
        "/seed",
        "/system",
        "/exit",
    ]
    said = Session(*lines, "never asked").err.replace(f"{wrapped_help(HELP, 80)}\n", "")
    assert said.splitlines() == [
        *["/mode takes one of auto, sot, direct"] * 2,
        "unknown command /stop it; /help lists all commands",
        "each answer gets a random seed",
        *["/seed takes a whole number up to 9223372036854775807, or nothing"] * 2,
        "/load needs a file",
        "no answer is being written",
        "each answer gets a random seed",
        "no system message",
    ]


def test_a_conversation_goes_on_where_it_was_kept(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    first = Session("/system Be brief.", "a?", f"/save {file}", f"/save {tmp_path}")
    assert f"1 exchange saved to {file}\n{tmp_path}: Is a directory\n" in first.err
    second = Session("b?", f"/load {file}", "c?", f"/load {tmp_path / 'none'}")
    assert second.sent(1) == ["Be brief.", "a?", "yes, a?", "c?"]
    assert second.err.endswith(f"{tmp_path / 'none'}: No such file or directory\n")
    assert second.status == 0


def test_what_is_typed_during_an_answer_comes_after_it() -> None:
    session = Session("long one", "last?", meanwhile=["next?", "/stop"])
    assert session.out == "yes, long one\nyes, next?\nyes, last?\n"


def test_the_oldest_exchanges_are_dropped_if_they_do_not_fit_and_that_is_reported() -> None:
    session = Session("1234567890?", "abcdefghij?", "ABCDEFGHIJ?", positions=50)
    assert session.sent(2) == ["abcdefghij?", "yes, abcdefghij?", "ABCDEFGHIJ?"]
    said = "the oldest exchange no longer fits the model's context of 50 positions, and was left out"
    assert session.err.count("left out") == 1
    assert said in session.err


def test_a_question_that_never_fits_is_refused_and_nothing_is_forgotten() -> None:
    session = Session("short?", "x" * 60, "then?", positions=50)
    assert "specsot: This model's maximum context length is 50 tokens" in session.err
    assert session.sent(1) == ["short?", "yes, short?", "then?"]
    assert session.status == 1


def test_a_failure_is_one_line_and_the_conversation_goes_on() -> None:
    session = Session("a?", "broken", "b?")
    assert "specsot: the ring broke\n" in session.err
    assert session.sent(1) == ["a?", "yes, a?", "b?"]
    assert session.status == 1


def test_ctrl_c_at_the_prompt_leaves() -> None:
    session = Session("a?", "^C", "b?")
    assert (session.out, session.status, session.fleet.closed) == ("yes, a?\n", 0, 1)


def test_remarks_are_not_part_of_the_conversation() -> None:
    session = Session("/help", "/stop", "/fly", "", "/exit", "a?")
    assert session.out == ""
    assert "/mode auto|sot|direct" in session.err
    assert "no answer is being written\nunknown command /fly; /help lists all commands\n" in session.err
    assert session.fleet.asked == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temperature", "-1"], "temperature must be a number >= 0"),
        (["--model", "no/such/where"], "no/such/where: no such file or directory"),
        (["--mode", "fast"], "'--mode': 'fast' is not one of"),
        (["Why?"], "Why?"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_loaded(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_turns_are_messages() -> None:
    assert Session("a?").fleet.asked[0].messages == (Message("user", "a?"),)
