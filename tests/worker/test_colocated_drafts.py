"""A drafter on the thread of a last stage: when it is asked, and what is begun of what follows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specsot.core.frames import Draft, Drafts, Frame, Outcome, PromptChunk, Result, TreeSegment
from specsot.core.overlap import OverlapState
from specsot.core.tree import chain, single
from specsot.errors import Unavailable
from specsot.members import Configuration, Range, Stage
from specsot.transport.links import Exchange, Inbox, LocalDialer, LocalLink
from specsot_worker.frame_work import reporting
from specsot_worker.overlap.drafted_step import ColocatedDrafts
from specsot_worker.ring_links import RingLinks
from specsot_worker.verifier import VerifiedFrame
from specsot_worker.worker import colocated_drafter

RESULT, DRAFTS = Result(1, 5), Drafts(1, (Draft(3, 2, single(7)),))
ONE = (Stage("a", "a", Range(0, 2)),)
TWO = (Stage("a", "a", Range(0, 1)), Stage("b", "b", Range(1, 2)))
TOLD = Configuration(1, "b", TWO, pages=4, page_rows=4, slots=2, rows=4, drafter="d", flight=1)


@pytest.mark.parametrize(
    ("drafts", "posted"), [(None, [RESULT]), ((DRAFTS,), [RESULT, DRAFTS]), ((), [RESULT])]
)
def test_stage_0_receives_the_drafts_after_the_result(drafts: Any, posted: list[Any]) -> None:
    """And then the master."""
    said = list[Any]()
    first, master = (SimpleNamespace(post=lambda told, to=to: said.append((to, told))) for to in ("0", "m"))
    links: Any = RingLinks(None, first, {}, master, master)  # type: ignore[arg-type]
    verified = VerifiedFrame(RESULT, (), drafts)
    assert reporting(links, lambda: verified)() is verified
    assert said == [*(("0", one) for one in posted), ("m", RESULT)]


def test_where_stage_0_is_this_worker_the_master_receives_the_result_before_trees_are_drafted() -> None:
    events = list[Any]()
    master: Any = SimpleNamespace(post=events.append)
    links = RingLinks(None, None, {}, master, master)

    def verify(frame: str, announce: Any) -> VerifiedFrame:
        announce(RESULT)
        events.append(f"drafts after {frame}")
        return VerifiedFrame(RESULT, {}, (DRAFTS,))

    assert reporting(links, verify)("the frame").drafts == (DRAFTS,)  # type: ignore[arg-type]
    assert events == [RESULT, "drafts after the frame"]


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
    assert colocated_drafter(told, {"d": link}) is (drafter if near else None)


async def test_a_drafter_is_asked_by_its_own_thread_alone() -> None:
    """Who is not in the process is dialed by others, where there are any."""
    drafter: Any = SimpleNamespace(start_drafts=print)
    exchange, own, other = Exchange(), ThreadPoolExecutor(), ThreadPoolExecutor()
    exchange.listen("d")
    exchange.introduce("d", drafter, own)
    told = [await LocalDialer("b", exchange, thread).dial("d", 1, "drafter") for thread in (own, other, None)]
    assert [link.drafter for link in told if isinstance(link, LocalLink)] == [drafter, None, None]
    assert await LocalDialer("b", Exchange(), own, fallback=LocalDialer("b", exchange, own)).dial("d", 1)
    with pytest.raises(Unavailable, match="listens at e"):
        await LocalDialer("b", exchange, own).dial("e", 1)


@pytest.mark.parametrize(
    ("chunk", "outcome", "place", "launched"),
    [
        (PromptChunk(9, 3, (5, 6), True), Outcome(9, 0, (), (8,)), (9, 9), [2, 9]),
        # The next chunk rides with the trees of the others. So does what follows a prefix.
        (PromptChunk(9, 3, (5, 6), False), None, (9, 9), [2]),
        (PromptChunk(9, 3, (5, 6), True), None, None, [2]),
        (
            PromptChunk(9, 3, (5, 6), True),
            Outcome(9, 0, (), (8,)),
            (1, 9),
            [],
        ),  # its tree is between others
        (PromptChunk(9, 3, (5, 6), True), Outcome(9, 0, (), (8,)), None, []),  # nobody drafts for it
    ],
)
def test_after_a_prompt_its_root_is_scheduled_with_the_trees_of_others(
    chunk: PromptChunk, outcome: Outcome | None, place: tuple[int, int] | None, launched: list[int]
) -> None:
    """The next step begins with those trees, which grow behind the same verdict."""
    grown, begun, judged = list[Any](), list[Any](), list[Any]()
    handle = SimpleNamespace(
        state=OverlapState.LAUNCHED, select=lambda segments: judged.append(segments) or object()
    )
    drafter: Any = SimpleNamespace(start_drafts=lambda verdict: grown.append(verdict.trees) or handle)
    step = SimpleNamespace(launch_selected=lambda segments, _: begun.append(segments) or True)
    stage: Any = SimpleNamespace(next_step=step)
    places = {2: (2, 2), 9: place}
    near = ColocatedDrafts(stage, lambda segments: [places[one.sequence] for one in segments], lambda: True)
    near.drafter = drafter
    tree = TreeSegment(2, 4, 7, (0,), chain((1, 2)))
    frame = Frame(1, 1, segments=(tree, chunk))
    near.start(frame, object())  # type: ignore[arg-type]
    assert grown == [(tree,)], "trees beside prompts grow early in any case"
    near.predict(frame, {2: Outcome(2, 4, (0, 1), (2, 3)), **({9: outcome} if outcome else {})})
    told = [TreeSegment(2, 5, 9, (0, 1), single(3)), TreeSegment(9, 1, 5, (), single(8))]
    expected = [one for one in told if one.sequence in launched]
    assert begun == judged == ([expected] if expected else [])
