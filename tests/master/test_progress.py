"""When an engine counts as hung: tables over passed-in times.

Refuses to know clocks and rings.
"""

from __future__ import annotations

import pytest

from specsot_master.progress import Progress

Look = tuple[float, int, bool, bool]  # (time, laps so far, owed, moves)


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([(0, 0, False, True), (1000, 0, False, True)], id="idle is healthy"),
        pytest.param([(0, 0, False, True), (1, 0, True, True), (9.9, 0, True, True), (10, 0, True, False)],
                     id="work and no lap"),
        pytest.param([(0, 0, True, True), (9, 1, True, True), (18, 2, True, True), (28, 2, True, False)],
                     id="slow laps are laps"),
        pytest.param([(0, 0, True, True), (10, 0, True, False), (11, 1, True, True)], id="it moves again"),
        pytest.param([(0, 0, True, True), (10, 0, True, False), (11, 0, False, True), (15, 0, True, True)],
                     id="nobody waits any more"),
        pytest.param([(1000, 0, True, True), (1010, 0, True, False)], id="nobody looked before"),
    ],
)  # fmt: skip
def test_progress(looks: list[Look]) -> None:
    progress = Progress(10)
    assert [progress.moves(laps, owed, now) for now, laps, owed, _ in looks] == [one[3] for one in looks]
