"""What a caller may hold an answer to: a form, as a frozen value that refuses impossible words.

Refuses to know grammars, tokens, and whether a schema or regex makes sense; `specsot.constraint` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from specsot.errors import InvalidRequest

FormKind = Literal["json_object", "json_schema", "regex", "choice"]

FORM_KINDS: tuple[FormKind, ...] = ("json_object", "json_schema", "regex", "choice")
MAX_FORM_BYTES = 64 << 10  # of all its texts: they travel with the answer's opening
MAX_CHOICES = 1024


def refuse(reason: str) -> InvalidRequest:
    """What is raised for a form that cannot be; `constraint` is the field of every such refusal."""
    return InvalidRequest(f"constraint: {reason}", field="constraint")


@dataclass(frozen=True, slots=True)
class Form:
    """A form of one kind.

    texts: the schema (JSON) or the regex (Rust's dialect, for the whole answer); every choice; nothing
           for json_object.
    """

    kind: FormKind
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in FORM_KINDS:
            raise refuse(f"must be one of {', '.join(FORM_KINDS)}, got {self.kind!r}")
        if not all(isinstance(cast(object, text), str) for text in self.texts):
            raise refuse(f"{self.kind} must be text")
        if not _counts(self.kind, len(self.texts)):
            raise refuse(f"{self.kind} cannot have {len(self.texts)} texts")
        if not all(self.texts):
            raise refuse(f"{self.kind} must not be empty")
        if (size := sum(map(_size, self.texts))) > MAX_FORM_BYTES:
            raise refuse(f"{self.kind} has {size} bytes, {MAX_FORM_BYTES} are allowed")


def _counts(kind: FormKind, texts: int) -> bool:
    """Whether a form of this kind may have so many texts."""
    if kind == "choice":
        return 0 < texts <= MAX_CHOICES
    return texts == (kind != "json_object")


def _size(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise refuse("holds half a character, which is not Unicode text") from None
