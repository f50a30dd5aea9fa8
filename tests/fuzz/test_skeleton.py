"""Any text at all, at the reader of skeletons: a plan, a direct answer or one clear line, and soon."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples, some
from tests.fuzz.targets import attempt

PIECES = [
    *["[PLAN]", "[DIRECT]", "[END]", "【plan】", "[ END ]", "1.<9><None>[-]Title\n", "2.<9><None>[1,2,9]T\n"],
    *[
        "1",
        "9" * 9,
        "２",
        ".",
        "、",
        "<",
        ">",
        "《",
        "[",
        "]",
        "-",
        "None",
        "Search",
        "无",
        " ",
        "\n",
        "\r\n",
    ],
    *["\t", "\0", "\x85", "\u2028", "\ufeff", "😴", "睡", "é", "*", "#", "x" * 90, "٣", "²"],
]


@settings(max_examples=examples(300), deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join), st.booleans())
def test_pieces_of_the_language(text: str, planned: bool) -> None:
    attempt("skeleton", (f"[PLAN]\n{text}" if planned else text).encode())


@settings(max_examples=examples(200), deadline=None, derandomize=True, database=None)
@given(st.text(max_size=60), st.booleans())
def test_any_text(text: str, planned: bool) -> None:
    attempt("skeleton", (f"[PLAN]\n1.<9>{text}" if planned else text).encode(errors="replace"))


ENDLESS = [
    " ",
    "\n",
    "1",
    "<",
    "<9>",
    "1.<9>",
    "1.<9><",
    "1.<9>[",
    "[1,",
    "#",
    "* ",
    "[",
    "[P",
    "[END",
    "　",
    "\r",
]

BEGINS = ["", "[PLAN]\n", "[PLAN]\n1.<9><", "[PLAN]\n1.<9><x", "[DIRECT]\n"]
# Every piece behind one beginning, every beginning with three or four pieces.
MET = [n for n in range(len(ENDLESS) * len(BEGINS)) if (n % len(BEGINS) - n // len(BEGINS)) % 5 == 0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("piece", "begin"), some(product(ENDLESS, BEGINS), *MET))
def test_what_never_ends_is_read_in_time(piece: str, begin: str) -> None:
    """As much as a model of 32,768 positions may write, where every token is a few characters."""
    attempt("skeleton", (begin + piece * (60_000 // len(piece))).encode())
