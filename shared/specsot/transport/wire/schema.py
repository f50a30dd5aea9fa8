"""Encodes values as protobuf messages and decodes them, by tables: a `Schema` for each kind of value.

A schema pairs a dataclass with a protobuf message whose fields have the same names. It only names what the
message's descriptor does not tell. A repeated field becomes a tuple. An optional field that is unset becomes
the dataclass's default. Nested messages and enumerations are encoded by the codecs that were registered for
them.
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
from specsot.service.option_table import default_of

# Entries. Bounds the sequences, trees or points of a curve in one message, and so memory. Untuned.
MAX_PARTS = 1 << 14

TMessage = TypeVar("TMessage", bound=Message)
T = TypeVar("T")
P = TypeVar("P", bound=Sized)
Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]


def parse(kind: type[TMessage], data: bytes) -> TMessage:
    """Return the protobuf message that the bytes encode. Raises WireError if they do not.

    kind: the class of the message.
    data: the bytes.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        raise WireError(f"not a {kind.DESCRIPTOR.full_name}: {len(data)} bytes that do not parse") from None


def require(is_valid: bool, complaint: str) -> None:
    """Raise WireError unless a condition is true; then do nothing.

    is_valid: the condition.
    complaint: the error's message: what is wrong, one line.
    """
    if not is_valid:
        raise WireError(complaint)


def bounded(parts: P, plural: str) -> P:
    """Return the parts of a message unchanged. Raises WireError if there are more than MAX_PARTS.

    Called before the parts are decoded, because an empty part takes two bytes in a message, but hundreds as a
    value.

    parts: the entries of a repeated field.
    plural: the parts' name in the error, such as "trees".
    """
    if len(parts) > MAX_PARTS:
        raise WireError(f"{len(parts)} {plural} in one message, {MAX_PARTS} are allowed")
    return parts


def chosen(message: Message, oneof: str) -> str:
    """Return the name of the field that is set in a oneof. Raises WireError if none is.

    message: the protobuf message.
    oneof: name of the oneof.
    """
    name = message.WhichOneof(oneof)
    require(name is not None, f"{message.DESCRIPTOR.name} has no known field set")
    return str(name)


def check_duration(seconds: float, name: str) -> float:
    """Return a number of seconds unchanged. Raises WireError unless it is finite and at least 0.

    seconds: the number.
    name: what the number is, for the error, such as "a stage's time".

    NaN raises WireError too.
    """
    if not 0 <= seconds < math.inf:
        raise WireError(f"{name} must be seconds >= 0, got {seconds}")
    return seconds


def check_ascending(numbers: Sequence[int], name: str) -> tuple[int, ...]:
    """Return the numbers as a tuple. Raises WireError unless each is greater than the one before it.

    numbers: the numbers; there may be none.
    name: what the numbers are, in the plural, for the error.

    Equal neighbors raise WireError too.
    """
    ascending = tuple(numbers)
    if len(ascending) > 1 and any(map(ge, ascending, ascending[1:])):
        raise WireError(f"{name} must ascend")
    return ascending


def check_name(text: str, name: str) -> str:
    """Return a name or address unchanged.

    text: the name or address.
    name: what the text is, for the error, such as "a sender's name".

    Raises WireError unless it has 1..255 characters, all of them printable.
    """
    require(
        bool(text) and len(text) <= 255 and text.isprintable(),
        f"{name} must have 1 to 255 printable characters",
    )
    return text


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """How the value of one field is converted to and from protobuf.

    encode: from the dataclass's value. None if the value is used unchanged. Never called with None, which
        leaves the field unset.
    decode: to the dataclass's value. None if the value is used unchanged.
    """

    encode: Encode | None = None
    decode: Decode | None = None


def checked(check: Callable[[Any, str], Any], name: str) -> FieldCodec:
    """Return a codec that passes the decoded value through `check`.

    check: called with the value and its name; returns the value, or raises WireError.
    name: the value's name in an error.
    """
    return FieldCodec(decode=lambda part: check(part, name))


def repeated(codec: Codec, plural: str) -> FieldCodec:
    """Return the codec of a list of at most MAX_PARTS values.

    codec: encodes and decodes each value.
    plural: the values' name in an error.

    Encoding does not check the number of values. Decoding returns a tuple, and raises WireError for more than
    MAX_PARTS values.
    """
    encode = codec.encode
    decode = codec.decode
    return FieldCodec(
        encode and (lambda values: map(encode, values)),
        lambda values: tuple(map(decode, bounded(values, plural)) if decode else bounded(values, plural)),
    )


class Enumeration:
    """Maps the numbers of a protobuf enumeration to Python values: DRAFTER_EAGLE of `DraftMethod` is "eagle".

    The prefix that is removed from the names is the prefix of the name of 0: DRAFTER_ of DRAFTER_UNSPECIFIED.

    full_name: the enumeration's full name in protobuf, by which it is registered.
    numbers: the number of each Python value, without 0.
    values: the Python value of each number, without 0.
    """

    def __init__(
        self,
        descriptor: EnumDescriptor,
        value_of: Callable[[str], Any] = str,
        name_in_errors: str | None = None,
    ) -> None:
        """Read the names and numbers of a protobuf enumeration, without its number 0.

        descriptor: the protobuf enumeration, whose number 0 is named ..._UNSPECIFIED.
        value_of: returns the Python value of a lower-case name without its prefix.
        name_in_errors: the enumeration's name in errors. None: its protobuf name in words.
        """
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", descriptor.name)
        prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
        names = {
            name.removeprefix(prefix).lower(): each.number for name, each in descriptor.values_by_name.items()
        }
        self.full_name = descriptor.full_name
        self._name = name_in_errors or words.lower()
        self.numbers = {value_of(name): number for name, number in names.items() if number}
        self.values = {number: value for value, number in self.numbers.items()}

    def encode(self, value: Any) -> Any:
        """Return the number of a value. Raises KeyError for a value that the enumeration does not have.

        value: the Python value.
        """
        return self.numbers[value]

    def decode(self, number: int) -> Any:
        """Return the value of a number. Raises WireError for an unknown number, and for 0.

        number: the number in the message.
        """
        if number not in self.values:
            raise WireError(f"{self._name} {number} is unknown")
        return self.values[number]

    def or_unspecified(self, default: Any) -> FieldCodec:
        """Return a codec that decodes 0 as `default`.

        default: the Python value of an unset field.
        """
        return FieldCodec(self.encode, lambda number: self.decode(number) if number else default)


class Schema(Generic[T, TMessage]):
    """Encodes and decodes a dataclass as a protobuf message.

    full_name: the message's full name in protobuf, by which the schema is registered.
    kind: the dataclass.
    """

    def __init__(
        self,
        kind: type[T],
        message: type[TMessage],
        check: Callable[[TMessage], None] | None = None,
        renamed: Mapping[str, str] | None = None,
        without: Collection[str] = (),
        **codecs: FieldCodec,
    ) -> None:
        """Describe how a dataclass is encoded. The codecs of the fields are found at the first use.

        kind: the dataclass.
        message: the class of the protobuf message.
        check: called with a message before it is decoded, and raises WireError if the message is invalid.
        renamed: the name in the message of each field whose name there differs.
        without: fields that the caller encodes and decodes.
        codecs: codecs of fields for which the descriptor does not suffice.

        Each field of the dataclass that is not in `without` needs a field of the message.
        """
        self.full_name = message.DESCRIPTOR.full_name
        self.kind = kind
        self._message = message
        self._check = check
        self._renamed = renamed or {}
        self._without = without
        self._codecs = codecs

    def encode(self, value: T) -> TMessage:
        """Return the message of a value. Raises WireError if a field cannot be encoded.

        value: the dataclass.

        A value of None leaves the field unset. Fields that the caller encodes stay unset too. Raises KeyError
        for a value that an enumeration does not have.
        """
        encoded: dict[str, Any] = {}
        for name, message_field, encode in self._table.encoders:
            part = getattr(value, name)
            encoded[message_field] = part if encode is None or part is None else encode(part)
        return self._message(**encoded)

    def decode(self, message: TMessage, **values: Any) -> T:
        """Return the value of a message. Raises WireError if the message is invalid.

        message: the protobuf message.
        values: the values of the fields that the caller decodes, by name.

        A field that the message leaves unset has the dataclass's default, or None if there is none; a field
        whose presence protobuf does not record is decoded from its zero value. Raises also what the dataclass
        itself raises, such as InvalidRequest.
        """
        if self._check:
            self._check(message)
        for name, message_field, decode in self._table.decoders:
            part = getattr(message, message_field)
            values[name] = decode(part) if decode else part
        for name, message_field, decode, default in self._table.optional:
            if message.HasField(message_field):
                part = getattr(message, message_field)
                values[name] = decode(part) if decode else part
            else:
                values[name] = default
        return self.kind(**values)

    @cached_property
    def _table(self) -> _Table:
        """Return the codecs of the fields. Created at first use, when the codecs of nested messages are
        registered.

        The fields in `without`, and those that the constructor does not take, are left out.
        """
        table = _Table()
        for each in fields(cast(Any, self.kind)):
            if each.init and each.name not in self._without:
                self._add_field(table, each.name, default_of(each))
        return table

    def _add_field(self, table: _Table, name: str, default: Any) -> None:
        """Add the codecs of one field to a table: those that were given for the field, else those that the
        message's descriptor implies.

        table: the table to extend.
        name: name of the field in the dataclass.
        default: the field's default, or MISSING.

        A field whose presence protobuf records is added as optional, with the default, or None if the
        dataclass has none. A required message is not optional: if it is unset, its empty value is decoded.
        """
        descriptor: Any = self._message.DESCRIPTOR.fields_by_name[self._renamed.get(name, name)]
        codec = self._codecs.get(name) or codec_of(descriptor, default)
        table.encoders.append((name, descriptor.name, codec.encode))
        if descriptor.has_presence and not (descriptor.message_type and default is MISSING):
            absent = None if default is MISSING else default
            table.optional.append((name, descriptor.name, codec.decode, absent))
        else:
            table.decoders.append((name, descriptor.name, codec.decode))


@dataclass(frozen=True, slots=True)
class _Table:
    """The codecs of a schema's fields, as (name in the dataclass, name in the message, codec).

    encoders: of all fields.
    decoders: of the fields that a message always has.
    optional: of the fields that a message may leave unset, with the value that such a field then has.
    """

    encoders: list[tuple[str, str, Encode | None]] = field(default_factory=list)
    decoders: list[tuple[str, str, Decode | None]] = field(default_factory=list)
    optional: list[tuple[str, str, Decode | None, Any]] = field(default_factory=list)


class OneOf(Generic[T, TMessage]):
    """Encodes one of several dataclasses as a protobuf message with a oneof.

    The message's descriptor lists the possible fields; their registered schemas encode and decode the values.

    full_name: the message's full name in protobuf, by which the oneof is registered.
    """

    def __init__(self, message: type[TMessage], oneof: str, refusal: str = "there is no place for a") -> None:
        """Describe a oneof, whose schemas are found at the first use.

        message: the class of the protobuf message.
        oneof: name of the oneof.
        refusal: the beginning of the error for a value that the oneof has no field for.
        """
        self.full_name = message.DESCRIPTOR.full_name
        self._message = message
        self._oneof = oneof
        self._refusal = refusal

    def encode(self, value: T) -> TMessage:
        """Return the message of a value. Raises WireError if the oneof has no field for its type.

        value: one of the dataclasses.

        Subclasses of the dataclasses do not count as them. Raises what the schema of the value raises.
        """
        if type(value) not in self._encoders:
            raise WireError(f"{self._refusal} {type(value).__name__}")
        name, encode = self._encoders[type(value)]
        return self._message(**{name: encode(value)})

    def decode(self, message: TMessage) -> T:
        """Return the value of a message. Raises WireError if no known field is set.

        message: the protobuf message.

        Raises also what the schema of the set field raises.
        """
        name = chosen(message, self._oneof)
        if name not in self._decoders:
            raise WireError(f"{name} is not allowed in {self._message.DESCRIPTOR.name}")
        return self._decoders[name](getattr(message, name))

    @cached_property
    def _encoders(self) -> dict[type, tuple[str, Callable[[Any], Message]]]:
        """By dataclass, the name of the oneof's field and the function that encodes its value."""
        return {schema.kind: (name, schema.encode) for name, schema in self._schemas()}

    @cached_property
    def _decoders(self) -> dict[str, Callable[[Any], T]]:
        """By name of the oneof's field, the function that decodes its value."""
        return {name: schema.decode for name, schema in self._schemas()}

    def _schemas(self) -> Iterator[tuple[str, Schema[Any, Any]]]:
        """Yield the name and the registered schema of each field of the oneof; fields without a schema are
        left out.

        The order is that of the fields in the protobuf file.
        """
        for each in self._message.DESCRIPTOR.oneofs_by_name[self._oneof].fields:
            schema = _REGISTERED.get(cast(Any, each.message_type).full_name)
            if isinstance(schema, Schema):
                yield each.name, schema


Named = Enumeration | Schema[Any, Any] | OneOf[Any, Any]
Codec = FieldCodec | Named

# The registered codecs, by the full name of a message or an enumeration.
_REGISTERED: dict[str, Named] = {}


def register(*codecs: Named) -> None:
    """Register the codecs of messages and enumerations. A schema may override them for single fields.

    codecs: the codecs, each for the message or enumeration of its `full_name`.
    """
    _REGISTERED.update((codec.full_name, codec) for codec in codecs)


def codec_of(field: Any, default: Any) -> Codec:
    """Return the codec that a field's descriptor implies.

    A repeated field has at most MAX_PARTS entries, unless they are unsigned integers, such as tokens.

    field: the descriptor of the field.
    default: the default of the dataclass's field. If it is None, an unspecified enumeration is decoded as
        None.

    A field that is neither a message, nor an enumeration, nor repeated is used unchanged. Repeated fields are
    decoded as tuples. Raises KeyError for a message or an enumeration that is not registered.
    """
    kind = field.message_type or field.enum_type
    codec = _REGISTERED[kind.full_name] if kind else FieldCodec()
    if field.is_repeated:
        whole = field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
        return FieldCodec(decode=tuple) if whole else repeated(codec, field.name.replace("_", " "))
    if isinstance(codec, Enumeration) and default is None:
        return codec.or_unspecified(None)
    return codec
