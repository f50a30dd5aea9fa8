"""A value that a test goes on with must be there."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def there(value: T | None) -> T:
    """The value. Fails where it is None."""
    assert value is not None
    return value
