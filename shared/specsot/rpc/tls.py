"""Certificates as files: whose they are, whether they are what they should be, and what is in them.

Refuses to know gRPC and HTTP; nothing heavy is imported, since configurations carry these values.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from specsot.errors import InvalidRequest
from specsot.process.option import Option
from specsot.rpc.fresh import Fresh


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. cert, key: who we are. ca: who vouches for our peers.

    A door with `cert` speaks TLS; with `ca` too, whoever comes must show a certificate of that CA.
    A channel with `ca` speaks TLS, and shows `cert` where it is asked for it.
    """

    ca: Annotated[
        Path | None,
        Option(
            "CA certificates (PEM) that vouch for the rest of the fleet.",
            flag="tls-ca",
            aliases=("ssl-ca-certs",),
            metavar="FILE",
        ),
    ] = None
    cert: Annotated[
        Path | None,
        Option(
            "Certificate of this service (PEM).", flag="tls-cert", aliases=("ssl-certfile",), metavar="FILE"
        ),
    ] = None
    key: Annotated[
        Path | None,
        Option("Its private key (PEM).", flag="tls-key", aliases=("ssl-keyfile",), metavar="FILE"),
    ] = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            given, missing = ("--tls-cert", "--tls-key") if self.cert else ("--tls-key", "--tls-cert")
            raise InvalidRequest(f"{given} needs {missing}", field="tls")

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.ca, self.cert, self.key) if path is not None)

    @property
    def mutual(self) -> bool:
        """Both sides of every connection show who they are."""
        return self.ca is not None and self.cert is not None


PLAIN = Tls()


@dataclass(frozen=True, slots=True)
class Pems:
    """What is in the files. pair: the key, and the certificate with what leads to its CA."""

    ca: bytes | None
    pair: tuple[bytes, bytes] | None


def read_pems(tls: Tls) -> Pems:
    """Raises InvalidRequest, in one line, for files that are not what they should be."""
    context_of(tls)
    pair = (_read(tls.key), _read(tls.cert)) if tls.cert and tls.key else None
    return Pems(_read(tls.ca) if tls.ca else None, pair)


def context_of(tls: Tls) -> ssl.SSLContext:
    """As Python's own servers want it. Raises InvalidRequest."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.ca is not None:
        _read(tls.ca)  # says more plainly why it cannot be
        try:
            context.load_verify_locations(tls.ca)
        except ssl.SSLError:
            raise InvalidRequest(f"{tls.ca}: no certificates in PEM", field="tls_ca") from None
    if tls.cert is not None and tls.key is not None:
        _read(tls.cert)
        _read(tls.key)
        try:
            context.load_cert_chain(tls.cert, tls.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise InvalidRequest(_complaint(tls.cert, tls.key, error), field="tls_cert") from None
    return context


def secured_context(tls: Tls) -> ssl.SSLContext | None:
    """For a server of Python's own. Changed files hold from the next handshake on. None: no TLS."""
    if tls.cert is None:
        return None
    fresh = Fresh(tls.paths, lambda: context_of(tls))

    def renew(connection: ssl.SSLObject, host: str | None, context: ssl.SSLContext) -> None:
        connection.context = fresh.value()

    first = fresh.value()
    first.sni_callback = renew
    return first


def _no_password() -> str:
    """Nobody is there to be asked for one."""
    raise ValueError("the key is encrypted")


def _complaint(cert: Path, key: Path, error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"{key} is not the key of {cert}"
    if isinstance(error, ssl.SSLError):
        return f"{cert}, {key}: not a certificate and its key in PEM"
    return f"{key}: {error}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: {(error.strerror or 'cannot be read').lower()}", field="tls") from None
