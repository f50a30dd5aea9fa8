"""The door that most tests here knock at."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest


@pytest.fixture
async def house() -> AsyncIterator[Any]:
    """A served demo; afterwards nothing is left of anybody, on either side."""
    from tests.http.house import served

    async with served() as one:
        yield one
        await one.quiet()
        one.stage.assert_clean()
