"""Requests behind a window: what they may ask for, the pages they are charged, and what they share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsot.core.frames import Open
from specsot.core.pages import max_held_pages
from specsot.errors import InvalidRequest
from specsot.params import Ask, Limits, Window
from specsot_master.core.ring.admission import answer_prefix, grant_answer, own_pages
from specsot_master.core.ring.prefix_tree import PrefixNode, PrefixTree
from specsot_master.core.ring.ring_state import RingState
from specsot_master.http.openai_requests import chat_asks
from specsot_master.http.openai_schemas import ChatBody
from tests.master.letters import SAYS
from tests.master.stage import Stage

RING = RingState(epoch=1, pages=40, page_rows=8, slots=3, max_positions=100, rows=16)
WINDOW = Window(4, 32)


def ask(window: Window | None, tokens: int) -> Ask:
    return Ask(tokens=(1, 2, 3), mode="direct", limits=Limits(max_new_tokens=tokens), window=window)


def test_with_a_window_an_answer_may_exceed_the_context_and_takes_no_more_pages() -> None:
    with pytest.raises(InvalidRequest, match=r"context length is 100 tokens\. However, you requested 1003"):
        grant_answer(3, ask(None, 1000), RING)
    pages = grant_answer(3, ask(WINDOW, 1000), RING)
    assert (
        pages
        == grant_answer(3, ask(WINDOW, 100_000), RING)
        == max_held_pages(WINDOW, RING.rows, RING.page_rows)
    )
    assert grant_answer(3, ask(WINDOW, 10), RING) == own_pages(13, 0, RING)
    assert answer_prefix((1, 2, 3), ask(WINDOW, 1000), RING).window == WINDOW


def test_a_window_must_fit_the_context() -> None:
    with pytest.raises(InvalidRequest, match="a window of 4 sinks and 96 recent tokens") as refused:
        grant_answer(3, ask(Window(4, 96), 10), RING)
    assert refused.value.field == "window"


def test_windowed_kv_of_one_request_is_not_found_by_another() -> None:
    tree = PrefixTree()
    tree.add(PrefixNode(1, (1, 2, 3), 1, own=True))
    assert tree.longest_match((1, 2, 3), drafted=True).node is None


async def test_every_sequence_of_a_plan_looks_through_the_window_and_nothing_is_kept() -> None:
    stage = Stage(SAYS)
    asked = Ask(prompt="Tell me about letters.", mode="sot", window=Window(4, 64))
    await stage.answer(asked)
    opened = [order.opening for order in stage.ring.orders if isinstance(order, Open)]
    assert len(opened) > 2
    assert {one.window for one in opened} == {asked.window}
    assert stage.engine.kept == ()
    await stage.answer(replace(asked, window=None))
    assert stage.engine.kept != ()


def test_chat_bodies_may_name_one() -> None:
    body = {"messages": [{"role": "user", "content": "Why?"}], "specsot": {"window": {"recent": 64}}}
    (asked,) = chat_asks(ChatBody.model_validate(body), "direct", 2048)
    assert asked.window == Window(4, 64)
