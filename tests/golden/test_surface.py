"""What users type, send, read and import is as it was recorded.

Who changes it on purpose runs `python -m tests.golden --write`, and shows the diff.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.golden.record import changes, compute, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def surface() -> Mapping[str, str]:
    return compute()


@pytest.mark.parametrize(
    "file",
    [
        "children.txt",
        "commands.txt",
        "http.txt",
        "member-metrics.txt",
        "protos.txt",
        "python.txt",
        "telemetry.txt",
    ],
)
def test_the_surface_is_as_it_was_recorded(file: str, surface: Mapping[str, str]) -> None:
    assert changes({file: surface[file]}, only=file) == []


def test_nothing_else_is_recorded(surface: Mapping[str, str]) -> None:
    assert read().keys() == surface.keys()
