"""What typed lines mean, and what a conversation remembers. Pure."""

from __future__ import annotations

import pytest

from specsot.params import Message
from specsot_app.terminal.chat import (
    ChatCommand,
    ChatHistory,
    Clear,
    Leave,
    Question,
    Reply,
    SetMode,
    Stop,
    parse_line,
)


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("  Why?\n", Question("Why?")),
        ("/mode sot\n", SetMode("sot")),
        ("/mode   direct", SetMode("direct")),
        ("/mode fast", Reply("/mode takes one of auto, sot, direct")),
        ("/mode", Reply("/mode takes one of auto, sot, direct")),
        ("/stop", Stop()),
        ("/clear ", Clear()),
        ("/exit", Leave()),
        ("\n", Reply()),
        ("/stop it", Reply("no command is called /stop it; /help tells all")),
        ("what is /stop?", Question("what is /stop?")),
    ],
)
def test_what_lines_mean(line: str, meaning: ChatCommand) -> None:
    assert parse_line(line) == meaning


def test_help_names_every_command() -> None:
    reply = parse_line("/help")
    assert isinstance(reply, Reply)
    assert [line.split()[0] for line in reply.reply.splitlines()] == [
        "/mode",
        "/compare",
        "/stop",
        "/clear",
        "/help",
        "/exit",
    ]


def test_a_conversation_is_sent_whole_and_loses_its_oldest_exchange_first() -> None:
    talk = ChatHistory(system="Be brief.").answered("a?", "A.").answered("b?", "B.")
    assert [message.content for message in talk.with_question("c?")] == [
        "Be brief.",
        "a?",
        "A.",
        "b?",
        "B.",
        "c?",
    ]
    assert [message.role for message in talk.without_oldest().with_question("c?")] == [
        "system", "user", "assistant", "user",
    ]  # fmt: skip
    assert talk.without_oldest().turns == (Message("user", "b?"), Message("assistant", "B."))
    assert ChatHistory().answered("a?", "  ") == ChatHistory()
