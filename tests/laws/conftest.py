"""The tiny base and head of the laws."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and a head that knows nothing of it."""
    pytest.importorskip("torch")
    from tests.models import SHALLOW, write_base, write_head

    folder = tmp_path_factory.mktemp("models")
    return write_base(folder / "base", SHALLOW), write_head(folder / "head", SHALLOW)


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> int:
    """How many requests end at random; two hundred by `make test-all`."""
    return 200 if request.config.getoption("--full") else 20
