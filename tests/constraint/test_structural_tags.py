"""Structural tags: what they allow, how they are written as text, and which texts lead to their ends."""

from __future__ import annotations

import pytest

from specsot.core.frames import Opening
from specsot.errors import InvalidRequest
from specsot.grammar.answers import AnswerAutomaton
from specsot.grammar.sandbox import try_form
from specsot.grammar.state import grammar_of
from specsot.grammar.structural_tag import (
    Exits,
    FreeText,
    JsonPart,
    Members,
    OneTag,
    Part,
    Pattern,
    Repeat,
    StructuralTag,
    read_tag,
    write_tag,
)
from specsot.params import MAX_FORM_BYTES, STRUCTURAL_TAG, Ask, Form
from specsot.transport.wire.values import decode_form, encode_form
from tests.constraint.vocabularies import SINGLE
from tests.there import there

NUMBER = JsonPart({"type": "integer"})
WORDS = FreeText("</p>", ("</p>", "<f>"), max_length=5)
CALL: tuple[Part, ...] = (
    OneTag((("add ",), ("sub ",))),
    Members(((("a=", NUMBER), True), (("b=", WORDS), False)), between=", "),
    ";",
)
TAG = StructuralTag(("<f>", Repeat(CALL, ("|",), 2), Pattern("[0-9]{2}"), "</f>"), {7: "</f>"})


def form_of(tag: StructuralTag) -> Form:
    return Form(STRUCTURAL_TAG, (write_tag(tag),))


def automaton(tag: StructuralTag) -> AnswerAutomaton:
    grammar = there(grammar_of(SINGLE, Opening(1, 100, form=form_of(tag)))).result()
    assert isinstance(grammar, AnswerAutomaton)
    return grammar


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("<f>add a=12;07</f>", True),
        ("<f>sub a=1, b=x\n;</p>;07</f>", True),
        ("<f>add a=1;|sub a=2;12</f>", True),
        ("<f>add a=1, b=</p>;07</f>", True),
        ("<f>add a=1;|sub a=2;|add", False),
        ("<f>add a=1, b=123456", False),
        ("<f>add a=1, b=<f>", False),
        ("<f>add b=", False),
        ("<f>add a=x", False),
        ("<f>add a=1;7<", False),
    ],
)
def test_a_tag_allows_fixed_text_around_values(text: str, allowed: bool) -> None:
    machine = automaton(TAG)
    place = machine.start()
    for byte in text.encode():
        ahead = machine.advance(place, byte + 1)
        if ahead is None:
            assert not allowed
            return
        place = ahead
    assert allowed
    assert machine.finished(place)


def test_a_tag_travels_as_text() -> None:
    assert read_tag(write_tag(TAG)) == TAG
    assert decode_form(encode_form(form_of(TAG))) == form_of(TAG)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"parts": [{"no": 1}], "tokens": {}}', '{"parts": 3, "tokens": {}}']
)
def test_a_text_that_is_no_tag_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="malformed"):
        read_tag(text)


def test_every_ending_leads_to_the_end_with_the_fewest_parts() -> None:
    machine = automaton(TAG)
    place = machine.start()
    for byte in b"<f>add a=1, b=x<":
        place = there(machine.advance(place, byte + 1))
    way = there(there(machine._closing).find_ending(place))
    assert b"".join(SINGLE.bytes[token] or b"" for token in way) == b"/p>;00</f>"


def test_exits_are_ordered_from_the_end_to_the_beginning() -> None:
    found = Exits(TAG)
    assert [*found.outside] == ["</f>", ";", ", a=", "a="]
    assert [*found.of_free_text] == ["</p>"]


def test_the_master_tries_a_tag_like_every_other_form() -> None:
    try_form(form_of(TAG))
    with pytest.raises(InvalidRequest, match="json_schema"):
        try_form(form_of(StructuralTag((JsonPart(False),))))


def test_messages_to_clients_do_not_name_structural_tags() -> None:
    with pytest.raises(InvalidRequest, match=r"the form of forced calls has \d+ bytes"):
        form_of(StructuralTag(("a" * (MAX_FORM_BYTES + 1),)))
    with pytest.raises(InvalidRequest, match="the form of forced calls says where the answer ends"):
        Ask(prompt="x", mode="direct", min_tokens=3, form=form_of(TAG))
