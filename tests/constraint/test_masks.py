"""Masks over tokens: equal to brute force, and whatever is sampled through them parses.

A second, slow way is their oracle.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.core.list_plan import ListReader
from specsot.core.skeleton import MAX_LIST_POINTS, PlanRules, Point, read_plan
from specsot.core.vocabulary import Vocabulary, describe, read_vocabulary
from specsot.errors import ModelError
from specsot.grammar import State, TokenAutomaton, language, prebuild
from specsot.grammar.automaton import tables_of
from specsot.grammar.language import Done, ListTitle, Literal, NumberedLine, Place
from specsot.grammar.state import _explore
from tests.conftest import examples, is_full, some
from tests.constraint.oracle import parse, parse_list
from tests.constraint.stepping import step
from tests.constraint.vocabularies import CROSSING, NARROW, SINGLE, token_ids

pytestmark = pytest.mark.slow

DEMO = read_vocabulary(Path(__file__).parents[2] / "models" / "demo" / "base", 8192)
VOCABULARIES = {"single": SINGLE, "crossing": CROSSING, "narrow": NARROW, "demo": DEMO}
RULES = {
    "auto": PlanRules(max_points=4),
    "plan": PlanRules(direct=False, tools=("Search",), max_points=3),
    "short": PlanRules(max_points=12, plan_tokens=60),
    "list": PlanRules(direct=False, max_points=4, listed=True),
}

names = st.sampled_from(sorted(VOCABULARIES))
rule_names = st.sampled_from(sorted(RULES))


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> bytes:
    return b"".join(vocabulary.bytes[token] or b"" for token in tokens)


def read_list(text: str, rules: PlanRules) -> tuple[Point, ...]:
    reader = ListReader(rules)
    reader.feed(text)
    reader.finish()
    return reader.points


def walk(machine: TokenAutomaton, dice: random.Random, budget: int) -> Iterator[tuple[State, int, int]]:
    """Tokens drawn through the masks until the end: (state before, remaining before, token)."""
    state = machine.start()
    for remaining in range(budget, 0, -1):
        if machine.finished(state):
            return
        allowed = np.flatnonzero(machine.mask(state, remaining))
        assert len(allowed), "a text that is not finished can always go on"
        token = int(_prefer(machine, dice, allowed))
        yield state, remaining, token
        following = machine.advance(state, token)
        assert following is not None, "what the mask allows, the automaton takes"
        state = following
    assert machine.finished(state), "the budget is never overrun"


def _prefer(machine: TokenAutomaton, dice: random.Random, allowed: np.ndarray) -> int:
    """A random token; line feeds often enough that plans get lines."""
    breaks = [token for token in allowed if b"\n" in (machine.vocabulary.bytes[token] or b"")]
    return dice.choice(breaks) if breaks and dice.random() < 0.1 else dice.choice(allowed)


@given(names, rule_names, st.integers(0, 2**32), st.integers(0, 160))
@settings(max_examples=examples(120), deadline=None, derandomize=True)
def test_law_3_constrained_output_parses_whatever_the_budget(
    name: str, rule: str, seed: int, extra: int
) -> None:
    vocabulary, rules = VOCABULARIES[name], RULES[rule]
    machine = TokenAutomaton(vocabulary, rules)
    budget = minimum(machine) + extra
    tokens = [token for _, _, token in walk(machine, random.Random(seed), budget)]
    text = text_of(vocabulary, tokens)
    if rules.listed:
        assert parse_list(text, rules), text
        assert len(read_list(text.decode(), rules)) >= 2
        assert len(tokens) <= budget
        return
    parsed = parse(text, rules)
    assert parsed is not None, text
    assert len(tokens) <= budget
    if isinstance(parsed, tuple):
        assert read_plan(text.decode(), rules) == parsed
        assert len(tokens) <= rules.plan_tokens
    else:
        assert read_plan(text.decode(), rules) is None


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("rule", RULES)
def test_a_budget_too_small_keeps_to_a_shortest_way(name: str, rule: str) -> None:
    machine = TokenAutomaton(VOCABULARIES[name], RULES[rule])
    state, tokens = machine.start(), 0
    while not machine.finished(state):
        token = int(np.flatnonzero(machine.mask(state, 1 - tokens))[-1])
        following = machine.advance(state, token)
        assert following is not None
        state, tokens = following, tokens + 1
    assert tokens <= minimum(machine)


@functools.cache
def fewest(vocabulary: Vocabulary, text: bytes) -> int:
    """Least number of tokens that write `text`."""
    heads = {token for token in vocabulary.bytes if token and text.startswith(token)}
    return 1 + min((fewest(vocabulary, text[len(head) :]) for head in heads), default=999) if text else 0


@functools.cache
def ending(rules: PlanRules, place: Place) -> bytes:
    if isinstance(place, Done):
        return b""
    byte, to = language.onward(rules, place)
    return bytes([byte]) + ending(rules, to)


def follow(rules: PlanRules, place: Place, text: bytes) -> Place | None:
    found: Place | None = place
    for byte in text:
        found = step(rules, found, byte) if found else None
    return found


def minimum(machine: TokenAutomaton) -> int:
    """The fewest tokens of a whole output."""
    return machine._tables.ending(machine.start().place)


def brute(machine: TokenAutomaton, place: Place, written: int, remaining: int) -> np.ndarray:
    """The mask by the definition: token by token, byte by byte."""
    vocabulary, rules = machine.vocabulary, machine.rules
    least = fewest(vocabulary, ending(rules, place))
    mask = np.zeros(len(vocabulary), dtype=bool)
    for token, text in enumerate(vocabulary.bytes):
        after = follow(rules, place, text) if text else None
        if after is None:
            continue
        room = max(remaining, least)
        if language.planned(place):
            room = max(min(remaining, rules.plan_tokens - written), least)
        elif language.planned(after):
            room = min(remaining, rules.plan_tokens - written)
        mask[token] = fewest(vocabulary, ending(rules, after)) <= room - 1
    return mask


@pytest.mark.parametrize(("name", "rule"), some(product(["single", "crossing", "narrow"], RULES), 0, 6, 9))
def test_masks_are_those_of_brute_force(name: str, rule: str) -> None:
    vocabulary, rules = VOCABULARIES[name], RULES[rule]
    machine = TokenAutomaton(vocabulary, rules)
    dice = random.Random(7)
    for budget in (minimum(machine) + 3, 90, *([55] if is_full() else [])):
        place: Place | None = language.begin(rules)
        for state, remaining, token in walk(machine, dice, budget):
            assert place is not None
            if dice.random() < 0.2 or isinstance(place, language.Opener | language.Literal | language.Needs):
                compare(machine, state, place, remaining)
            place = follow(rules, place, vocabulary.bytes[token] or b"")


def test_masks_and_steps_of_a_title_to_its_last_byte_are_those_of_brute_force() -> None:
    rules = PlanRules(max_points=3)
    machine = TokenAutomaton(CROSSING, rules)
    state: State | None = machine.start()
    place: Place | None = language.begin(rules)
    title = "a b睡[E😴".encode() + b"c" * 68
    for token in token_ids(CROSSING, b"[PLAN]\n1.<80><None>[-]" + title, longest=1):
        assert state is not None
        assert place is not None
        if state.num_tokens % 12 == 0 or (isinstance(place, language.Title) and state.bytes_left < 4):
            compare(machine, state, place, remaining=(5, 9, 90)[state.num_tokens % 3])
        place = follow(rules, place, CROSSING.bytes[token] or b"")
        state = machine.advance(state, token)


@pytest.mark.parametrize("points", some([2, 4], 0))
def test_masks_and_steps_of_a_list_to_its_last_word_and_line_are_those_of_brute_force(points: int) -> None:
    rules = PlanRules(direct=False, max_points=points, listed=True)
    machine = TokenAutomaton(CROSSING, rules)
    state: State | None = machine.start()
    place: Place | None = language.begin(rules)
    title = " a b  9: c.x d　睡 f g h 10".encode()
    for token in token_ids(CROSSING, title + b"\n2." + title, longest=1):
        assert state is not None
        assert place is not None
        if state.num_tokens % 11 == 0 or state.words < 2:
            compare(machine, state, place, remaining=(5, 9, 90)[state.num_tokens % 3])
        place = follow(rules, place, CROSSING.bytes[token] or b"")
        state = machine.advance(state, token)
    assert state is not None
    assert state.words == 0


def compare(machine: TokenAutomaton, state: State, place: Place, remaining: int) -> None:
    """The automaton and brute force, at one place: masks, and which tokens lead on."""
    expected = brute(machine, place, state.num_tokens, remaining)
    assert np.array_equal(machine.mask(state, remaining), expected), (place, remaining)
    for token, text in enumerate(machine.vocabulary.bytes):
        assert machine.allows(state, token, remaining) == expected[token]
        after = follow(machine.rules, place, text) if text else None
        assert (machine.advance(state, token) is None) == (after is None), (place, text)


PLAN = "[PLAN]\n1.<80><None>[-]NREM Stages of Sleep\n2.<120><None>[1]睡眠 😴\n[END]"


@pytest.mark.parametrize("text", [PLAN, "[DIRECT]\nSleep [is] good.\n\n睡眠 😴[END]"])
def test_the_demo_tokenizer_writes_what_the_grammar_allows(text: str, demo_model: Path) -> None:
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(demo_model / "base" / "tokenizer.json")).encode(text).ids
    machine = TokenAutomaton(DEMO, PlanRules())
    state: State | None = machine.start()
    for count, token in enumerate(tokens):
        assert state is not None
        assert machine.mask(state, 512 - count)[token], DEMO.bytes[token]
        state = machine.advance(state, token)
    assert state is not None
    assert machine.finished(state)
    assert not machine.mask(state, 100).any()


@given(names, rule_names, st.integers(0, 2**32), st.integers(10, 120))
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_forced_runs_are_accepted(name: str, rule: str, seed: int, extra: int) -> None:
    machine = TokenAutomaton(VOCABULARIES[name], RULES[rule])
    for state, _, _ in walk(machine, random.Random(seed), minimum(machine) + extra):
        following: State | None = state
        for token in machine.forced(state):
            assert following is not None
            following = machine.advance(following, token)
        assert following is not None


def test_an_end_token_may_follow_the_second_title_of_a_list_and_its_line() -> None:
    end = SINGLE.bytes.index(None)
    machine = TokenAutomaton(SINGLE, RULES["list"], (end,))
    state: State | None = machine.start()
    text = b" Sleep well\n2. 9:30, Mr. X\n3"
    stops: list[int] = []
    for place, token in enumerate(token_ids(SINGLE, text, longest=1)):
        assert state is not None
        if machine.mask(state, 90)[end]:
            stops.append(place)
        state = machine.advance(state, token)
        if state is None:
            assert text[:place] == b" Sleep well\n2. 9:30, Mr.", "behind a full stop nothing is begun"
            break
    title = text.index(b"9")
    assert stops == [*range(title + 1, text.index(b" X") + 1)]
    assert machine.advance(machine.start(), end) is None, "whoever counts ends sees them"


def test_forced_is_the_longest_run() -> None:
    machine = TokenAutomaton(CROSSING, RULES["plan"])
    assert text_of(CROSSING, list(machine.forced(machine.start()))) == b"[PLAN]\n1.<"
    assert len(machine.forced(machine.start())) == 1
    free = machine.advance(machine.start(), machine.forced(machine.start())[0])
    assert free is not None
    assert machine.forced(free) == ()


def test_masks_are_shared_and_read_only() -> None:
    machine = TokenAutomaton(SINGLE, PlanRules())
    first = machine.mask(machine.start(), 500)
    assert machine.mask(machine.start(), 400) is first
    assert not first.flags.writeable


def test_plans_with_other_budgets_share_masks_and_what_they_are_made_of() -> None:
    first = TokenAutomaton(SINGLE, PlanRules(max_points=7))
    assert sum(1 for _ in first.explore()) > 0
    for rules in (PlanRules(max_points=7, plan_tokens=99), PlanRules(direct=False, max_points=7)):
        other = TokenAutomaton(describe(SINGLE.bytes), rules, (3,))
        assert sum(1 for _ in other.explore()) <= len("[PLAN]\n"), "only the marker is new"
    state = first.start()
    for token in token_ids(SINGLE, b"[PLAN]\n1.<80><None>[-]A", longest=1):
        assert state is not None
        state = first.advance(state, token)
    assert state is not None
    longer = TokenAutomaton(SINGLE, PlanRules(max_points=16, plan_tokens=400))
    assert longer.mask(state, 900) is first.mask(state, 900)


def test_lists_of_any_length_are_explored_before_the_first_request() -> None:
    vocabulary = describe([*SINGLE.bytes, b"a token of its own"])
    prebuild(vocabulary).result()
    for points in range(2, MAX_LIST_POINTS + 1):
        listed = PlanRules(direct=False, max_points=points, listed=True, plan_tokens=7 * points)
        assert sum(1 for _ in TokenAutomaton(vocabulary, listed, (0,)).explore()) == 0


def test_the_usual_lists_are_explored_first() -> None:
    """So that a plan that comes while the server starts computes no masks in its steps."""
    explored = _explore(describe([*SINGLE.bytes, b"first of all"]))
    usual = PlanRules(direct=False, max_points=7, listed=True)
    for _ in range(60):
        next(explored)
    vocabulary = describe([*SINGLE.bytes, b"first of all"])
    assert sum(1 for _ in TokenAutomaton(vocabulary, usual, (0,)).explore()) == 0


def test_an_ideographic_full_stop_ends_the_title_of_a_list() -> None:
    """Models explain their title there: "观察模仿。 通过以上方法" took the rest of a plan's tokens."""
    machine = TokenAutomaton(SINGLE, PlanRules(direct=False, max_points=3, listed=True))
    state: State | None = machine.start()
    for token in token_ids(SINGLE, "观察模仿。".encode(), longest=1):
        assert state is not None
        state = machine.advance(state, token)
    assert state is not None
    assert [SINGLE.bytes[token] for token in np.flatnonzero(machine.mask(state, 100))] == [b"\n"]


def test_lines_share_the_arrays_of_their_tokens() -> None:
    """What follows "." before the titles of different lines is found in one walk, and equal arrays are stored
    once."""
    vocabulary = describe([*SINGLE.bytes, b". of its own"])
    listed = PlanRules(direct=False, max_points=12, listed=True)
    assert sum(1 for _ in TokenAutomaton(vocabulary, listed).explore()) > 0
    search = tables_of(vocabulary)._search
    table = search._table
    befores = [
        Literal(b".", ListTitle(NumberedLine(number, number + search._max_lines_started + 2)))
        for number in range(2, 6)
    ]
    reaches = [search.explore(table.number(before)) for before in befores]
    assert all(reach.parts[0] is reaches[0].parts[0] for reach in reaches)
    parts = [part for reach in search._reaches.values() for part in reach.parts]
    needs = {part.needs.tobytes(): part.needs.ctypes.data for part in parts if len(part.needs)}
    assert all(part.needs.ctypes.data == needs[part.needs.tobytes()] for part in parts if len(part.needs))
    assert not any(part.needs.flags.writeable for part in parts)


def test_titles_with_room_share_one_mask() -> None:
    machine = TokenAutomaton(SINGLE, PlanRules())
    state: State | None = machine.start()
    masks: list[np.ndarray] = []
    text = b"[PLAN]\n1.<80><None>[-]A fine title\n2.<80><None>[1]Another"
    for token in token_ids(SINGLE, text, longest=1):
        assert state is not None
        state = machine.advance(state, token)
        masks.append(machine.mask(state, 300) if state else np.zeros(0))
    first, second = text.index(b"fine"), text.index(b"Another")
    assert all(mask is masks[first] for mask in masks[first : first + 10])
    assert all(mask is masks[-1] for mask in masks[second:])
    assert np.array_equal(masks[first], masks[-1])


@pytest.mark.parametrize("token", [-1, 0, 257, 258, 9999])
def test_tokens_without_text_lead_nowhere(token: int) -> None:
    machine = TokenAutomaton(SINGLE, PlanRules())
    assert machine.advance(machine.start(), token) is None


def test_a_vocabulary_that_cannot_write_the_language_is_refused() -> None:
    with pytest.raises(ModelError, match="no tokens for the skeleton language"):
        TokenAutomaton(describe([bytes([byte]) for byte in range(256) if byte != ord("]")]), PlanRules())


def test_a_character_that_cannot_be_completed_is_not_started() -> None:
    machine = TokenAutomaton(NARROW, PlanRules())
    lead = NARROW.bytes.index(b"\xe7")
    state: State | None = machine.start()
    for token in token_ids(NARROW, b"[PLAN]\n1.<1><None>[-]"):
        assert state is not None
        state = machine.advance(state, token)
    assert state is not None
    mask = machine.mask(state, 100)
    assert mask.any()
    assert not mask[lead]


def test_threads_share_one_automaton() -> None:
    def write(machine: TokenAutomaton, seed: int) -> list[int]:
        return [token for *_, token in walk(machine, random.Random(seed), 90)]

    shared, alone = (TokenAutomaton(CROSSING, RULES["auto"]) for _ in range(2))
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(functools.partial(write, shared), range(16)))
    assert texts == [write(alone, seed) for seed in range(16)]
