"""A CA that tests may ask for certificates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.tls_files import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.at(tmp_path / "authority")
