"""Whatever was found once is tried again: each file of the corpus at the target that its folder names.

Its name says it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, attempt

CORPUS = Path(__file__).parent / "corpus"
FOUND = sorted(path for name in TARGETS for path in (CORPUS / name).glob("*"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_stays_fixed(path: Path) -> None:
    attempt(path.parent.name, path.read_bytes())


def test_every_file_has_a_target() -> None:
    folders = {path.parent.name for path in CORPUS.rglob("*") if path.is_file()}
    assert folders <= set(TARGETS)
    assert FOUND
