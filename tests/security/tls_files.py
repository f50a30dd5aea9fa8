"""Certificates and tokens made on the spot, as files, the way services are given them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import trustme

from specsot.transport.security import Tls

HERE = ("localhost", "127.0.0.1")
LONG_AGO = datetime(2001, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Authority:
    """Who vouches: a CA of its own, in a folder of its own."""

    ca: trustme.CA
    folder: Path

    @classmethod
    def at(cls, folder: Path) -> Authority:
        folder.mkdir(parents=True)
        one = cls(trustme.CA(), folder)
        one.ca.cert_pem.write_to_path(one.file)
        return one

    @property
    def file(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def known(self) -> Tls:
        """What a client needs."""
        return Tls(self.file)

    def issue(self, *names: str, into: str | None = None, expired: bool = False) -> Tls:
        """A certificate for these names and this machine. into: its files' name."""
        dates = {"not_before": LONG_AGO, "not_after": LONG_AGO.replace(year=2002)} if expired else {}
        made = self.ca.issue_cert(*names, *HERE, **dates)
        stem = into or "-".join(names)
        tls = Tls(self.file, self.folder / f"{stem}.pem", self.folder / f"{stem}.key")
        assert tls.cert is not None and tls.key is not None  # noqa: PT018
        chain = b"".join(pem.bytes() for pem in made.cert_chain_pems)
        tls.key.write_bytes(made.private_key_pem.bytes())
        tls.cert.write_bytes(chain)
        return tls


def shown(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call."""
    return (("authorization", f"Bearer {token}"),)
