"""Encodes values as protobuf messages and decodes them, by tables: a `Schema` for each kind of value.

A schema pairs a dataclass with a message whose fields have the same names, and says of a field only what the
message's descriptor does not. A list is a tuple; an optional field that is unset has the dataclass's default;
messages and enumerations within it travel as they were registered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from operator import ge
from typing import Any, Generic, TypeVar, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from specsot.errors import WireError

MAX_PARTS = 1 << 14  # sequences, trees or points of a curve in one message; bounds memory, not tuned

TMessage = TypeVar("TMessage", bound=Message)
T = TypeVar("T")
P = TypeVar("P", bound=Sized)
Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]


def parse(kind: type[TMessage], data: bytes) -> TMessage:
    """A protobuf message of `kind` from bytes."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise WireError(f"not a {kind.DESCRIPTOR.full_name}: {len(data)} bytes that do not parse") from None


def require(holds: bool, complaint: str) -> None:
    if not holds:
        raise WireError(complaint)


def few(parts: P, what: str) -> P:
    """Parts of a message, not yet looked at: an empty one takes two bytes, a value hundreds."""
    if len(parts) > MAX_PARTS:
        raise WireError(f"{len(parts)} {what} in one message, {MAX_PARTS} are allowed")
    return parts


def chosen(message: Message, oneof: str) -> str:
    name = message.WhichOneof(oneof)
    require(name is not None, f"{message.DESCRIPTOR.name} carries nothing we know")
    return str(name)


def check_duration(seconds: float, what: str) -> float:
    """A finite number of seconds, not negative."""
    if not 0 <= seconds < math.inf:
        raise WireError(f"{what} must be seconds >= 0, got {seconds}")
    return seconds


def check_ascending(numbers: Sequence[int], what: str) -> tuple[int, ...]:
    ascending = tuple(numbers)
    if len(ascending) > 1 and any(map(ge, ascending, ascending[1:])):
        raise WireError(f"{what} must ascend")
    return ascending


def check_name(text: str, what: str) -> str:
    """A name or address: not empty, one line, at most 255 characters."""
    require(bool(text) and len(text) <= 255 and text.isprintable(), f"{what} must be a short line of text")
    return text


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """How one field travels. None: as it is. An encoder never sees None, which leaves its field unset."""

    encode: Encode | None = None
    decode: Decode | None = None


def checked(check: Callable[[Any, str], Any], what: str) -> FieldCodec:
    """What a check lets through; what: the part's name in a refusal."""
    return FieldCodec(decode=lambda part: check(part, what))


def repeated(each: Codec, what: str) -> FieldCodec:
    """A bounded list of values that travel like this."""
    encode = each.encode
    decode = each.decode
    return FieldCodec(
        encode and (lambda values: map(encode, values)),
        lambda values: tuple(map(decode, few(values, what)) if decode else few(values, what)),
    )


class Enumeration:
    """The Python values of an enumeration's numbers: DRAFTER_EAGLE of `DraftMethod` is "eagle".

    The prefix of the names is that of the value 0: DRAFTER_ of DRAFTER_UNSPECIFIED.
    """

    def __init__(
        self, descriptor: EnumDescriptor, value_of: Callable[[str], Any] = str, what: str | None = None
    ) -> None:
        """value_of: makes the value of a name. what: the words of a refusal, if they are not its own name."""
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", descriptor.name)
        prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
        names = {
            name.removeprefix(prefix).lower(): each.number for name, each in descriptor.values_by_name.items()
        }
        self.full_name = descriptor.full_name
        self._what = what or words.lower()
        self.numbers = {value_of(name): number for name, number in names.items() if number}
        self.values = {number: value for value, number in self.numbers.items()}

    def encode(self, value: Any) -> Any:
        return self.numbers[value]

    def decode(self, number: int) -> Any:
        """Raises WireError."""
        if number not in self.values:
            raise WireError(f"{self._what} {number} is unknown")
        return self.values[number]

    def or_unspecified(self, default: Any) -> FieldCodec:
        return FieldCodec(self.encode, lambda number: self.decode(number) if number else default)


class Schema(Generic[T, TMessage]):
    """A dataclass and its message. check: looks at a message before anything of it is decoded, and raises.

    others: fields of another name in the message. without: fields that somebody else encodes and decodes.
    codecs: of the fields that the descriptor does not tell enough of.
    """

    def __init__(
        self,
        kind: type[T],
        message: type[TMessage],
        check: Callable[[TMessage], None] | None = None,
        others: Mapping[str, str] | None = None,
        without: Collection[str] = (),
        **codecs: FieldCodec,
    ) -> None:
        self.full_name = message.DESCRIPTOR.full_name
        self.kind = kind
        self._message = message
        self._check = check
        self._others = others or {}
        self._without = without
        self._codecs = codecs

    def encode(self, value: T) -> TMessage:
        """Raises WireError."""
        given: dict[str, Any] = {}
        for name, there, encode in self._table.encoders:
            part = getattr(value, name)
            given[there] = part if encode is None or part is None else encode(part)
        return self._message(**given)

    def decode(self, message: TMessage, **given: Any) -> T:
        """given: the fields that somebody else decodes. Raises WireError."""
        if self._check:
            self._check(message)
        for name, there, decode in self._table.decoders:
            part = getattr(message, there)
            given[name] = decode(part) if decode else part
        for name, there, decode, default in self._table.optional:
            if message.HasField(there):
                part = getattr(message, there)
                given[name] = decode(part) if decode else part
            else:
                given[name] = default
        return self.kind(**given)

    @cached_property
    def _table(self) -> _Table:
        """Made when first used: by then all that is nested in it is registered."""
        table = _Table()
        for each in fields(cast(Any, self.kind)):
            if each.name not in self._without:
                self._enter(table, each.name, default_of(each))
        return table

    def _enter(self, table: _Table, name: str, default: Any) -> None:
        there: Any = self._message.DESCRIPTOR.fields_by_name[self._others.get(name, name)]
        codec = self._codecs.get(name) or codec_of(there, default)
        table.encoders.append((name, there.name, codec.encode))
        if there.has_presence and not (there.message_type and default is MISSING):
            absent = None if default is MISSING else default
            table.optional.append((name, there.name, codec.decode, absent))
        else:
            table.decoders.append((name, there.name, codec.decode))


@dataclass(frozen=True, slots=True)
class _Table:
    """Names of fields in the value and in the message, their codecs; of optional ones the default, too."""

    encoders: list[tuple[str, str, Encode | None]] = field(default_factory=list)
    decoders: list[tuple[str, str, Decode | None]] = field(default_factory=list)
    optional: list[tuple[str, str, Decode | None, Any]] = field(default_factory=list)


def default_of(one: Any) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


class OneOf(Generic[T, TMessage]):
    """A message that carries one of several, each by the schema of its own; the table is its descriptor."""

    def __init__(self, message: type[TMessage], oneof: str, refusal: str = "there is no place for a") -> None:
        """refusal: the words in front of the type of a value that it does not carry."""
        self.full_name = message.DESCRIPTOR.full_name
        self._message = message
        self._oneof = oneof
        self._refusal = refusal

    def encode(self, value: T) -> TMessage:
        """Raises WireError."""
        if type(value) not in self._encoders:
            raise WireError(f"{self._refusal} {type(value).__name__}")
        name, encode = self._encoders[type(value)]
        return self._message(**{name: encode(value)})

    def decode(self, message: TMessage) -> T:
        """Raises WireError."""
        name = chosen(message, self._oneof)
        if name not in self._decoders:
            raise WireError(f"{name} does not belong here")
        return self._decoders[name](getattr(message, name))

    @cached_property
    def _encoders(self) -> dict[type, tuple[str, Callable[[Any], Message]]]:
        return {schema.kind: (name, schema.encode) for name, schema in self._schemas()}

    @cached_property
    def _decoders(self) -> dict[str, Callable[[Any], T]]:
        return {name: schema.decode for name, schema in self._schemas()}

    def _schemas(self) -> Iterator[tuple[str, Schema[Any, Any]]]:
        for each in self._message.DESCRIPTOR.oneofs_by_name[self._oneof].fields:
            schema = _REGISTERED.get(cast(Any, each.message_type).full_name)
            if isinstance(schema, Schema):
                yield each.name, schema


Named = Enumeration | Schema[Any, Any] | OneOf[Any, Any]
Codec = FieldCodec | Named

_REGISTERED: dict[str, Named] = {}  # by the full name of a message or an enumeration


def register(*codecs: Named) -> None:
    """Fields of these types travel like this, unless a schema says otherwise."""
    _REGISTERED.update((codec.full_name, codec) for codec in codecs)


def codec_of(field: Any, default: Any) -> Codec:
    """What a field's descriptor tells. A list is bounded, unless it is of whole numbers: tokens, sequences.

    default: of the value's field; where it is None, that is what an unspecified enumeration means.
    """
    kind = field.message_type or field.enum_type
    codec = _REGISTERED[kind.full_name] if kind else FieldCodec()
    if field.is_repeated:
        whole = field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
        return FieldCodec(decode=tuple) if whole else repeated(codec, field.name.replace("_", " "))
    if isinstance(codec, Enumeration) and default is None:
        return codec.or_unspecified(None)
    return codec
