"""A base and its head, written anew for each test that asks for them.

Torch is imported only where a test wants one.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base and an EAGLE-3 head."""
    from tests.drafter.heads import write_pair

    return write_pair(tmp_path)


@pytest.fixture
def first(folder: Path) -> Path:
    """The same base and an EAGLE-1 head."""
    from tests.drafter.heads import turn_to_eagle_1

    return turn_to_eagle_1(folder)
