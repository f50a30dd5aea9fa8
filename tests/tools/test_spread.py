"""Files of tests among processes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from tests import spread


@pytest.mark.parametrize("names", [("pure/test_a", "http/test_page"), ("pure/test_a", "pure/test_b")])
def test_each_file_is_taken_once_and_nothing_stays_open(names: tuple[str, ...]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    items: list[Any] = [SimpleNamespace(nodeid=f"tests/{name}.py::test") for name in names]
    lists = spread.lists_of(items, 2)
    taken = [item.nodeid for files, left in lists for item in spread.taken(files, left)]
    assert sorted(taken) == sorted(item.nodeid for item in items)
    for left in {left for _, left in lists}:
        os.close(left)
    assert set(os.listdir("/proc/self/fd")) == before
