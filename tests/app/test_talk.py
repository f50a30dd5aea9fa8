"""What typed lines mean, and what a conversation remembers. Pure."""

from __future__ import annotations

import pytest

from specsot.params import Message
from specsot_app.terminal.chat import (
    HELP,
    ChatHistory,
    parse_line,
    read_messages,
    wrapped_help,
    write_messages,
)


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("  Why?\n", ("", "Why?")),
        ("/mode sot\n", ("/mode", "sot")),
        ("/mode   direct", ("/mode", "direct")),
        ("/mode", ("/mode", "")),
        ("/clear ", ("/clear", "")),
        ("\n", ("", "")),
        ("/stop it", ("/stop", "it")),
        ("what is /stop?", ("", "what is /stop?")),
        ("/etc/hosts is what?", ("", "/etc/hosts is what?")),
        ("/stop\nis a word", ("", "/stop\nis a word")),
        ("/system Be brief.", ("/system", "Be brief.")),
        ("/save my talk.json", ("/save", "my talk.json")),
    ],
)
def test_what_lines_mean(line: str, meaning: tuple[str, str]) -> None:
    assert parse_line(line) == meaning


def test_help_names_every_command() -> None:
    assert [line.split()[0] for line in HELP.splitlines()] == [
        "/mode",
        "/compare",
        "/retry",
        "/system",
        "/seed",
        "/save",
        "/load",
        "/stop",
        "/clear",
        "/help",
        "/exit",
        "Enter",
    ]


def test_help_fits_its_screen_between_words() -> None:
    lines = wrapped_help(HELP, 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(HELP.split()) == " ".join(" ".join(lines).split())
    assert lines[1].startswith(" " * 23)


def test_a_conversation_is_sent_whole_and_loses_its_oldest_exchange_first() -> None:
    talk = ChatHistory(system="Be brief.").with_exchange("a?", "A.").with_exchange("b?", "B.")
    assert [message.content for message in talk.with_question("c?")] == [
        "Be brief.",
        "a?",
        "A.",
        "b?",
        "B.",
        "c?",
    ]
    assert [message.role for message in talk.without_oldest_exchange().with_question("c?")] == [
        "system", "user", "assistant", "user",
    ]  # fmt: skip
    assert talk.without_oldest_exchange().turns == (Message("user", "b?"), Message("assistant", "B."))
    assert ChatHistory().with_exchange("a?", "  ") == ChatHistory()


def test_a_conversation_that_was_kept_is_the_same_again() -> None:
    talk = ChatHistory("sot", "Be brief.").with_exchange("a?", "A.\n").with_exchange("ü?", "B.")
    assert read_messages(ChatHistory("sot"), write_messages(talk)) == talk


def test_parts_of_text_are_a_text() -> None:
    """As OpenAI's clients write messages, too."""
    parts = '[{"type": "text", "text": "a"}, {"type": "text", "text": "?"}]'
    kept = f"""[{{"role": "system", "content": ""}}, {{"role": "user", "content": {parts}}},
               {{"role": "assistant", "content": "A."}}]"""
    assert read_messages(ChatHistory(), kept) == ChatHistory().with_exchange("a?", "A.")


@pytest.mark.parametrize(
    "text",
    [
        *["", "{}x", "[1]", '[{"role": "user"}]', '[{"role": "user", "content": "a?"}]', "[" * 100_000],
        '[{"role": "user", "content": null}, {"role": "assistant", "content": "A."}]',
        '[{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "A."}]',
    ],
)
def test_what_is_no_conversation_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_messages(ChatHistory(), text)
