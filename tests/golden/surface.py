"""Finds what users touch in the product: the one file of these tests that names its modules.

When the product moves, this file follows; what is recorded does not.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import MISSING, replace
from enum import Enum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click

from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot.service.command import TableCommand
from specsot.service.option_table import entries_of
from specsot_app.cli import GROUPS, WORDS, main, specsot

SERVICES = ("master", "worker", "drafter")
HERE = frozenset({"127.0.0.1", "10.0.0.1"})  # hosts that are this machine, wherever it runs
BUILD = TableCommand.__init__
BUILT: dict[type, dict[str, Any]] = {}  # by the settings of a service: see `_built_once`
PARSER = TableCommand.make_parser
PARSERS: dict[TableCommand[Any], Any] = {}  # see `_parser_once`
SWITCHED = {"on": True, "yes": True, "off": False, "no": False}


class Refused(Exception):
    """A command line that the product does not take, with what it says."""

    @property
    def unknown(self) -> bool:
        """There is no such flag."""
        return re.search(r"No such option:? '?--", str(self)) is not None


class _Started(Exception):
    """The services of a fleet, caught before any is started."""


class _Parsed(Exception):
    """A service's flags, caught before anything is made of them."""


def programs() -> list[tuple[str, ...]]:
    """Every command with flags, as it is typed: ("master",) for a service, ("infer",), ("bench", "demo")."""
    grouped = [(group, word) for group in GROUPS for word in _commands((group,))]
    return [*((name,) for name in SERVICES), *((word,) for word in WORDS), *grouped]


def help_of(program: tuple[str, ...]) -> str:
    """What --help=all prints."""
    said = io.StringIO()
    with redirect_stdout(said):
        if program[0] in SERVICES:
            with suppress(SystemExit):
                _service(program[0])(["--help=all"])
        else:
            main([*program, "--help=all"])
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
    changed = [name for name in os.environ if name.startswith("SPECSOT_") or name in variables]
    own = {name: os.environ.pop(name) for name in changed}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(own)


def plain(value: Any) -> Any:
    """As JSON has it."""
    match value:
        case str():
            return SWITCHED.get(value, value)
        case Enum():
            return plain(value.value)
        case _ if value is MISSING:
            return None
        case bool() | int() | float() | None:
            return value
        case list() | tuple() | set():
            return [plain(one) for one in value]
        case _:
            return str(value) if isinstance(value, Path | Range) else "taken"


def _parse_word(program: tuple[str, ...], words: Sequence[str]) -> dict[str, Any]:
    command, context = _found(program)
    try:
        with patch.object(TableCommand, "make_parser", _parser_once):
            context = command.make_context(program[-1], list(words), parent=context)
    except (click.ClickException, InvalidRequest, click.exceptions.Exit) as error:
        said = error.format_message() if isinstance(error, click.ClickException) else str(error)
        raise Refused(said) from None
    return values_in(command, context)


@cache
def _found(program: tuple[str, ...]) -> tuple[Any, Any]:
    """A command, and the context of the groups above it."""
    command: Any = specsot()
    context: Any = command.make_context("specsot", list(program))
    for name in program[:-1]:
        command = command.get_command(context, name)
        context = command.make_context(name, list(program[1:]), parent=context)
    return command.get_command(context, program[-1]), context


def _parser_once(self: TableCommand[Any], context: click.Context) -> Any:
    """A command's options are the same whatever is typed, which a record does thousands of times."""
    if self not in PARSERS:
        PARSERS[self] = PARSER(self, context)
    PARSERS[self].ctx = context
    return PARSERS[self]


def _parse_service(name: str, words: Sequence[str]) -> dict[str, Any]:
    def stop(command: TableCommand[Any], context: Any) -> Any:
        raise _Parsed(values_in(command, context))

    said = io.StringIO()
    with (
        patch.object(TableCommand, "invoke", stop),
        patch.object(TableCommand, "__init__", _built_once),
        redirect_stderr(said),
    ):
        try:
            _service(name)(list(words))
        except _Parsed as parsed:
            return parsed.args[0]
        except SystemExit:
            raise Refused(said.getvalue()) from None
    raise AssertionError("flags were not read")


def _built_once(self: TableCommand[Any], name: str, settings: type, *others: Any, **how: Any) -> None:
    """The options of a service are the same whatever is typed, which a record does hundreds of times."""
    if settings not in BUILT:
        BUILD(self, name, settings, *others, **how)
        BUILT[settings] = vars(self) | {"params": [*self.params]}
    vars(self).update(BUILT[settings], params=[*BUILT[settings]["params"]])


def values_in(command: TableCommand[Any], context: Any) -> dict[str, Any]:
    """Of every flag and argument; its default where nothing is given."""
    given = command.values(context)
    shown = [one for one in command.entries if not (one.option.secret or one.option.keyword_only)]
    found = {one.flag: given.get(one.flag, one.default) for one in shown}
    words = {one.flag: one for one in shown if one.switch and one.option.words[1] not in SWITCHED}
    return found | {flag: one.kind.write(found[flag]) for flag, one in words.items()}


def _service(name: str) -> Any:
    from specsot_drafter.config import read_config as drafter
    from specsot_master.config import read_config as master
    from specsot_worker.config import read_config as worker

    return {"master": master, "worker": worker, "drafter": drafter}[name]


def _commands(words: tuple[str, ...]) -> list[str]:
    command: Any = specsot()
    for word in words:
        command = command.get_command(click.Context(command), word)
    return command.list_commands(click.Context(command))


def services_started(words: Sequence[str], folder: Path) -> Any:
    """What a command line starts, as lines; or what it is refused with. folder: of its sockets."""
    from specsot_app.fleet.processes import ProcessFleet
    from specsot_app.fleet.service_specs import PRIVATE, command_of, services_of

    async def stop(
        options: Any, models: Any, port: Any = None, tell: Any = None, http: Any = None,
        serving: Any = PRIVATE, **others: Any,
    ) -> Any:  # fmt: skip
        raise _Started(services_of(options, models, port or 50050, folder, http, serving))

    said = io.StringIO()
    with (
        environment({"OMP_NUM_THREADS": "1", "SPECSOT_DEMO": "small"}),
        patch.object(ProcessFleet, "start", stop),
        patch("specsot_app.commands.serve.http_port_of", lambda asked: asked or 8000),
        # Another test may use the port meanwhile; nothing listens here.
        patch("specsot.transport.grpc_server.check_free", lambda address: None),
        patch("specsot_app.fleet.options.local_hosts", lambda hosts: frozenset(hosts) & HERE),
        redirect_stderr(said),
    ):
        try:
            main(words)
        except _Started as started:
            services = started.args[0]
        else:
            return said.getvalue().strip()
    here = str(Path(__file__).resolve().parents[2])
    lines: dict[str, Any] = {}
    for one in services:
        variables = " ".join(f"{name}={value}" for name, value in one.environment)
        typed = command_of(replace(one, arguments=in_order(one.arguments)))
        typed = typed.replace(str(folder), "FOLDER").replace(f"{here}/", "")
        place = f"at {one.address.replace(str(folder), 'FOLDER')}" + (f" on {one.host}" if one.host else "")
        lines[one.name] = {"default": place, "grace": one.grace, "typed": typed, "variables": variables}
    return lines


def in_order(arguments: Sequence[str]) -> tuple[str, ...]:
    """Flags with their values, by the alphabet."""
    return tuple(word for pair in sorted(zip(arguments[::2], arguments[1::2])) for word in pair)


def registries() -> dict[str, Any]:
    """The metrics of each member's process, in an epoch."""
    from specsot.core.pages import PageTable
    from specsot.members import Configuration, Range, Stage
    from specsot.service.telemetry import Observation, registry_of
    from specsot_drafter.telemetry import DrafterTelemetry
    from specsot_worker.telemetry import WorkerTelemetry

    epoch = Configuration(1, "w0", (Stage("w0", "127.0.0.1:1", Range(0, 8)),), 16, 256, 25)
    worker, drafter = registry_of("worker"), registry_of("drafter")
    stage: Any = SimpleNamespace(table=PageTable(16, 256), uncaptured=0)
    WorkerTelemetry(Observation(worker), every=16).formed(epoch, stage)
    DrafterTelemetry(Observation(drafter)).formed(epoch, lambda: 16)
    return {"worker": worker, "drafter": drafter}


def fleet_options() -> dict[str, Any]:
    """What `SpecSoT.from_pretrained` takes, with what stands where nothing is said."""
    from specsot_app.api import OF_PYTHON
    from specsot_app.fleet.options import FleetOptions

    entries = entries_of(FleetOptions, OF_PYTHON)
    return dict(sorted((one.keyword, plain(one.default)) for one in entries))


def ask_options() -> tuple[str, ...]:
    """What `SpecSoT.generate` takes."""
    from specsot_app.core.ask import OPTIONS

    return OPTIONS


def ask_of(options: Mapping[str, Any]) -> Any:
    """What `SpecSoT.generate` makes of them."""
    from specsot_app.core.ask import ask_of

    return ask_of("What is it?", **options)


def aliases() -> tuple[str, ...]:
    """Other systems' names of options of Python calls."""
    from specsot_app.api import IGNORED, OTHER_NAMES

    return (*OTHER_NAMES, *IGNORED)


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    from specsot_app.api import translate

    return translate(options)


def answer_classes() -> tuple[type, ...]:
    """What Python calls return."""
    from specsot_app.core.ask import Answer, Branch

    return Answer, Branch


def sources() -> list[Path]:
    """The product's own files, without the stubs."""
    import specsot
    import specsot_app
    import specsot_bench
    import specsot_compat
    import specsot_drafter
    import specsot_kernels
    import specsot_master
    import specsot_model
    import specsot_worker

    services = (specsot_master, specsot_worker, specsot_drafter)
    packages = (
        specsot,
        specsot_kernels,
        specsot_model,
        *services,
        specsot_app,
        specsot_bench,
        specsot_compat,
    )
    files = (file for one in packages for file in Path(str(one.__file__)).parent.rglob("*.py"))
    return sorted(file for file in files if not file.stem.endswith(("_pb2", "_pb2_grpc")))


def descriptors() -> list[Any]:
    """The protos that are served."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    from specsot.v1 import fleet_pb2, master_pb2, models_pb2, ring_pb2, values_pb2

    files = [FileDescriptorProto() for _ in range(5)]
    for file, stub in zip(files, (fleet_pb2, master_pb2, models_pb2, ring_pb2, values_pb2)):
        stub.DESCRIPTOR.CopyToProto(file)
    return files


def order_message(order: Any) -> Any:
    """An order to the ring as it travels."""
    from specsot.transport.wire.members import encode_downward

    response = encode_downward(order)
    return getattr(response, str(response.WhichOneof("message")))


def event_message(numbered: Any) -> Any:
    """An event for a client as it travels."""
    from specsot.transport.wire.events import encode_event

    return encode_event(numbered)


async def open_kept(folder: Path, model: str) -> list[Any]:
    """What a journal holds; the folder stays as it is."""
    import shutil
    import tempfile

    from specsot_master.journal import open_journal

    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        journal = open_journal(Path(place), model)
        kept = list(journal.kept)
        await journal.close()
    return kept


def carried(message: Any) -> list[bytes]:
    """A message of the ring, in the parts it travels in."""
    from specsot.transport.wire.carry import encode_carry

    return [part.SerializeToString(deterministic=True) for part in encode_carry(message)]


def writers() -> dict[str, Any]:
    """From values to bytes, by kind of message."""
    from specsot.transport.wire.events import INFO, encode_ask, encode_event
    from specsot.transport.wire.members import encode_downward, encode_upward

    def single(encode: Any) -> Any:
        return lambda value: [encode(value).SerializeToString(deterministic=True)]

    one = {
        "up": encode_upward,
        "down": encode_downward,
        "event": encode_event,
        "ask": encode_ask,
        "info": INFO.encode,
    }
    return {"carry": carried, **{kind: single(encode) for kind, encode in one.items()}}


def readers() -> dict[str, Any]:
    """From bytes to bytes, by kind of message: read as a value, and written again."""
    from specsot.transport.wire.carry import CarryReader
    from specsot.transport.wire.events import INFO, decode_ask, decode_event
    from specsot.transport.wire.members import decode_downward, decode_upward
    from specsot.transport.wire.schema import parse
    from specsot.v1 import fleet_pb2, master_pb2, ring_pb2

    write = writers()

    def carry(parts: list[bytes]) -> list[bytes]:
        reader = CarryReader()
        *_, last = [reader.read(parse(ring_pb2.CarryRequest, part)) for part in parts]
        return write["carry"](last)

    def single(name: str, kind: Any, decode: Any) -> Any:
        return lambda parts: write[name](decode(parse(kind, *parts)))

    kinds = {
        "up": (fleet_pb2.JoinRequest, decode_upward),
        "down": (fleet_pb2.JoinResponse, decode_downward),
        "event": (master_pb2.GenerateEvent, decode_event),
        "ask": (master_pb2.GenerateRequest, decode_ask),
        "info": (master_pb2.GetInfoResponse, INFO.decode),
    }
    return {"carry": carry, **{name: single(name, *rest) for name, rest in kinds.items()}}


def generate(master: Any, ask: Any, request: str, client: str = "", owner: str = "") -> Any:
    """Events of one request at a master's conductor."""
    from specsot_master.engine import Caller

    return master.generate(ask, Caller(request, client, owner=owner))


def resume(master: Any, request: str, offset: int, owner: str = "") -> Any:
    """The rest of them."""
    from specsot_master.engine import Caller

    return master.generate(None, Caller(request, owner=owner), offset)
