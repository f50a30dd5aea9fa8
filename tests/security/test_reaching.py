"""What clients show, and what they keep to themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from specsot import SpecSoT
from specsot.errors import InvalidRequest
from specsot.service.command import TableCommand, parsed
from specsot.transport.grpc_client import connect
from specsot.transport.security import Tls
from specsot_app.fleet.demo import small_pair
from specsot_app.fleet.options import ClientOptions, FleetOptions, Models
from specsot_app.fleet.service_specs import services_of
from tests.security.tls_files import Authority


@pytest.mark.parametrize("address", ["10.0.0.7:1", "fleet.example:1", "fleet.example", "0.0.0.0:1"])
async def test_a_token_does_not_leave_the_machine_in_the_clear(address: str) -> None:
    with pytest.raises(
        InvalidRequest, match=f"the token would be sent to {address} unencrypted: give --tls-ca"
    ):
        await connect(address, token="secret")


async def test_where_a_token_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")

    def options(**variables: str) -> ClientOptions:
        with patch.dict("os.environ", variables):
            return parsed(TableCommand("x", ClientOptions, lambda given: given, ""), "x", [])

    shown: list[str | None] = []

    async def connect(master: str, tls: Tls, token: str | None) -> None:
        shown.append(token)

    with patch("specsot.transport.grpc_client.connect", connect):
        for given in (
            options(),
            options(SPECSOT_TOKEN=""),
            options(SPECSOT_TOKEN=" from-variable\n"),
            replace(options(SPECSOT_TOKEN="from-variable"), token_file=file),
        ):
            await given.connect("x:1")
        assert shown == [None, None, "from-variable", "from-file"]
        with pytest.raises(InvalidRequest, match="nowhere: no such file"):
            await ClientOptions(token_file=tmp_path / "nowhere").connect("x:1")


def test_a_token_does_not_appear_in_a_repr() -> None:
    with SpecSoT.connect("gw:1", token="secret") as model:
        assert "secret" not in repr(model._options)


def test_a_fleet_within_the_machine_is_not_given_what_the_client_has(tmp_path: Path) -> None:
    """Its services would ask for tokens, or for certificates nobody in it has."""
    wanted = FleetOptions(kind="processes", drafter="ngram")
    for service in services_of(wanted, Models(small_pair() / "base", None, drafter="ngram"), 50050, tmp_path):
        given = dict(service.environment)
        tls_files = ("TOKEN", "TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY")
        assert [given[f"SPECSOT_{name}"] for name in tls_files] == [""] * len(tls_files), service.name


async def test_bad_certificates_are_one_line(authority: Authority) -> None:
    authority.file.write_text("nonsense")
    with pytest.raises(InvalidRequest, match=r"ca\.pem: no certificates in PEM") as caught:
        await connect("127.0.0.1:1", tls=authority.known)
    assert "\n" not in str(caught.value)
