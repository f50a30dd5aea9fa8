"""What is measured of a repair."""

from __future__ import annotations

import pytest

from tools.repair_silence import longest_silence, phase_ends


def test_the_longest_silence_is_that_after_the_kill() -> None:
    assert longest_silence(10.0, [1.0, 9.5, 10.25, 12.25, 12.5]) == (2.0, 12.25)
    assert longest_silence(10.0, [10.0, 13.0]) == (3.0, 13.0)


def test_an_answer_that_never_continues_is_said_so() -> None:
    with pytest.raises(SystemExit, match="no text arrived after the kill"):
        longest_silence(10.0, [1.0, 9.5])


def test_phases_without_a_line_are_left_out() -> None:
    lines = [
        (1.0, "[info] member lost  name=worker-1"),
        (1.5, "[info] ring complete"),
        (9.0, "[info] ring complete"),
    ]
    assert [*phase_ends(lines)] == [("loss detected", 1.0), ("ring complete", 1.5)]
