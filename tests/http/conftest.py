"""The endpoint that most tests here knock at.

Starting one takes longer than most tests: tests that are refused, and leave nothing behind, share one for
their file (`shared_house`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio


@pytest.fixture
async def house() -> AsyncIterator[Any]:
    """A served demo; afterwards nothing is left of anybody, on either side."""
    from tests.http.house import served

    async with served() as one:
        yield one
        await one.quiet()
        one.stage.assert_clean()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_house() -> AsyncIterator[Any]:
    """The same for all tests of a file."""
    from tests.http.house import served

    async with served() as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def shared_house(one_house: Any) -> AsyncIterator[Any]:
    """For tests that leave nothing behind, as those who are refused: it is clean before and after each."""
    one_house.stage.ring.orders.clear()
    yield one_house
    await one_house.quiet()
    one_house.stage.assert_clean()
