"""A drafter on the thread of a last stage that has others before it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from specsot.core.frames import Draft, Drafts, Result
from specsot.core.tree import single
from specsot.members import Configuration, Range, Stage
from specsot.transport.links import Inbox, LocalLink
from specsot_worker.frame_work import reporting
from specsot_worker.ring_links import RingLinks
from specsot_worker.verifier import VerifiedFrame
from specsot_worker.worker import near_drafter

RESULT, DRAFTS = Result(1, 5), Drafts(1, (Draft(3, 2, single(7)),))
ONE = (Stage("a", "a", Range(0, 2)),)
TWO = (Stage("a", "a", Range(0, 1)), Stage("b", "b", Range(1, 2)))
TOLD = Configuration(1, "b", TWO, pages=4, page_rows=4, slots=2, rows=4, drafter="d", flight=1)


@pytest.mark.parametrize(
    ("drafts", "posted"), [(None, [RESULT]), ((DRAFTS,), [RESULT, DRAFTS]), ((), [RESULT])]
)
def test_stage_0_is_told_what_was_drafted_behind_the_result(drafts: Any, posted: list[Any]) -> None:
    """And then the master."""
    said = list[Any]()
    first, master = (SimpleNamespace(post=lambda told, to=to: said.append((to, told))) for to in ("0", "m"))
    links: Any = RingLinks(None, first, None, master, master)  # type: ignore[arg-type]
    verified = VerifiedFrame(RESULT, (), drafts)
    assert reporting(links, lambda: verified)() is verified
    assert said == [*(("0", one) for one in posted), ("m", RESULT)]


@pytest.mark.parametrize(
    ("told", "near"),
    [
        (TOLD, True),  # stages take turns: nothing else could go on meanwhile
        (replace(TOLD, flight=3), False),  # other frames would wait for its trees
        (replace(TOLD, flight=3, stages=ONE, you="a"), True),  # nobody is told anything before it ends
    ],
)
async def test_it_drafts_at_once_unless_other_frames_would_wait(told: Configuration, near: bool) -> None:
    drafter: Any = object()
    link = LocalLink("b", Inbox(), drafter=drafter)
    assert near_drafter(told, link) is (drafter if near else None)
