"""A command line of grpcurl as a value, and its replay by a reflection client: the flags our documents use.

Whatever it does not know is an error.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, NoReturn

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


@dataclass(frozen=True, slots=True)
class Line:
    """words: what is wanted: ["list"], ["list", service], ["describe", symbol], or [service/method]."""

    address: str
    words: tuple[str, ...]
    plaintext: bool = False
    data: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    authority: str | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(line: str, environment: Mapping[str, str] | None = None) -> Line:
    """The line as its shell would read it. Raises ValueError for what is not understood here."""
    program, *words = shlex.split(Template(line).substitute(environment or {}), comments=True)
    if program != "grpcurl":
        raise ValueError(f"{program} is not grpcurl")
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-plaintext", action="store_true")
    parser.add_argument("-d", dest="data", default="")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    for flag in ("-cacert", "-cert", "-key", "-authority"):
        parser.add_argument(flag)
    parser.add_argument("address")
    parser.add_argument("words", nargs="+")
    found = vars(parser.parse_args(words))
    headers = tuple(_header(text) for text in found.pop("headers"))
    return Line(**found | {"headers": headers, "words": tuple(found["words"])})


def _header(text: str) -> tuple[str, str]:
    name, _, value = text.partition(":")
    return name.strip().lower(), value.strip()


def replay(line: Line, address: str, version: str = "v1") -> list[Any]:
    """What grpcurl would print, as values: names, a descriptor, or one dictionary per response.

    Raises grpc.RpcError when the call ends with another status than OK, KeyError for unknown symbols.
    """
    with _channel(line, address) as channel:
        spoken = grpc.intercept_channel(channel, _Reflection(version, line.headers))
        database = ProtoReflectionDescriptorDatabase(spoken)
        pool = DescriptorPool(database)
        match line.words:
            case ("list",):
                return sorted(database.get_services())
            case ("list", service):
                found = pool.FindServiceByName(service)
                return sorted(f"{service}.{name}" for name in found.methods_by_name)
            case ("describe", symbol):
                return [database.FindFileContainingSymbol(symbol)]
            case (method,):
                return _call(channel, _method(pool, method), line)
            case _:
                raise ValueError(f"too many words: {line.words}")


def _channel(line: Line, address: str) -> grpc.Channel:
    options = [("grpc.default_authority", line.authority)] if line.authority else []
    if line.plaintext:
        return grpc.insecure_channel(address, options)
    cacert, key, cert = (path and Path(path).read_bytes() for path in (line.cacert, line.key, line.cert))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(cacert, key, cert), options)


class _Reflection(grpc.StreamStreamClientInterceptor):
    """Lets the client, which speaks v1alpha, ask by another version's name, and with the line's headers."""

    def __init__(self, version: str, headers: tuple[tuple[str, str], ...]) -> None:
        self._version, self._headers = version, headers

    def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        method = client_call_details.method.replace(".v1alpha.", f".{self._version}.")
        details = client_call_details._replace(method=method, metadata=self._headers)
        return continuation(details, request_iterator)


def _method(pool: DescriptorPool, name: str) -> MethodDescriptor:
    service, _, method = name.replace("/", ".").rpartition(".")
    return pool.FindServiceByName(service).methods_by_name[method]


def _call(channel: grpc.Channel, method: MethodDescriptor, line: Line) -> list[Any]:
    """Every call is made as a stream both ways: on the wire all kinds are the same."""
    asked, told = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    path = f"/{method.containing_service.full_name}/{method.name}"
    call = channel.stream_stream(path, asked.SerializeToString, told.FromString)
    requests = [json_format.Parse(text, asked()) for text in _texts(line.data)]
    if not method.client_streaming and not requests:
        requests = [asked()]
    responses = call(iter(requests), metadata=line.headers, timeout=60)
    return [json_format.MessageToDict(response) for response in responses]


def _texts(data: str) -> Iterator[str]:
    """One message's JSON after the other."""
    reader, rest = json.JSONDecoder(), data.strip()
    while rest:
        _, end = reader.raw_decode(rest)
        yield rest[:end]
        rest = rest[end:].strip()
