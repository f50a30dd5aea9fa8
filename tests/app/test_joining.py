"""How a second machine joins by a code: over loopback, with endpoints that are wrong in one way each."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from specsot import __version__
from specsot.errors import InvalidRequest, Refused, SpecsotError, Unavailable
from specsot.transport.security import Tls, context_of
from specsot_app.commands.join import JoinOptions, worker_service
from specsot_app.commands.serve import run_fleet
from specsot_app.core.device_map import FIRST_PORT
from specsot_app.fleet.joining import (
    JOIN_ROLE,
    Authority,
    JoinCode,
    JoinedFleet,
    JoinServer,
    join_fleet,
    open_join_server,
    parse_code,
    pin,
    request_of,
    write_key,
)
from specsot_app.fleet.options import FleetOptions, Models
from specsot_app.fleet.processes import free_port
from specsot_app.fleet.service_specs import Serving, with_join_server

FLAGS = ("--dtype", "bf16")


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The first machine's certificates."""
    return tmp_path / "first"


@pytest.fixture
def second(tmp_path: Path) -> Path:
    return tmp_path / "second"


@asynccontextmanager
async def shared(first: Path, master: str = "a:50060") -> AsyncGenerator[tuple[JoinServer, list[str]]]:
    told: list[str] = []
    async with open_join_server(
        first, (), f"127.0.0.1:{free_port()}", master, FLAGS, told.append
    ) as endpoint:
        yield endpoint, told


@asynccontextmanager
async def saying(first: Path, *words: dict[str, Any]) -> AsyncGenerator[tuple[JoinCode, list[Any]]]:
    """An endpoint that says these words, one before each line that it hears, and then hangs up."""
    authority, heard = Authority(first), list[Any]()
    authority.write(JOIN_ROLE)

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for word in words:
            writer.write(json.dumps({"ca": authority.pem, "specsot": __version__, **word}).encode() + b"\n")
            heard.append(await reader.readline())
        writer.close()

    context = context_of(Tls(cert=first / JOIN_ROLE / "own.pem", key=first / JOIN_ROLE / "own.key"))
    async with await asyncio.start_server(meet, "127.0.0.1", 0, ssl=context) as server:
        host, port = server.sockets[0].getsockname()
        yield JoinCode(f"{host}:{port}", pin(authority.pem), bytes(11)), heard


def test_a_code_is_read_as_it_was_written() -> None:
    for address in ("10.0.0.1:50059", "[fe80::1]:50059", "gw.example:1"):
        code = JoinCode(address, bytes(range(16)), b"\xff" * 11)
        assert parse_code(f" {code}\n") == code


@pytest.mark.parametrize("part", [slice(0), slice(1), slice(30), slice(-1), slice(4, None)])
def test_a_part_of_a_code_is_no_code(part: slice) -> None:
    with pytest.raises(InvalidRequest, match="the code is incomplete"):
        parse_code(str(JoinCode("a:1", bytes(16), bytes(11)))[part])


async def test_who_shows_the_code_gets_a_workers_certificate_and_nothing_more(
    first: Path, second: Path
) -> None:
    async with shared(first) as (endpoint, told):
        place, tls = await join_fleet(str(endpoint.code), second)
    assert place == JoinedFleet("a:50060", "127.0.0.1", FLAGS)
    assert tls.cert is not None
    assert tls.key is not None
    assert tls.key.stat().st_mode & 0o077 == 0
    held = x509.load_pem_x509_certificate(tls.cert.read_bytes())
    held.verify_directly_issued_by(x509.load_pem_x509_certificate((first / "ca.pem").read_bytes()))
    named = held.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert named.get_values_for_type(x509.DNSName) == ["worker", "localhost"]
    assert not held.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert "127.0.0.1 was admitted" in told


async def test_a_code_is_good_once_and_the_machine_that_used_it_needs_no_other(
    first: Path, second: Path
) -> None:
    async with shared(first) as (endpoint, told):
        code = str(endpoint.code)
        before = await join_fleet(code, second)
        with pytest.raises(Refused, match="been used already"):
            await join_fleet(code, second.parent / "third")
        assert told[0].endswith(code)
        assert told[2].endswith(str(endpoint.code))
        await join_fleet(str(endpoint.code), second.parent / "third")
    assert await join_fleet(code, second) == before, "also while the first machine is away"


async def test_a_newer_code_is_asked_about_and_leaves_the_older_one_as_it_was(
    first: Path, second: Path
) -> None:
    """The first machine may have another address by now."""
    async with shared(first) as (endpoint, _):
        before = await join_fleet(older := str(endpoint.code), second)
    async with shared(first, "b:50060") as (endpoint, _):
        with pytest.raises(Refused, match="mistyped"):
            await join_fleet(str(JoinCode(endpoint.code.address, endpoint.code.authority, bytes(11))), second)
        place, _ = await join_fleet(str(endpoint.code), second)
    assert place.master == "b:50060"
    assert await join_fleet(older, second) == before


async def test_a_wrong_code_is_refused_and_the_right_one_stays_good(first: Path, second: Path) -> None:
    async with shared(first) as (endpoint, _):
        right = endpoint.code
        with pytest.raises(Refused, match="mistyped: use the newest code"):
            await join_fleet(str(JoinCode(right.address, right.authority, bytes(11))), second)
        with pytest.raises(Refused, match="not the fleet of this code"):
            await join_fleet(str(JoinCode(right.address, bytes(16), right.secret)), second)
        await join_fleet(str(right), second)


async def test_the_secret_is_shown_only_to_the_fleet_of_the_code(first: Path, second: Path) -> None:
    other = Authority(second / "other")
    async with saying(first, {}, {}) as (code, heard):
        with pytest.raises(Refused):
            await join_fleet(str(JoinCode(code.address, pin(other.pem), code.secret)), second)
    async with saying(first, {"ca": other.pem}, {"ca": other.pem}) as (code, more):  # claims to be it
        with pytest.raises(Unavailable, match="no certificate of the fleet"):
            await join_fleet(str(JoinCode(code.address, pin(other.pem), code.secret)), second)
    assert not any(heard + more)


async def test_another_version_is_refused_in_one_line_before_the_code_is_spent(
    first: Path, second: Path
) -> None:
    async with saying(first, {"specsot": "0.0.9"}) as (code, heard):
        with pytest.raises(Refused) as refused:
            await join_fleet(str(code), second)
    assert str(refused.value) == f"the fleet at {code.address} runs SpecSoT 0.0.9, this machine {__version__}"
    assert not any(heard)


@pytest.mark.parametrize(
    "words", [(), ({},), ({}, {"certificate": 1, "master": "a:1", "flags": ["--model", "x"]})]
)
async def test_a_connection_cut_midway_leaves_no_files(
    first: Path, second: Path, words: tuple[dict[str, Any], ...]
) -> None:
    async with saying(first, *words) as (code, _):
        with pytest.raises(SpecsotError) as error:
            await join_fleet(str(code), second)
    assert "\n" not in str(error.value)
    async with shared(first) as (endpoint, _):
        place, _ = await join_fleet(str(endpoint.code), second)
    assert place.flags == FLAGS


def test_what_a_request_calls_itself_does_not_matter(first: Path) -> None:
    authority = Authority(first)
    with pytest.raises(InvalidRequest):
        authority.sign("not a request", "worker")
    signed = x509.load_pem_x509_certificate(
        authority.sign(request_of(write_key(first / "x")), "worker").encode()
    )
    assert signed.subject.rfc4514_string() == "CN=worker"


def test_the_worker_that_joins_has_a_command_line_that_workers_understand(tmp_path: Path) -> None:
    from specsot_worker.config import read_config

    tls = Tls(tmp_path / "ca", tmp_path / "cert", tmp_path / "key")
    joined = worker_service(
        JoinOptions("code", kv_memory=1 << 20), JoinedFleet("a:50060", "127.0.0.1", FLAGS), tls
    )
    config = read_config(joined.arguments)
    assert (config.model.model, config.model.dtype, config.model.kv_memory) == (None, "bf16", 1 << 20)
    assert (config.member.master, config.service.listen, config.service.tls) == (
        "a:50060",
        joined.address,
        tls,
    )


def test_on_the_first_machine_a_port_is_taken_that_its_members_do_not_want(tmp_path: Path) -> None:
    tls = Tls(tmp_path / "ca", tmp_path / "cert", tmp_path / "key")
    place = JoinedFleet("127.0.0.1:50060", "127.0.0.1", FLAGS)
    port = int(worker_service(JoinOptions("code"), place, tls).address.rpartition(":")[2])
    assert port != FIRST_PORT  # which is free here, but not for long


async def test_no_invitation_is_shown_if_a_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"cannot listen at 127.0.0.1:{port}: address already in use"):
            await run_fleet(FleetOptions(), Models(Path(), None), port, None, Serving(joining=1))


async def test_a_second_endpoint_at_the_same_place_is_refused_in_words(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"cannot listen at {place}: address already in use"):
            async with open_join_server(tmp_path, (), place, "a:50060", FLAGS, print):
                pass


def test_one_stage_is_left_to_those_who_join() -> None:
    found = with_join_server(Serving(), None, "cpu", "10.0.0.1:50060")
    assert (len(found.places), found.joining, found.private, found.fleet) == (1, 1, True, "10.0.0.1:50060")
    assert with_join_server(Serving(), 4, "cpu", "10.0.0.1:1").joining == 3
    with pytest.raises(InvalidRequest, match="fewer of them than --stages"):
        with_join_server(Serving(), 1, "cpu", "10.0.0.1:1")
