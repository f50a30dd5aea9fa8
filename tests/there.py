"""Narrows an optional value for type checkers."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def there(value: T | None) -> T:
    """Return the value; fail the test if it is None."""
    assert value is not None
    return value
