"""The sequencer with rows that a hand-over keeps: who begins with them, and when they are given up."""

import pytest

from specsot.core.frames import Close, Drafts, Result, ReusedKV
from specsot.core.pages import PageTable
from specsot_worker.core import pipeline
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
from specsot_worker.core.sequencer import Sequencer
from tests.worker.test_sequencer import PAGES, ROWS, first_answer, order_of, step


def test_after_reused_rows_trees_are_requested_once_the_drafter_has_all_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some with every step, whatever it says meanwhile."""
    monkeypatch.setattr(pipeline, "MAX_ROWS_PER_STEP", 16)
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.5))
    kept = ReusedKV(9, tuple(range(40)))
    sequencer.apply_order(order_of(1, [*kept.tokens, 7], 300, reused=kept))
    first_answer(sequencer)
    sequencer.add_drafts(Drafts(1))
    assert step(sequencer) == ("waking", 1)
    sequencer.add_drafts(Drafts(1))
    assert step(sequencer) == ("waking", 1)
    sequencer.add_drafts(Drafts(1))
    assert step(sequencer) == ("", 1)
    assert step(sequencer) is None, "now it is worth waiting for"


def test_rows_that_no_sequence_reuses_are_freed_in_order() -> None:
    sequencer = Sequencer(1, FrameBudget(64, 1, 9), PageTable(PAGES, ROWS), DraftTimeout(0.0))
    sequencer.apply_order(order_of(11, [1, 2], 9))
    sequencer.apply_order(Close(9, kept=True))
    sequencer.apply_order(Close(10))
    frame = sequencer.compose(0.0)
    assert frame is not None
    assert frame.closings == (9,)


@pytest.mark.parametrize("ordered", [False, True])
def test_rows_of_a_finished_sequence_stay_for_a_queued_sequence_that_will_reuse_them(ordered: bool) -> None:
    """A beginning for others, which waits for pages. ordered: the text itself was to be opened, too."""
    sequencer = Sequencer(1, FrameBudget(64, 1, 0), PageTable(5, ROWS), DraftTimeout(0.0))
    kept = ReusedKV(9, (5,) * 4 * ROWS)
    first = order_of(1, [1] * 2 * ROWS, 9, decodes=False)
    beginning = order_of(2, [*kept.tokens, 7], 1, decodes=False, reused=kept)
    text = [order_of(3, [*kept.tokens, 7], 9, reused=kept)] if ordered else []
    told = list[tuple[tuple[int, ...], list[int]]]()
    for orders in [first, beginning, *text], [Close(1), Close(3) if ordered else Close(9, kept=True)], []:
        for order in orders:
            sequencer.apply_order(order)
        frame = sequencer.compose(0.0)
        assert frame is not None
        told.append((frame.closings, [one.sequence for one in frame.openings]))
        sequencer.apply_result(Result(1, frame.number, ()), 0.0)
    assert told == [((), [1]), ((1,), []), ((9,), [2])]
