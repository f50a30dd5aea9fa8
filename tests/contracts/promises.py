"""What a set of protos promises those who use it, as facts: what must stay as it is, though more may come.

The rules are those of `buf breaking` with FILE, as far as
proto3 without options and extensions goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

Fact = tuple[str, object]

SCALARS = FieldDescriptorProto.Type.Name
LABELS = FieldDescriptorProto.Label.Name


def broken(before: Iterable[FileDescriptorProto], now: Iterable[FileDescriptorProto]) -> list[str]:
    """One line for each promise of `before` that does not hold `now`."""
    kept = facts(now)
    return [
        f"{name}: {what} became {kept.get(name, 'nothing')}"
        for name, what in facts(before).items()
        if kept.get(name) != what
    ]


def facts(files: Iterable[FileDescriptorProto]) -> dict[str, object]:
    return dict(fact for file in files for fact in of_file(file))


def of_file(file: FileDescriptorProto) -> Iterator[Fact]:
    yield f"file {file.name}", (file.package, file.syntax)
    for message in file.message_type:
        yield from of_message(message, file.package, file.name)
    for enum in file.enum_type:
        yield from of_enum(enum, file.package, file.name)
    for service in file.service:
        yield from of_service(service, file.package, file.name)


def of_message(message: DescriptorProto, around: str, file: str) -> Iterator[Fact]:
    name = f"{around}.{message.name}"
    yield f"message {name}", file
    yield from ((f"{name} {field.number}", field_of(field, message)) for field in message.field)
    for gone in message.reserved_range:
        yield from ((f"{name} reserved {number}", True) for number in range(gone.start, gone.end))
    yield from ((f"{name} reserved {gone}", True) for gone in message.reserved_name)
    for nested in message.nested_type:
        yield from of_message(nested, name, file)
    for enum in message.enum_type:
        yield from of_enum(enum, name, file)


def field_of(field: FieldDescriptorProto, message: DescriptorProto) -> tuple[str, ...]:
    """Name, type, how often it may come, and in which company."""
    alone = field.proto3_optional or not field.HasField("oneof_index")
    company = "alone" if alone else f"one of {message.oneof_decl[field.oneof_index].name}"
    presence = "optional" if field.proto3_optional else LABELS(field.label)
    return field.name, field.type_name or SCALARS(field.type), presence, company


def of_enum(enum: EnumDescriptorProto, around: str, file: str) -> Iterator[Fact]:
    name = f"{around}.{enum.name}"
    yield f"enum {name}", file
    yield from ((f"{name} {value.number}", value.name) for value in enum.value)


def of_service(service: ServiceDescriptorProto, around: str, file: str) -> Iterator[Fact]:
    name = f"{around}.{service.name}"
    yield f"service {name}", file
    for method in service.method:
        asks = (method.input_type, method.client_streaming)
        tells = (method.output_type, method.server_streaming)
        yield f"rpc {name}/{method.name}", (asks, tells)
