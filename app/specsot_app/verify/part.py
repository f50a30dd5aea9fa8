"""A value inside a JSON file that knows the way to itself, so that what is wrong can be named.

Refuses to know what the values mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from specsot.errors import ModelError


class JsonField:
    """where: the file and the way to the value, such as `vectors.json: prompts[0].prompt_ids`.

    Each question raises ModelError where the value is of another kind.
    """

    __slots__ = ("_value", "where")

    def __init__(self, value: Any, where: str) -> None:
        self._value, self.where = value, where

    def at(self, name: str) -> JsonField:
        """A field that must be there."""
        found = self.find(name)
        if found is None:
            raise ModelError(f"{self._way(name)} is missing")
        return found

    def find(self, name: str) -> JsonField | None:
        """A field; None where it is absent or null."""
        value = self._object().get(name)
        return None if value is None else JsonField(value, self._way(name))

    def items(self) -> Iterator[tuple[str, JsonField]]:
        """The fields of an object."""
        for name, value in self._object().items():
            yield name, JsonField(value, self._way(name))

    def parts(self) -> list[JsonField]:
        """The elements of a list."""
        return [JsonField(value, f"{self.where}[{i}]") for i, value in enumerate(self._list())]

    def text(self) -> str:
        return self._value if isinstance(self._value, str) else self._refuse("a string")

    def integer(self) -> int:
        return self._value if type(self._value) is int else self._refuse("an integer")

    def number(self) -> float:
        return float(self._value) if type(self._value) in (int, float) else self._refuse("a number")

    def integers(self) -> tuple[int, ...]:
        whole = all(type(value) is int for value in self._list())
        return tuple(self._list()) if whole else self._refuse("a list of integers")

    def numbers(self) -> tuple[float, ...]:
        return tuple(part.number() for part in self.parts())

    def _object(self) -> dict[str, Any]:
        return self._value if isinstance(self._value, dict) else self._refuse("an object")

    def _list(self) -> list[Any]:
        return self._value if isinstance(self._value, list) else self._refuse("a list")

    def _way(self, name: str) -> str:
        """The file's name is followed by a colon, a field by a dot."""
        return f"{self.where}.{name}" if ": " in self.where else f"{self.where}: {name}"

    def _refuse(self, wanted: str) -> NoReturn:
        raise ModelError(f"{self.where} must be {wanted}, got {str(self._value)[:60]!r}")
