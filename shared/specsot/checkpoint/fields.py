"""Checked access to a JSON file of a model directory, without torch."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from specsot.errors import ModelError

Json = Mapping[str, Any]


@contextmanager
def explain_os_errors(path: Path | str, hint: str = "") -> Generator[None]:
    """Return a context in which every OSError becomes a ModelError of one line, such as "m.gguf: No space
    left on device".

    path: the file or folder that the message names.
    hint: what the message says after the reason.
    """
    try:
        yield
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}{hint}") from None


def read_json(source: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises ModelError if the file is missing or holds no JSON object.

    source: path of the file.

    Raises ModelError also if the file cannot be read or is not encoded in UTF-8.
    """
    try:
        value = json.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{source}: no such file") from None
    except OSError as error:
        raise ModelError(f"{source}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source}: not a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """Checked access to one JSON object, such as the config.json of a model directory.

    A null counts as absent. If a method's `default` is None, the field is required.

    source: path of the file that holds the object, for error messages.
    values: the JSON object by key.
    """

    source: Path
    values: Json

    def require(self, is_valid: bool, complaint: str) -> None:
        """Raise ModelError unless the fields are valid.

        is_valid: whether they are.
        complaint: what is wrong; the message begins with the file.
        """
        if not is_valid:
            raise ModelError(f"{self.source}: {complaint}")

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number > 0 of the object, as a float.

        name: key of the number.
        default: the result if the key is absent or null. With None, the key is required.

        Raises ModelError if the value is missing, no number, not > 0, or infinite.

        Booleans and texts such as "1" count as no number; so does NaN. The default is checked as well.
        """
        stored = self.values.get(name)
        value: Any = default if stored is None else stored
        self.require(
            isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf,
            f"{name} must be a number > 0, got {value!r}",
        )
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        """Return an integer > 0 of the object; 4.0 counts as 4.

        name: key of the integer.
        default: the result if the key is absent or null. With None, the key is required.

        Raises ModelError if the value is missing or no integer > 0.

        Booleans and texts count as no integer. The default is checked as well.
        """
        value = self.number(name, default)
        self.require(value == int(value), f"{name} must be an integer, got {value!r}")
        return int(value)

    def index(self, name: str, default: int) -> int:
        """Return an integer >= 0 of the object.

        name: key of the integer.
        default: the result if the key is absent or null.

        Raises ModelError if the value is no integer >= 0.
        """
        return 0 if self.values.get(name, default) == 0 else self.count(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean of the object. Numbers and texts are not accepted.

        name: key of the boolean.
        default: the result if the key is absent or null.

        Raises ModelError if the value is no boolean.

        The key is never required: without a value, the default is returned.
        """
        value = self.values.get(name)
        value = default if value is None else value
        self.require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
        return value
