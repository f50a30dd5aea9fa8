"""Answers of a form: whatever is drawn through the masks has it, and masks do not depend on the way."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsot.core.vocabulary import Vocabulary, describe, read_vocabulary, spelling_of
from specsot.errors import InvalidRequest
from specsot.grammar import SpellingHabits, fewest_tokens
from specsot.grammar.answers import STACK, AnswerAutomaton, MatcherNode, compile_form, run_on_stack
from specsot.grammar.reasons import UNKNOWN, reason_in
from specsot.params import Form
from tests.conftest import examples
from tests.constraint.forms import FORMS, has_form, schema
from tests.constraint.vocabularies import CROSSING, SINGLE, token_ids
from tests.there import there

pytestmark = pytest.mark.slow

DEMO = read_vocabulary(Path(__file__).parents[2] / "models" / "demo" / "base", 8192)
VOCABULARIES = {"single": SINGLE, "crossing": CROSSING, "demo": DEMO}
NAMES: dict[str, Any] = {"city": {"type": "string"}}
CLOSING = frozenset(b'"}]!')


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return b"".join(vocabulary.bytes[token] or b"" for token in tokens).decode()


def draw(vocabulary: Vocabulary, dice: random.Random, allowed: np.ndarray) -> int:
    """Any allowed token; every other time one that may bring the text nearer to its end."""
    ids = np.flatnonzero(allowed).tolist()
    closing = [one for one in ids if set(vocabulary.bytes[one] or b"\x00") <= CLOSING]
    return dice.choice(closing if closing and dice.random() < 0.7 else ids)


def write(machine: AnswerAutomaton, seed: int, limit: int = 400, end: int | None = None) -> list[int]:
    """Tokens drawn through the masks up to the end."""
    dice, place, tokens = random.Random(seed), machine.start(), list[int]()
    while not machine.finished(place) and len(tokens) < limit:
        allowed = machine.mask(place, limit - len(tokens))
        assert allowed.any(), "a text that is not finished can always go on"
        if end is not None and allowed[end] and dice.random() < 0.3:
            return tokens
        allowed = allowed & (np.arange(len(allowed)) != end)
        if not allowed.any():
            return tokens
        tokens.append(draw(machine.vocabulary, dice, allowed))
        ahead = machine.advance(place, tokens[-1])
        assert ahead is not None, "what the mask allows, the automaton takes"
        place = ahead
    assert len(tokens) < limit, "these forms end in time"
    return tokens


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("words", VOCABULARIES)
def test_whatever_is_drawn_has_the_form(name: str, words: str) -> None:
    vocabulary = VOCABULARIES[words]
    end = next((one for one, text in enumerate(vocabulary.bytes) if text is None), None)
    machine = AnswerAutomaton(vocabulary, FORMS[name], () if end is None else (end,))
    for seed in range(examples(20)):
        text = text_of(vocabulary, write(machine, seed, end=end))
        assert has_form(FORMS[name], text), text


def test_the_check_itself_can_fail() -> None:
    assert not has_form(FORMS["choice"], "yes,")
    assert not has_form(FORMS["date"], "2024-13-01")


def fresh_mask(machine: AnswerAutomaton, tokens: list[int]) -> np.ndarray:
    """The oracle: a matcher that never saw anything but this path."""
    matcher = compile_form(machine.vocabulary, machine.form)
    assert matcher.consume_tokens(tokens) or not tokens
    if matcher.is_stopped():
        return np.zeros(len(machine.vocabulary), dtype=bool)
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(bits, bitorder="little", count=len(machine.vocabulary)).astype(bool)


@pytest.mark.parametrize("name", FORMS)
def test_in_a_tree_every_mask_is_that_of_a_fresh_matcher_on_the_same_path(name: str) -> None:
    machine, dice = AnswerAutomaton(DEMO, FORMS[name]), random.Random(3)
    checked = 0
    for _ in range(2):
        root = machine.start()
        for _ in range(6):
            places: list[MatcherNode] = [root]
            while len(places) < 10:  # any node may be continued next, by any token
                behind = dice.choice(places)
                allowed = machine.mask(behind, 10**6)
                wild = dice.random() < 0.2 or not allowed.any()
                token = dice.randrange(len(DEMO)) if wild else draw(DEMO, dice, allowed)
                ahead = machine.advance(behind, token)
                assert (ahead is not None) == bool(allowed[token])
                if ahead is None:
                    if not any(machine.mask(place, 10**6).any() for place in places):
                        break
                    continue
                places.append(ahead)
            for place in dice.sample(places, len(places)):
                machine.forced(place)  # asking changes nothing
                assert (machine.mask(place, 10**6) == fresh_mask(machine, place.tokens)).all()
                checked += 1
            root = dice.choice(places)
            if machine.finished(root):
                break
    assert checked > 20


def test_characters_are_whole_however_tokens_cut_them() -> None:
    """The emoji's bytes are tokens of their own; nothing but its next byte may follow its first ones."""
    machine = AnswerAutomaton(SINGLE, schema({"const": "😀é"}))
    place = machine.start()
    for byte in '"😀é"'.encode():
        (token,) = token_ids(SINGLE, bytes([byte]))
        assert np.flatnonzero(machine.mask(place, 99)).tolist() == [token]
        ahead = there(machine.advance(place, token))
        place = ahead
    assert machine.finished(place)


def test_a_string_takes_no_broken_character() -> None:
    machine = AnswerAutomaton(SINGLE, schema({"type": "string"}))
    place = machine.start()
    for byte in b'"\xf0\x9f':
        (token,) = token_ids(SINGLE, bytes([byte]))
        ahead = there(machine.advance(place, token))
        place = ahead
    allowed = {SINGLE.bytes[one] for one in np.flatnonzero(machine.mask(place, 99)).tolist()}
    assert allowed == {bytes([byte]) for byte in range(0x80, 0xC0)}


@pytest.mark.parametrize(
    ("given", "text", "fits"),
    [
        ({"properties": NAMES}, '{"city": ""}', True),
        ({"properties": NAMES}, '{"city": "", "town": ""}', False),
        ({"properties": NAMES}, '{"city": "", "city": ""}', False),
        ({"properties": NAMES}, '{"": ""}', False),
        ({"properties": NAMES, "additionalProperties": True}, '{"city": "", "town": ""}', True),
        ({"properties": NAMES, "required": ["town"]}, '{"town": ""}', True),
        ({}, '{"town": ""}', True),
        ({"properties": {"in": {"properties": NAMES}}}, '{"in": {"town": ""}}', False),
        ({"properties": {"in": {"const": {"properties": {}}}}}, '{"in": {"properties":{}}}', True),
        ({"allOf": [{"properties": NAMES}, {"properties": {"town": {}}}]}, '{"city": "", "zip": ""}', True),
        ({"properties": NAMES, "anyOf": [{"properties": {"town": {}}}]}, '{"city": "", "zip": ""}', True),
    ],
)
def test_an_object_has_declared_keys_once_each_unless_its_schema_says_more(
    given: dict[str, Any], text: str, fits: bool
) -> None:
    machine = AnswerAutomaton(SINGLE, schema({"type": "object", **given}))
    place: MatcherNode | None = machine.start()
    for byte in text.encode():
        (token,) = token_ids(SINGLE, bytes([byte]))
        place = place and machine.advance(place, token)
    assert (place is not None and place.walker.accepts(place)) is fits


def led_tokens(machine: AnswerAutomaton) -> int:
    """The tokens within which masks lead an answer to its end, its end token included."""
    if machine._choices:
        return machine._choices.min_tokens() + 1
    return len(there(there(machine._closing).search_ending(machine.start(), 1000))) + 1


@pytest.mark.parametrize("name", ["object", "person", "tree", "pattern", "choice"])
def test_no_answer_is_led_to_its_end_in_fewer_tokens_than_the_fewest(name: str) -> None:
    end = next(one for one, text in enumerate(DEMO.bytes) if text is None)
    machine = AnswerAutomaton(DEMO, FORMS[name], (end,))
    least = led_tokens(machine)
    tokens = write(machine, 0, limit=least, end=end)
    assert len(tokens) < least, "one is left for the end"
    assert has_form(FORMS[name], text_of(DEMO, tokens))


def bound(vocabulary: Vocabulary, form: Form) -> int:
    return there(fewest_tokens(vocabulary, form, ()))


@pytest.mark.parametrize("words", VOCABULARIES)
@pytest.mark.parametrize("name", FORMS)
def test_no_answer_has_fewer_tokens_than_every_answer_of_its_form_needs(name: str, words: str) -> None:
    vocabulary = VOCABULARIES[words]
    if FORMS[name].kind == "regex":
        assert fewest_tokens(vocabulary, FORMS[name], ()) is None
        return
    machine = AnswerAutomaton(vocabulary, FORMS[name])
    for seed in range(examples(20)):
        assert len(write(machine, seed)) + 1 >= bound(vocabulary, FORMS[name])


@pytest.mark.parametrize("name", ["person", "tree", "pattern", "any of"])
def test_nor_has_one_whose_text_is_joined_to_tokens_at_will(name: str) -> None:
    machine = AnswerAutomaton(SINGLE, FORMS[name])
    for seed in range(examples(20)):
        dice = random.Random(seed)
        text = text_of(SINGLE, write(machine, seed)).encode()
        cuts = sorted(dice.choices(range(len(text) + 1), k=dice.randrange(1, 60)))
        joined = {text[begin:end] for begin, end in pairwise(cuts) if begin < end}
        words = describe([*SINGLE.bytes, *sorted(joined)])
        assert spelling_of(words).count(text, len(text)) + 1 >= bound(words, FORMS[name])


TEXT = {"type": "string"}
LONG = {**TEXT, "minLength": 300}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"const": "abab"}, 4),
        ({"const": "xyz"}, 5),
        ({"enum": ["xyz", "abab", 7]}, 0),
        ({"enum": ["xyz", "abab"]}, 4),
        (LONG, 150),
        (record(x=LONG), 3 + 150),
        (record(x={"anyOf": [LONG, {"const": "xyz"}]}), 3 + 5),
        (record(x={"type": ["string", "null"], "minLength": 300}), 3),
        ({**record(x=LONG), "required": []}, 0),
        ({"type": "array", "items": {"const": "xyz"}, "minItems": 4}, 20),
        ({"type": "array", "prefixItems": [LONG], "items": {"const": "z"}, "minItems": 3}, 150 + 6),
        ({"$ref": "#/$defs/a", "$defs": {"a": record(x={"$ref": "#/$defs/a"}, y={"const": "z"})}}, 9),
        ({"allOf": [{"const": "z"}, LONG]}, 150),
        ({"type": "integer"}, 0),
        (True, 0),
    ],
)
def test_what_every_answer_needs_counts_the_longest_tokens_and_the_shortest_alternatives(
    given: Any, tokens: int
) -> None:
    """With tokens of two letters, a string of 300 characters needs 150 tokens, and "abab" in quotes 4."""
    words = describe([*SINGLE.bytes, b"ab", b"ba"])
    assert bound(words, schema(given)) == max(tokens, 1) + 1


def test_tokens_that_reach_beyond_a_name_count_once() -> None:
    """The token `{"x` begins before the name, so that only the rest of the name needs a token of its own."""
    form = schema(record(xy={"type": "integer"}))
    assert bound(describe([*SINGLE.bytes]), form) == 4 + 1
    assert bound(describe([*SINGLE.bytes, b'{"x']), form) == 2 + 1
    assert bound(describe([*SINGLE.bytes, b'{"x', b'y":']), form) == 1 + 1
    assert bound(describe([*SINGLE.bytes, b'{"xy":']), form) == 1 + 1


def test_a_choice_needs_the_tokens_of_its_shortest_text() -> None:
    assert bound(SINGLE, FORMS["choice"]) == 2 + 1
    assert bound(describe([*SINGLE.bytes, b"no", b"yes"]), FORMS["choice"]) == 1 + 1


@pytest.mark.parametrize(
    ("written", "fits"), [('{"a": [1', True), ('{"a":[1', True), ("{\n", False), ("{  ", False)]
)
def test_json_is_one_line_with_a_space_at_most_between_its_signs(written: str, fits: bool) -> None:
    matcher = compile_form(SINGLE, Form("json_object"))
    assert matcher.consume_tokens(token_ids(SINGLE, written.encode())) == fits


def test_an_end_token_may_follow_only_where_the_form_is_complete() -> None:
    end, words = 2, describe([b"a", b"b", None])
    machine = AnswerAutomaton(words, Form("regex", ("ab*",)), (end,))
    start = machine.start()
    assert machine.mask(start, 9).tolist() == [True, False, False]
    behind = there(machine.advance(start, 0))
    assert machine.mask(behind, 9).tolist() == [False, True, True]
    assert machine.advance(behind, end) is None, "ends are the caller's to see"


def test_without_end_tokens_a_complete_answer_is_over() -> None:
    words = describe([b"a", b"b"])
    machine = AnswerAutomaton(words, Form("regex", ("ab?",)))
    one = there(machine.advance(machine.start(), 0))
    assert not machine.finished(one)
    two = there(machine.advance(one, 1))
    assert machine.finished(two)
    assert not machine.mask(two, 9).any()


def test_what_is_forced_is_followed_to_its_end_in_the_bases_own_spelling() -> None:
    machine = AnswerAutomaton(DEMO, Form("regex", ('\\{"temperature":[0-9]\\}',)))
    assert text_of(DEMO, list(SpellingHabits().forced(machine, machine.start()))) == '{"temperature":'
    habits, place, spelled = SpellingHabits(), machine.start(), list[int]()
    for byte in b'{"temperature":':
        (token,) = token_ids(DEMO, bytes([byte]))
        habits.record(machine, place, token)
        ahead = there(machine.advance(place, token))
        place = ahead
        spelled.append(token)
    assert list(habits.forced(machine, machine.start())) == spelled


def test_choices_are_kept_within_the_budget_where_one_fits() -> None:
    words = describe([*(bytes([byte]) for byte in range(256)), b"no", b"may", b"maybe"])
    machine = AnswerAutomaton(words, Form("choice", ("maybe", "no", "perhaps")))
    allowed = {
        room: {words.bytes[one] for one in np.flatnonzero(machine.mask(machine.start(), room))}
        for room in (1, 2, 3, 7, 99)
    }
    assert allowed[1] == {b"no", b"maybe"}
    assert allowed[2] == {b"n", b"no", b"maybe"}
    assert allowed[3] == {b"n", b"no", b"may", b"maybe"}
    assert allowed[7] == allowed[99] == {b"n", b"no", b"m", b"may", b"maybe", b"p"}


def test_where_no_choice_fits_the_budget_all_stay_open() -> None:
    machine = AnswerAutomaton(SINGLE, Form("choice", ("alpha", "beta")))
    assert machine.mask(machine.start(), 2).sum() == 2


def test_sequences_of_one_grammar_do_not_affect_each_other() -> None:
    machine = AnswerAutomaton(DEMO, FORMS["person"])
    alone = [write(machine, seed) for seed in range(4)]
    places, tokens = [machine.start() for _ in alone], [list(one) for one in alone]
    while any(tokens):
        for text, rest in enumerate(tokens):
            if rest:
                assert machine.mask(places[text], 10**6)[rest[0]]
                ahead = there(machine.advance(places[text], rest.pop(0)))
                places[text] = ahead
    assert all(machine.finished(place) for place in places)


def test_where_a_form_gets_too_complex_nothing_may_follow_and_all_is_well_before() -> None:
    """Thousands of bounded strings at once: more than the library follows."""
    many = schema({"anyOf": [{"type": "string", "minLength": n, "maxLength": 2000 + n} for n in range(900)]})
    machine = AnswerAutomaton(DEMO, many)
    start = machine.start()
    before = machine.mask(start, 9)
    place = machine.advance(start, token_ids(DEMO, b'"')[0])
    for token in token_ids(DEMO, b"some words that are long enough to be too many"):
        if place is not None:
            place = machine.advance(place, token) if machine.mask(place, 9).any() else None
    assert place is None, "never too complex"
    assert before.any()
    assert (machine.mask(start, 9) == before).all()


def test_what_others_wear_out_is_renewed() -> None:
    """Matchers of one form share a bounded store of states; many texts fill it, and none of them fails."""
    worn = Form("regex", ("[ab]*a[ab]{20}!",))
    machine, library, dice = AnswerAutomaton(SINGLE, worn), compile_form(SINGLE, worn), random.Random(5)
    letters = [token_ids(SINGLE, letter)[0] for letter in (b"a", b"b")]
    for _ in range(80):
        place: MatcherNode | None = machine.start()
        copy = library.deep_copy()
        for number, token in enumerate(dice.choices(letters, k=600)):
            assert place is not None
            assert number % 20 or machine.mask(place, 9).any()
            place = machine.advance(place, token)
            copy.consume_token(token)
    assert library.deep_copy().consume_token(letters[0]) is False, "the library's own copies are worn out"


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (Form("json_schema", ("{",)), "json_schema is not JSON"),
        (Form("json_schema", ('{"minimum": NaN}',)), "NaN is no JSON number"),
        (Form("json_schema", ("[" * 60000,)), "json_schema is nested too deeply"),
        (Form("json_schema", ("3",)), "json_schema must be a JSON object"),
        (Form("json_schema", ("false",)), "json_schema allows nothing"),
        (schema({"type": "objct"}), 'there is no type "objct"'),
        (schema({"$ref": "https://example.com/schema"}), "example.com"),
        (schema({"not": {}}), 'keywords that cannot be enforced: "not"'),
        (schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "no value has all of the types"),
        (Form("regex", ("(",)), "unclosed group"),
        (Form("regex", ("(a)\\1",)), "backreferences are not supported"),
        (Form("regex", ("a(?=b)",)), "look-around"),
    ],
)
def test_what_cannot_be_compiled_is_refused_on_one_line(form: Form, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        AnswerAutomaton(SINGLE, form)
    assert refused.value.field == "constraint"
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


# Words of the library, of its regular expression engine and of its source language, none of which means
# anything to a client.
LIBRARY_WORDS = (
    "compile",
    "parse error",
    "Unsatisfiable",
    "lookarounds",
    "f64",
    "Some(",
    "%",
    "json-schema:",
)
PATTERNS = ("^(?!x)[a-z]+$", "(?<=a)b", "(a)\\1", "[a-", "a{2,1}", "*a", "\\bword", "x$y", "^a^b")


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        *((schema({"type": "string", "pattern": one}), f'in "{one}"') for one in PATTERNS),
        *((Form("regex", (one,)), f'in "{one}"') for one in PATTERNS),
        (schema({"patternProperties": {"[": {}}}), 'in "["'),
        (schema({"type": 3}), "type must be a string or array of strings"),
        (schema({"$ref": "#/nope"}), 'its reference to "/nope" names nothing'),
        (schema({"$ref": "other.json"}), '"other.json" is not part of the schema'),
        (schema({"type": "integer", "minimum": "a"}), "minimum must be a number"),
        (schema({"type": "string", "minLength": -1}), "minLength must be an integer >= 0"),
        (schema({"type": "integer", "minimum": 5, "maximum": 1}), "minimum (5) is greater than maximum (1)"),
        (schema({"enum": []}), "an enum, anyOf or oneOf is empty"),
        (schema({"properties": {"a": 3}}), "schema must be an object or boolean"),
        (schema({"type": "integer", "multipleOf": 0}), "multipleOf must be more than 0"),
        (schema({"type": "number", "minimum": 1e308, "maximum": 1.5e308}), "range of numbers"),
    ],
)
def test_no_word_of_the_library_reaches_a_client(form: Form, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        AnswerAutomaton(SINGLE, form)
    assert reason in str(refused.value)
    assert not [word for word in LIBRARY_WORDS if word in str(refused.value)]


def test_an_unknown_error_of_the_library_has_a_general_message() -> None:
    assert reason_in("failed to compile JSON schema: lexer0 panicked") == UNKNOWN
    assert reason_in("") == ""


JSON = [name for name, form in FORMS.items() if form.kind.startswith("json")]


@pytest.mark.parametrize("words", ["single", "demo"])
@pytest.mark.parametrize("name", JSON)
def test_law_3_json_ends_within_any_budget_that_is_enough_for_its_least(name: str, words: str) -> None:
    vocabulary = VOCABULARIES[words]
    end = next(one for one, text in enumerate(vocabulary.bytes) if text is None)
    machine = AnswerAutomaton(vocabulary, FORMS[name], (end,))
    assert machine._closing
    least = len(machine._closing.find_ending(machine.start()) or ())
    assert least > 1
    for budget in range(least, least + 100, 7):
        dice, place, tokens = random.Random(budget), machine.start(), list[int]()
        while len(tokens) < budget and not machine.finished(place):
            allowed = np.flatnonzero(machine.mask(place, budget - len(tokens))).tolist()
            token = dice.choice(allowed)
            if token == end:
                break
            ahead = there(machine.advance(place, token))
            place = ahead
            tokens.append(token)
        assert has_form(FORMS[name], text_of(vocabulary, tokens))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("end", [None, 3])
def test_a_path_may_follow_where_its_tokens_may_one_by_one(name: str, end: int | None) -> None:
    machine = AnswerAutomaton(SINGLE, FORMS[name], () if end is None else (end,))
    dice = random.Random(7)
    place: MatcherNode | None = machine.start()
    followed = refused = 0
    for token in write(machine, 5, end=end):
        assert place is not None
        check = machine.path_check(place)
        behind: dict[tuple[int, ...], MatcherNode] = {(): place}
        for _ in range(12):
            before = dice.choice(list(behind))
            allowed = np.flatnonzero(machine.mask(behind[before], 400)).tolist()
            drawn = dice.choice([*allowed, dice.randrange(len(SINGLE)), len(SINGLE) + 1])
            if drawn < len(SINGLE):
                assert machine.allows(behind[before], drawn, 400) == (drawn in allowed)
            path, ahead = (*before, drawn), machine.advance(behind[before], drawn)
            assert check(path) == (ahead is not None), path
            followed, refused = followed + (ahead is not None), refused + (ahead is None)
            if ahead is not None:
                behind[path] = ahead
        place = machine.advance(place, token)
    assert followed > 0
    assert refused > 0


def test_an_error_in_the_thread_that_compiles_is_raised_where_the_form_is_needed() -> None:
    class Panic(BaseException):
        """Like the panics of the library, it is no Exception."""

    def compile_badly() -> object:
        raise Panic("the automaton is broken")

    with pytest.raises(Panic, match="the automaton is broken"):
        run_on_stack(STACK, compile_badly)
