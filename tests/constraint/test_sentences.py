"""Where sentences, items and blocks end, of what tokens so ever the text consists."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.core.vocabulary import describe
from specsot.grammar import SentenceEnds
from specsot.grammar.sentences import split_characters
from tests.conftest import examples

# Each "¦" marks a place where the text may end, before the token with which it goes on.
TEXTS = {
    "sentences": "A cat sleeps.¦ It purrs!¦ Does it?¦ Yes, it does.¦\n",
    "small letters": "Try bananas, e.g. ripe ones, i.e. yellow. ones etc. are fine.¦ Good",
    "numbers": "It is 3.5 m and 2,000.50 long. 12 of them.¦ In 2020.¦ It grew by 7. Then by 300.¦ Fine",
    "titles": "Dr. Smith met Mrs. Jones and J. R. Tolkien vs. Lewis in the U.S. Army.¦ They left",
    "lists of words": "Bring water, food, etc.¦ The rest is at hand.¦ So",
    "quotes": 'He said "Yes. No." and "I will."¦ She (see above. Or below.) left.¦ “Ah. Oh.”¦ The',
    "closing marks": "It was (as I said.)¦ The “end.”¦ *Never stop.*¦ **Note. Read. This.**¦ Then",
    "dots": "Well... No.¦ Yes... ¦\n",
    "names": "Use Node.js and example.com. now.¦ Yahoo! is big.¦ It",
    "colons": "There are several ways:\n\n1. Ask them\n 2. Tell them\n\n¦So it is.¦ More",
    "items": "- First. Then more. And more\n- **Second**: yes. No\n\n¦ Then prose.¦ More",
    "nested": "1. Fruit:\n   - apples\n   - pears\n¦So more.¦ The",
    "headings": "## What. Is it\n\nText.¦ More text.¦\n¦\n¦## Next",
    "code": "Run this.¦\n¦\n¦```python\nprint('a. B')\n\nx = 1. + 2\n```\n¦\n¦It prints. well.¦ So",
    "inline code": "Use `a. B` or `c. D`. Always.¦ Done.¦ Now",
    "tables": "See.¦\n¦\n¦| a. B | c |\n|---|---|\n| 1. X | Done. |\n\n¦Then.¦ More.¦ So",
    "rulers": "Done.¦\n¦\n¦---\n¦\n¦More",
    "German": "Am 3. Oktober kam z. B. Dr. Maier, d. h. der Chef.¦ Er blieb.¦ „Gut. So.“¦ Dann ging er.¦\n",
    "German figures": "Das sind 5 Mio. Euro bzw. Dollar.¦ Im 19. Jahrhundert waren es 300.¦ Heute",
    "Spanish": "¿Por qué?¦ Porque sí.¦ ¡Claro!¦ La Sra. García vive en EE. UU. desde 2001.¦ Así",
    "Chinese": "睡眠很重要。¦它有四个阶段！¦为什么？¦因为身体要休息，比如：睡。¦“是的。”¦他说（见上。）。¦好",
    "Chinese items": "1. 准备内容。先想。再写\n2、练习\n¦好",
    "one item": "It needs this:\n- A cat.\n\n- Water\n",
    "bold words": "**Python** is fun.¦ **Go** is fast.¦ Both work",
    "quotation": "> It is done. he said.¦ Then\n",
}


# Words and marks with the space before them, single digits, Chinese characters, and line feeds.
TOKEN = re.compile(r"\n| ?[a-zA-ZäöüÄÖÜíéñ]+| ?[^\w\n ]| ?\d| ?[^\W\d_]| ")
WORDS = sorted({token for marked in TEXTS.values() for token in TOKEN.findall(marked.replace("¦", ""))})
VOCABULARY = describe([None, *(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)])
IDS = {text: token for token, text in reversed(list(enumerate(VOCABULARY.bytes))) if text}
ENDS = SentenceEnds(VOCABULARY)


def words_of(text: str) -> list[int]:
    return [IDS[word.encode()] for word in TOKEN.findall(text)]


def ends_of(tokens: list[int]) -> list[int]:
    """The numbers of the tokens before which the text may end."""
    state = ENDS.start()
    found: list[int] = []
    for number, token in enumerate(tokens):
        if ENDS.ends_before(state, token):
            found.append(number)
        state = ENDS.advance(state, token)
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_may_end_after_its_sentences_lists_and_blocks(name: str) -> None:
    *parts, last = TEXTS[name].split("¦")
    tokens: list[int] = []
    expected: list[int] = []
    for part in parts:
        tokens += words_of(part)
        expected.append(len(tokens))
    tokens += words_of(last)
    assert b"".join(VOCABULARY.bytes[one] or b"" for one in tokens).decode() == TEXTS[name].replace("¦", "")
    shown = [_around(tokens, number) for number in ends_of(tokens)]
    assert shown == [_around(tokens, number) for number in expected]


def _around(tokens: list[int], number: int) -> str:
    before, after = (
        b"".join(VOCABULARY.bytes[one] or b"" for one in part).decode()
        for part in (tokens[:number], tokens[number : number + 2])
    )
    return f"{before[-20:]}¦{after}"


@given(st.sampled_from(sorted(TEXTS)), st.integers(0, 2**32))
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_the_state_of_a_text_does_not_depend_on_its_tokens(name: str, seed: int) -> None:
    text = TEXTS[name].replace("¦", "")
    dice = random.Random(seed)
    tokens: list[int] = []
    for word in TOKEN.findall(text):
        whole = dice.random() < 0.5
        tokens += [IDS[word.encode()]] if whole else [IDS[bytes([byte])] for byte in word.encode()]
    one, other = ENDS.start(), ENDS.start()
    for token in tokens:
        one = ENDS.advance(one, token)
    for token in words_of(text):
        other = ENDS.advance(other, token)
    assert one == other


@given(st.binary(max_size=60), st.integers(0, len(VOCABULARY)))
@settings(max_examples=examples(300), deadline=None, derandomize=True)
def test_any_bytes_are_read_and_an_end_is_never_in_code_or_in_a_character(text: bytes, token: int) -> None:
    state = ENDS.start()
    for byte in b"```\n" + text.replace(b"`", b""):
        assert not ENDS.ends_before(state, token)
        state = ENDS.advance(state, IDS[bytes([byte])])
    assert state.fence
    state = ENDS.start()
    for byte in text:
        state = ENDS.advance(state, IDS[bytes([byte])])
        assert not (state.partial and ENDS.ends_before(state, token))


@given(st.text(max_size=20), st.integers(0, 3))
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_characters_are_split_from_the_bytes_of_an_incomplete_one(text: str, cut: int) -> None:
    whole = text.encode()
    known = whole[: len(whole) - cut]
    characters, partial = split_characters(known)
    assert characters.encode() + partial == known
    assert text.startswith(characters)
    assert len(partial) < 4


def test_tokens_without_bytes_begin_nothing_and_change_nothing() -> None:
    state = ENDS.start()
    for token in words_of("Done."):
        state = ENDS.advance(state, token)
    for token in (0, -1, len(VOCABULARY)):
        assert not ENDS.ends_before(state, token)
        assert ENDS.advance(state, token) == state
