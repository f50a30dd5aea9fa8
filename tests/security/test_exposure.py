"""Which addresses a service may listen on: loopback always, others with TLS files or --insecure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from specsot.transport.grpc_channel import Terms
from specsot.transport.grpc_server import open_server
from specsot.transport.security import Tls, Tokens, exposed
from specsot_drafter.config import read_config as read_drafter
from specsot_master.config import read_config as read_master
from specsot_worker.config import read_config as read_worker

MASTER = ("--model", "m")
MEMBER = ("--model", "m", "--draft-model", "d")
PAPERS = ("--tls-cert", "c", "--tls-key", "k")
OUT = "0.0.0.0:50050"


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.8.9.10:1", "[::1]:1", "localhost:1", "LOCALHOST:0", "unix:/run/ring"]
)
def test_addresses_of_this_machine_alone(address: str) -> None:
    assert not exposed(address)


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:1", "[::]:1", ":1", "10.0.0.7:1", "128.0.0.1:1", "127.1:1", "127.0.0.1.example:1", "master:1"],
)
def test_addresses_that_others_may_reach(address: str) -> None:
    assert exposed(address)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0", "unix:/run/ring", "nowhere"])
def test_loopback_needs_nothing(address: str) -> None:
    setting = read_master([*MASTER, "--listen", address]).service
    assert (setting.listen, setting.insecure, setting.tls.paths) == (address, False, ())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--listen", OUT), f"--listen {OUT} is open to other machines: give --tls-cert, --tls-key and"),
        (("--listen", OUT, *PAPERS), f"--listen {OUT} is open to other machines"),
        (("--http", "0.0.0.0:8000"), "--http 0.0.0.0:8000 is open to other machines"),
        (("--fleet-listen", OUT, *PAPERS), f"--fleet-listen {OUT} is open to other machines"),
        (("--tls-cert", "c"), "--tls-cert needs --tls-key"),
        (("--tls-key", "k"), "--tls-key needs --tls-cert"),
        (("--tls-ca", "a", "--fleet-listen", OUT), "--tls-ca needs --tls-cert and --tls-key"),
        (("--tls-ca", "a", *PAPERS), "--tls-ca is for members: give members an endpoint of their own"),
    ],
)
def test_a_master_says_what_is_missing(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(read_master, (*MASTER, *arguments), line, capsys)


def test_tokens_and_members_do_not_share_an_endpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSOT_TOKEN", "secret")
    refused(read_master, MASTER, "tokens are for clients: give members an endpoint of their own", capsys)
    monkeypatch.delenv("SPECSOT_TOKEN")
    (tmp_path / "tokens").write_text("\n")
    told = ("--token-file", str(tmp_path / "tokens"))
    refused(read_master, (*MASTER, *told), "tokens: it has no token", capsys)


@pytest.mark.parametrize("read", [read_worker, read_drafter])
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--listen", OUT),
            f"--listen {OUT} is open to other machines: give --tls-cert, --tls-key and --tls-ca",
        ),
        (
            ("--listen", OUT, *PAPERS),
            "--tls-cert, --tls-key and --tls-ca must be given together, because members verify each other",
        ),
        (
            ("--tls-ca", "a"),
            "--tls-cert, --tls-key and --tls-ca must be given together, because members verify each other",
        ),
    ],
)
def test_a_member_says_what_is_missing(
    read: Callable[..., Any], arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = MEMBER if read is read_drafter else MASTER
    refused(read, (*given, *arguments), line, capsys)


def refused(
    read: Callable[..., Any], arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read(list(arguments))
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert line in said
    assert said.count("\n") == 1
    assert "secret" not in said


def test_papers_open_every_endpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECSOT_TOKEN", "secret")
    endpoints = ("--listen", OUT, "--http", "0.0.0.0:8000", "--fleet-listen", "0.0.0.0:50060")
    whole = (*MASTER, *endpoints, *PAPERS, "--tls-ca", "a")
    refused(read_master, (*whole, "--client-tls", "off"), f"--listen {OUT} is open", capsys)
    config = read_master([*whole])
    assert config.service.tls.mutual
    assert config.tokens() is not None
    assert "secret" not in repr(config)
    assert read_worker([*MASTER, "--listen", OUT, *PAPERS, "--tls-ca", "a"]).service.tls.mutual


@pytest.mark.parametrize("word", [["--insecure"], ["--insecure", "on"]])
def test_or_one_word(word: list[str]) -> None:
    assert read_master([*MASTER, "--listen", OUT, *word]).service.insecure
    assert read_worker([*MASTER, *word, "--listen", OUT]).service.insecure
    assert read_drafter([*MEMBER, *word, "--listen", OUT]).service.insecure


def test_or_one_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SPECSOT_INSECURE", "on")
    assert read_worker([*MASTER, "--listen", OUT]).service.insecure
    refused(read_worker, (*MASTER, "--listen", OUT, "--insecure", "off"), "is open to other machines", capsys)


@pytest.mark.parametrize(
    ("terms", "reflects"),
    [
        (Terms(), True),
        (Terms(reflection=False), False),
        (Terms(tokens=Tokens(token="t")), False),
        (Terms(tls=Tls(Path("ca"), Path("cert"), Path("key"))), False),
        (Terms(tls=Tls(None, Path("cert"), Path("key"))), True),
        (Terms(tokens=Tokens(token="t"), reflection=True), True),
    ],
)
def test_reflection_is_off_if_clients_must_authenticate_unless_enabled(terms: Terms, reflects: bool) -> None:
    """Where they must show who they are; unless somebody said so."""
    assert terms.reflects is reflects


@pytest.mark.parametrize(("terms", "warned"), [(Terms(), 1), (Terms(tokens=Tokens(token="t")), 0)])
async def test_an_endpoint_that_lets_everybody_in_says_so(terms: Terms, warned: int) -> None:
    """Once, when it opens."""
    with capture_logs() as said:
        endpoint = await open_server("0.0.0.0:0", {}, terms)
    await endpoint.close(0)
    assert [one["log_level"] for one in said] == ["warning"] * warned
