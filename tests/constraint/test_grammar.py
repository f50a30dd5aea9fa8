"""The byte automaton accepts exactly the language, and always knows a way to its end."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.core.skeleton import PlanRules
from specsot.grammar import language
from specsot.grammar.language import Done, Place
from tests.conftest import examples
from tests.constraint.oracle import parse
from tests.constraint.stepping import step

pytestmark = pytest.mark.slow

RULES = PlanRules(tools=("Search", "Sea", "Nonesuch", "Überblick"))
SMALL = PlanRules(direct=False, max_points=2)

PLAN = "[PLAN]\n1.<80><None>[-]Stages\n2.<1200><Search>[1]睡眠 😴\n3.<5><Sea>[1,2] é[EN]\n[END]"
LONG = "[PLAN]\n" + "".join(f"{i}.<9><None>[{'10,11' if i > 11 else '-'}]T\n" for i in range(1, 17)) + "[END]"
DIRECT = "[DIRECT]\nA [list] of\n\t[[EN things\n[END]"


def run(text: str | bytes, rules: PlanRules = RULES) -> Place | None:
    place: Place | None = language.begin(rules)
    for byte in text.encode() if isinstance(text, str) else text:
        place = step(rules, place, byte) if place else None
    return place


def line(text: str) -> str:
    return f"[PLAN]\n{text}\n[END]"


@pytest.mark.parametrize(
    "text",
    [
        PLAN,
        LONG,
        DIRECT,
        "[DIRECT]\n[END]",
        line("1.<1><None>[-]" + "x" * 80),
        line("1.<1><None>[-]" + "睡" * 26 + "ab"),
        line("1.<1><Nonesuch>[-]x"),
        line("1.<1><Überblick>[-]x"),
        line("1.<1><None>[-]" + " " * 79 + "x"),
        line("1.<1><None>[-][PLAN] [END [E"),
    ],
)
def test_accepts(text: str) -> None:
    assert isinstance(run(text), Done)
    assert parse(text.encode(), RULES) is not None


@pytest.mark.parametrize(
    "text",
    [
        "[PLAN]\n[END]",
        "[PLAN] \n",
        "PLAN",
        "[END]",
        PLAN + "\n",
        DIRECT + "x",
        line("2.<1><None>[-]x"),
        line("01.<1><None>[-]x"),
        line("1.<0><None>[-]x"),
        line("1.<05><None>[-]x"),
        line("1.<><None>[-]x"),
        line("1.<12345><None>[-]x"),
        line("1.<1><none>[-]x"),
        line("1.<1><Find>[-]x"),
        line("1.<1><>[-]x"),
        line("1.<1><None>[]x"),
        line("1.<1><None>[1]x"),
        line("1.<1><None>[-]x\n2.<1><None>[2]x"),
        line("1.<1><None>[-]x\n2.<1><None>[0]x"),
        line("1.<1><None>[-]x\n2.<1><None>[1,1]x"),
        line("1.<1><None>[-]x\n2.<1><None>[1]x\n3.<1><None>[2,1]x"),
        line("1.<1><None>[-]x\n2.<1><None>[1,]x"),
        line("1.<1><None>[-]x\n2.<1><None>[-,1]x"),
        line("1. <1><None>[-]x"),
        line("1.<1><None>[-]"),
        line("1.<1><None>[-]  "),
        line("1.<1><None>[-] \u3000\u00a0\u2003"),
        line("1.<1><None>[-]" + "x" * 81),
        line("1.<1><None>[-]" + "睡" * 26 + "abc"),
        line("1.<1><None>[-]" + " " * 80),
        line("1.<1><None>[-]a\tb"),
        line("1.<1><None>[-]a\rb"),
        line("1.<1><None>[-]a\u0085b"),
        line("1.<1><None>[-]a\u2028b"),
        line("1.<1><None>[-]a\u2029b"),
        line("1.<1><None>[-]a\x7fb"),
        line("1.<1><None>[-]a[END]b"),
        LONG.replace("[END]", "17.<9><None>[-]T\n[END]"),
    ],
)
def test_rejects(text: str) -> None:
    assert run(text) is None
    assert parse(text.encode(), RULES) is None


@pytest.mark.parametrize(
    "bad", [b"\xff", b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe7["]
)
def test_rejects_what_is_not_utf8(bad: bytes) -> None:
    assert run(b"[DIRECT]\n" + bad) is None
    assert run(b"[PLAN]\n1.<1><None>[-]" + bad) is None


def test_rules_narrow_the_language() -> None:
    assert run("[D", SMALL) is None
    assert run("[PLAN]\n1.<1><Search", SMALL) is None
    assert isinstance(run(line("1.<1><None>[-]x\n2.<1><None>[-]x"), SMALL), Done)
    assert run("[PLAN]\n1.<1><None>[-]x\n2.<1><None>[-]x\n3", SMALL) is None


def test_every_character_of_a_title_is_classified_as_in_the_standard_library() -> None:
    points = [*range(0x800), *range(0x1640, 0x16C0), *range(0x1FC0, 0x2080), *range(0x2FC0, 0x3040)]
    points += [0x1000, 0x4000, 0xD7FF, 0xE000, 0xFEFF, 0xFFFD, 0x10000, 0x1F634, 0xFFFFF, 0x10FFFF]
    for character in map(chr, points):
        title = line(f"1.<1><None>[-]{character}")
        assert isinstance(run(title), Done) == (parse(title.encode(), RULES) is not None), ascii(character)


EDITS = [*"[]<>.,-\n 019", "é", "\u3000", "\u2028", "[END]", "\n2.<1><None>[1]x", "x" * 40, "睡" * 13]


@given(st.sampled_from([PLAN, LONG, DIRECT]), st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_agrees_with_the_oracle_on_damaged_texts(text: str, seed: int, edits: int) -> None:
    dice = random.Random(seed)
    for _ in range(edits):
        begin = dice.randrange(len(text) + 1)
        text = text[:begin] + dice.choice(EDITS) + text[begin + dice.choice([0, 0, 1, 2, 20]) :]
    assert isinstance(run(text), Done) == (parse(text.encode(), RULES) is not None)


def wander(dice: random.Random, rules: PlanRules, steps: int) -> tuple[bytes, Place]:
    """A random beginning of an output and where it leads."""
    text, place = bytearray(), language.begin(rules)
    for _ in range(steps):
        live = [edge for edge in language.edges(rules, place) if edge.target is not None]
        if not live:
            break
        edge = dice.choice(live)
        byte = dice.randint(edge.low, edge.high)
        following = step(rules, place, byte)
        if following is None:  # an edge of precedence forbids it
            continue
        text.append(byte)
        place = following
    return bytes(text), place


@given(st.integers(0, 2**32), st.integers(0, 250), st.booleans())
@settings(max_examples=examples(200), deadline=None, derandomize=True)
def test_every_place_has_a_short_way_to_a_valid_end(seed: int, steps: int, direct: bool) -> None:
    rules = PlanRules(direct=direct, tools=("Search", "Sea"), max_points=13)
    text, place = wander(random.Random(seed), rules, steps)
    ending = bytearray()
    while not isinstance(place, Done):
        byte, place = language.onward(rules, place)
        ending.append(byte)
        assert len(ending) < 60
    assert parse(text + ending, rules) is not None


@given(st.integers(0, 2**32), st.integers(0, 120))
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_forced_bytes_are_those_without_a_choice(seed: int, steps: int) -> None:
    _, place = wander(random.Random(seed), RULES, steps)
    for byte in language.forced(RULES, place):
        following = {other: step(RULES, place, other) for other in range(256)}
        assert [other for other, to in following.items() if to] == [byte]
        found = following[byte]
        assert found is not None
        place = found
    live = [other for other in range(256) if step(RULES, place, other)]
    assert len(live) != 1


def test_a_list_is_expected_to_continue_wherever_it_may_end() -> None:
    """Its next number is fed together with the end of the line. A list that ends there ends all the same."""
    rules = PlanRules(direct=False, max_points=4, listed=True)
    for text, expected in (
        (" A\n", b"2."),
        (" A\n2. B\n", b"3."),
        (" A\n2. B\n3. C\n4", b"."),
        (" A\n2. B", b""),
    ):
        place = run(text, rules)
        assert place is not None
        assert language.forced(rules, place) == expected
    end = run(" A\n2. B\n\n", rules)
    assert isinstance(end, Done)
    assert language.forced(rules, end) == b""


def test_forced_reaches_over_fields() -> None:
    start = language.begin(SMALL)
    assert language.forced(SMALL, start) == b"[PLAN]\n1.<"
    place = run("[PLAN]\n1.<80>", SMALL)
    assert place is not None
    assert re.fullmatch(rb"<None>\[-\]", language.forced(SMALL, place))
