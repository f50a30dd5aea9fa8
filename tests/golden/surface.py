"""Finds what users touch in the product: the one file of these tests that names its modules.

When the product moves, this file follows; what is recorded does not.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot.process.flags import Flags
from specsot_app.cli import GROUPS, WORDS, command_with, main

SERVICES = ("master", "worker", "drafter")
SWITCHED = {"on": True, "yes": True, "off": False, "no": False}


class Refused(Exception):
    """A command line that the product does not take, with what it says."""

    @property
    def unknown(self) -> bool:
        """There is no such flag."""
        return "No such option" in str(self) or "unrecognized arguments" in str(self)


class _Parsed(Exception):
    """A service's flags, caught before anything is made of them."""


def programs() -> list[tuple[str, ...]]:
    """Every command with flags, as it is typed: ("master",) for a service, ("infer",), ("bench", "demo")."""
    grouped = [(group, word) for group in GROUPS for word in _commands((group,))]
    return [*((name,) for name in SERVICES), *((word,) for word in WORDS), *grouped]


def help_of(program: tuple[str, ...]) -> str:
    """What --help prints."""
    said = io.StringIO()
    with redirect_stdout(said):
        if program[0] in SERVICES:
            with suppress(SystemExit):
                _service(program[0])(["--help"])
        else:
            main([*program, "--help"])
    return said.getvalue()


def parse(
    program: tuple[str, ...], words: Sequence[str], variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The value of every flag and argument, by its name with dashes, as plain JSON. Raises Refused.

    A flag that is a switch has true and false, however it is typed. Nothing is done with the values.
    """
    with environment(variables or {}):
        given = _parse_service(program[0], words) if program[0] in SERVICES else _parse_word(program, words)
    return {name: plain(value) for name, value in given.items()}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These are all of the product's own variables."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("SPECSOT_")}
    with patch.dict(os.environ, {**others, **variables}, clear=True):
        yield


def plain(value: Any) -> Any:
    """As JSON has it."""
    match value:
        case str():
            return SWITCHED.get(value, value)
        case Enum():
            return plain(value.value)
        case bool() | int() | float() | None:
            return value
        case list() | tuple() | set():
            return [plain(one) for one in value]
        case _:
            return str(value) if isinstance(value, Path | Range) else "taken"


def _parse_word(program: tuple[str, ...], words: Sequence[str]) -> dict[str, Any]:
    command: Any = command_with(program[:1])
    context: Any = command.make_context("specsot", [*program, *words])
    try:
        for name in program:
            command = command.commands[name]
            rest = list(words) if name == program[-1] else [*program[1:], *words]
            context = command.make_context(name, rest, parent=context)
    except (typer.TyperException, InvalidRequest, typer.Exit) as error:
        raise Refused(
            error.format_message() if isinstance(error, typer.TyperException) else str(error)
        ) from None
    named = {one.name: one for one in command.params}
    return {_name_of(named[name]): value for name, value in context.params.items()}


def _name_of(parameter: Any) -> str:
    return parameter.opts[0].removeprefix("--").replace("_", "-")


def _parse_service(name: str, words: Sequence[str]) -> dict[str, Any]:
    read = Flags.read

    def stop(flags: Flags, arguments: Sequence[str] | None = None) -> Any:
        raise _Parsed(read(flags, arguments))

    said = io.StringIO()
    with patch.object(Flags, "read", stop), redirect_stderr(said):
        try:
            _service(name)(list(words))
        except _Parsed as parsed:
            return {one.replace("_", "-"): value for one, value in vars(parsed.args[0]).items()}
        except SystemExit:
            raise Refused(said.getvalue()) from None
    raise AssertionError("flags were not read")


def _service(name: str) -> Any:
    from specsot_drafter.config import read_config as drafter
    from specsot_master.config import read_config as master
    from specsot_worker.config import read_config as worker

    return {"master": master, "worker": worker, "drafter": drafter}[name]


def _commands(words: tuple[str, ...]) -> list[str]:
    command: Any = command_with(words[:1])
    for word in words:
        command = command.commands[word]
    return list(command.commands)


def registries() -> dict[str, Any]:
    """The metrics of each member's process, in an epoch."""
    from specsot.members import Configuration, Range, Stage
    from specsot.pages import PageTable
    from specsot.process.figures import registry_of
    from specsot_drafter.figures import DrafterMetrics as DrafterFigures
    from specsot_worker.figures import WorkerMetrics as WorkerFigures

    epoch = Configuration(1, "w0", (Stage("w0", "127.0.0.1:1", Range(0, 8)),), 16, 256, 25)
    worker, drafter = registry_of("worker"), registry_of("drafter")
    WorkerFigures(worker).formed(epoch, PageTable(16, 256))
    DrafterFigures(drafter).formed(epoch, lambda: 16)
    return {"worker": worker, "drafter": drafter}


def fleet_options() -> dict[str, Any]:
    """What `SpecSoT.from_pretrained` takes, with what stands where nothing is said."""
    from dataclasses import asdict

    from specsot_app.api import wanted_of
    from specsot_app.fleets import Wanted

    given = asdict(Wanted())
    try:
        wanted_of({"nobody-knows-this": 1})
    except InvalidRequest as error:
        known = str(error).partition("known: ")[2].split(", ")
        return {name: plain(given[name]) for name in sorted(known)}
    raise AssertionError("an unknown option was taken")


def ask_options() -> tuple[str, ...]:
    """What `SpecSoT.generate` takes."""
    from specsot_app.asking import OPTIONS

    return OPTIONS


def ask_of(options: Mapping[str, Any]) -> Any:
    """What `SpecSoT.generate` makes of them."""
    from specsot_app.asking import ask_of

    return ask_of("What is it?", **options)


def aliases() -> tuple[str, ...]:
    """Other systems' names of options of Python calls."""
    from specsot_app.aliases import ALIASES

    return tuple(ALIASES)


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    from specsot_app.aliases import translate

    return translate(options)


def answer_classes() -> tuple[type, ...]:
    """What Python calls return."""
    from specsot_app.answers import Answer, Branch

    return Answer, Branch


def stats_of(answer: Any) -> dict[str, Any]:
    """What the call of the systems that SpecSoT grew from returns beside its tokens."""
    from specsot_app.answers import stats_of

    return stats_of(answer)


def descriptors() -> list[Any]:
    """The protos that are served."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    from specsot.v1 import fleet_pb2, master_pb2, ring_pb2, values_pb2

    files = [FileDescriptorProto() for _ in range(4)]
    for file, stub in zip(files, (fleet_pb2, master_pb2, ring_pb2, values_pb2)):
        stub.DESCRIPTOR.CopyToProto(file)
    return files
