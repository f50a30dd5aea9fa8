"""Lets a second machine join a shared fleet: it presents a code and gets a certificate from the fleet's
authority.

The protocol, JSON lines over TLS (">" from the first machine's join server, "<" from the joining machine):

    > {"specsot": version, "ca": PEM}                read first without trust and compared with the code; then
                                                     again on a connection that is verified with this CA
    < {"secret": ..., "request": PEM}                the certificate request's key never leaves the machine
    > {"certificate": PEM, "master": ..., "flags": [...]}  or {"refused": why}
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import ssl
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from specsot._version import __version__
from specsot.errors import InvalidRequest, Refused, SpecsotError, Unavailable
from specsot.transport.grpc_server import reason
from specsot.transport.security import Tls, context_of

# Bytes of the SHA-256 of the CA's certificate in a code: too many to find another certificate that begins the
# same.
PINNED = 16
# Days that certificates are valid. Precedent: docker/certificates.sh.
AUTHORITY_DAYS = 3650
MEMBER_DAYS = 365
HERE = (x509.DNSName("localhost"), *(x509.IPAddress(ip_address(own)) for own in ("127.0.0.1", "::1")))
USES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])


class Authority:
    """A certificate authority that signs members' certificates. Its key stays in its folder."""

    def __init__(self, folder: Path) -> None:
        """Open the authority in the folder, or create it there. Raises InvalidRequest, OSError."""
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / "ca.key").exists():
            self._make()
        try:
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
            self._key = cast("ec.EllipticCurvePrivateKey", key)
            self._certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        except (ValueError, TypeError, OSError) as error:
            raise InvalidRequest(f"{folder}: no CA that signs ({error})", field="certificates") from None

    @property
    def pem(self) -> str:
        """Return the CA's certificate."""
        return (self._folder / "ca.pem").read_text()

    def write(self, role: str) -> None:
        """Write key and certificate of one of this machine's roles."""
        key = write_key(self._folder / role)
        write_identity(self._folder / role, self.sign(request_of(key), role), self.pem)

    def sign(self, request: str, role: str) -> str:
        """Return a certificate for `role`, whatever name the request has. Raises InvalidRequest."""
        try:
            asked = x509.load_pem_x509_csr(request.encode())
        except ValueError:
            asked = None
        if asked is None or not asked.is_signature_valid:
            raise InvalidRequest("what asks for a certificate is not a request for one", field="request")
        names = x509.SubjectAlternativeName([x509.DNSName(role), *HERE])
        made = _begun(role, self._certificate.subject, MEMBER_DAYS).public_key(asked.public_key())
        made = made.add_extension(names, critical=False).add_extension(USES, critical=False)
        made = made.add_extension(x509.BasicConstraints(False, None), critical=True)
        made = made.add_extension(_usage(signs=False), critical=True)
        own = x509.SubjectKeyIdentifier.from_public_key(self._certificate.public_key())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)
        signed = made.add_extension(issuer, critical=False).sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM).decode()

    def _make(self) -> None:
        """Create key and certificate of the authority."""
        key = write_key(self._folder, "ca.key")
        name = _named("SpecSoT fleet")
        made = _begun("SpecSoT fleet", name, AUTHORITY_DAYS).public_key(key.public_key())
        made = made.add_extension(x509.BasicConstraints(True, 0), critical=True)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        made = made.add_extension(_usage(signs=True), critical=True).add_extension(own, critical=False)
        signed = made.sign(key, hashes.SHA256())
        (self._folder / "ca.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def pin(ca: str) -> bytes:
    """Return the first PINNED bytes of the SHA-256 of a CA's certificate. Raises ValueError."""
    held = x509.load_pem_x509_certificate(ca.encode())
    return hashlib.sha256(held.public_bytes(serialization.Encoding.DER)).digest()[:PINNED]


def write_key(folder: Path, name: str = "own.key") -> ec.EllipticCurvePrivateKey:
    """Write a new key that only this user can read, and return it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / name).unlink(missing_ok=True)
    with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(*form))
    return key


def request_of(key: ec.EllipticCurvePrivateKey) -> str:
    """Return a certificate request for this key; the key itself is not in it."""
    made = x509.CertificateSigningRequestBuilder().subject_name(_named("member")).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


def write_identity(folder: Path, certificate: str, ca: str) -> None:
    """Write a certificate and its CA."""
    (folder / "own.pem").write_text(certificate)
    (folder / "ca.pem").write_text(ca)


def holds(folder: Path, now: datetime) -> bool:
    """Return whether the folder has a certificate that is valid for at least another day."""
    try:
        held = x509.load_pem_x509_certificate((folder / "own.pem").read_bytes())
    except (OSError, ValueError):
        return False
    return held.not_valid_after_utc > now + timedelta(days=1)


def _begun(name: str, issuer: x509.Name, days: int) -> x509.CertificateBuilder:
    """Return a certificate builder with names, serial number and validity."""
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(_named(name)).issuer_name(issuer)
    made = made.serial_number(x509.random_serial_number())
    # Validity begins an hour ago, since the clocks of two machines differ.
    return made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=days))


def _named(name: str) -> x509.Name:
    """Return an X.509 name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(signs: bool) -> x509.KeyUsage:
    """Return the key usage of a certificate that signs others, or of one that identifies a service."""
    return x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)


# Random bytes of a code's secret: 88 bits, of which one connection can try one value.
SECRET = 11


@dataclass(frozen=True, slots=True)
class JoinCode:
    """What a machine needs to join.

    address: the first machine's join server.
    authority: the beginning of the SHA-256 of its CA's certificate.
    secret: valid for one machine.
    """

    address: str
    authority: bytes
    secret: bytes

    def __str__(self) -> str:
        return f"{self.address}/{urlsafe_b64encode(self.authority + self.secret).decode()}"


def parse_code(written: str) -> JoinCode:
    """Read a code as it was printed. Raises InvalidRequest."""
    address, _, told = written.strip().rpartition("/")
    try:
        held = urlsafe_b64decode(told)
    except (binascii.Error, ValueError):
        held = b""
    if len(held) != PINNED + SECRET or not address.rpartition(":")[2].isdecimal():
        raise InvalidRequest(
            "this is not a whole code: copy all of what `specsot serve --share` printed", "code"
        )
    return JoinCode(address, held[:PINNED], held[PINNED:])


# Role of the join server's certificate; no member has this role.
DOOR = "join"
# Port of the join server, next to the members' 50060.
PORT = 50059
# Seconds. Limits a whole exchange with one machine, and connecting to the join server. Untuned.
PATIENCE = 15.0
# Bytes. Longest line of the protocol.
LONGEST = 1 << 16
# Connections. Most that the join server handles at a time. Untuned.
MOST = 16
# Flags that all workers of a ring share. Their values are plain words, so that no value can name a file.
SHARED = ("--dtype", "--quantization", "--kv-cache-dtype", "--batch-invariant")

# Called with a line for the user.
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class JoinedFleet:
    """What a machine that joined knows.

    master: address of the master.
    own: this machine's address, as the first machine reaches it.
    flags: command-line flags that workers of the ring share.
    """

    master: str
    own: str
    flags: tuple[str, ...]


class JoinServer:
    """The join server: admits a machine that presents the current code, then draws another code.

    tell: called with a line for each machine, and with each new invitation.
    """

    def __init__(
        self, authority: Authority, address: str, master: str, flags: tuple[str, ...], tell: Tell
    ) -> None:
        self._authority = authority
        self._address = address
        self._tell = tell
        self._told = {"master": master, "flags": flags}
        self._inside = 0
        self.code = self._draw()

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection."""
        self._inside += 1
        try:
            if self._inside > MOST:
                return
            async with asyncio.timeout(PATIENCE):
                await _say(writer, {"specsot": __version__, "ca": self._authority.pem})
                asked = await _hear(reader)
                answer = self._answer(asked)
                host = writer.get_extra_info("peername")[0]
                self._tell(
                    f"{host} was {'refused: ' + answer['refused'] if 'refused' in answer else 'let in'}"
                )
                if "refused" not in answer:
                    self._tell(invitation(self.code))
                await _say(writer, answer)
        except (TimeoutError, SpecsotError, OSError):
            # The machine only read the CA, or disconnected.
            pass
        finally:
            self._inside -= 1
            writer.close()

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a machine's request: a certificate, or why it is refused."""
        shown = str(asked.get("secret", "")).encode()
        if not hmac.compare_digest(shown, b64encode(self.code.secret)):
            return {"refused": "its code was used already, or is mistyped: take the newest one"}
        try:
            certificate = self._authority.sign(str(asked.get("request", "")), "worker")
        except InvalidRequest as error:
            return {"refused": str(error)}
        # The code is used up, whether or not the answer arrives.
        self.code = self._draw()
        return {"certificate": certificate, **self._told}

    def _draw(self) -> JoinCode:
        """Return a new code."""
        return JoinCode(self._address, pin(self._authority.pem), secrets.token_bytes(SECRET))


def invitation(code: JoinCode) -> str:
    """Return the line that tells a user how to join."""
    return f"on the next machine: specsot join {code}"


@asynccontextmanager
async def open_join_server(
    folder: Path, roles: tuple[str, ...], address: str, master: str, flags: tuple[str, ...], tell: Tell
) -> AsyncGenerator[JoinServer]:
    """Run the join server within the context. Raises InvalidRequest, Unavailable.

    roles: roles of this machine, whose certificates are made anew.
    """
    authority = Authority(folder)
    for role in (DOOR, *roles):
        authority.write(role)
    endpoint = JoinServer(authority, address, master, flags, tell)
    context = context_of(Tls(cert=folder / DOOR / "own.pem", key=folder / DOOR / "own.key"))
    host, _, port = address.rpartition(":")
    try:
        server = await asyncio.start_server(
            endpoint.meet, host.strip("[]"), int(port), ssl=context, limit=LONGEST
        )
    except OSError as error:
        raise Unavailable(f"cannot listen at {address}: {reason(error)}") from None
    async with server:
        tell(invitation(endpoint.code))
        yield endpoint


async def join_fleet(written: str, folder: Path) -> tuple[JoinedFleet, Tls]:
    """Join, and keep the certificate in the folder. Raises InvalidRequest, Refused, Unavailable, each in one
    line.

    A code that this machine has already used is not presented again. Another code of the same fleet is, since
    the fleet may have another address or other flags by now.
    """
    code = parse_code(written)
    own = folder / hashlib.sha256(str(code).encode()).hexdigest()[:32]
    if not (holds(own, datetime.now(UTC)) and (own / "place.json").exists()):
        await _be_let_in(code, own)
    kept = json.loads((own / "place.json").read_text())
    tls = Tls(own / "ca.pem", own / "own.pem", own / "own.key")
    return JoinedFleet(kept["master"], kept["own"], _checked(kept["flags"])), tls


async def _be_let_in(code: JoinCode, own: Path) -> None:
    """Check the fleet's CA against the code, present the code, and write the certificate. Raises Refused,
    Unavailable.
    """
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    async with _connection(code.address, unverified) as (reader, _):
        ca = str((await _hear(reader)).get("ca", ""))
    try:
        genuine = hmac.compare_digest(pin(ca), code.authority)
    except ValueError:
        genuine = False
    if not genuine:
        raise Refused(f"who answers at {code.address} is not the fleet of this code, or the code is mistyped")
    async with _connection(code.address, ssl.create_default_context(cadata=ca)) as (reader, writer):
        theirs = (await _hear(reader)).get("specsot")
        if theirs != __version__:
            raise Refused(f"the fleet at {code.address} runs SpecSoT {theirs}, this machine {__version__}")
        key = write_key(own)
        await _say(writer, {"secret": b64encode(code.secret).decode(), "request": request_of(key)})
        told = await _hear(reader)
        if "refused" in told:
            raise Refused(f"{code.address} does not let this machine in: {told['refused']}")
        write_identity(own, str(told["certificate"]), ca)
        place = {"master": str(told["master"]), "own": writer.get_extra_info("sockname")[0]}
        (own / "place.json").write_text(json.dumps({**place, "flags": _checked(told["flags"])}))


def _checked(flags: Any) -> tuple[str, ...]:
    """Return the flags, if they are flags that workers of a ring share. Raises Refused."""
    words = [str(word) for word in flags]
    known = all(name in SHARED for name in words[::2]) and len(words) % 2 == 0
    if not known or not all(re.fullmatch(r"[a-z0-9]{1,16}", value) for value in words[1::2]):
        raise Refused(f"the fleet asks for flags that no worker of it needs: {' '.join(words)[:200]}")
    return tuple(words)


@asynccontextmanager
async def _connection(
    address: str, context: ssl.SSLContext
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a join server. Raises Unavailable: no answer, connection lost, or a certificate of another
    CA.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(
                host.strip("[]"), int(port), ssl=context, server_hostname=DOOR, limit=LONGEST
            )
            try:
                yield reader, writer
            finally:
                writer.close()
    except ssl.SSLError as error:
        raise Unavailable(f"{address} has no certificate of the fleet: {error.reason}") from None
    except (TimeoutError, OSError) as error:
        why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or "nobody answers").lower()
        raise Unavailable(f"cannot join at {address}: {why}") from None


async def _say(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message as a line of JSON."""
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _hear(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read a message. Raises Unavailable if there is no whole line of JSON."""
    try:
        heard = json.loads(await reader.readuntil(b"\n"))
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        heard = None
    if not isinstance(heard, dict):
        raise Unavailable(
            "the other machine went away before it had said all; take the newest code and try again"
        )
    return cast("dict[str, Any]", heard)


def own_address() -> str:
    """Return the address at which other machines reach this one: that of its default route. Raises
    InvalidRequest.

    Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # RFC 5737 reserves this address for documentation.
            probe.connect(("192.0.2.1", PORT))
        except OSError:
            raise InvalidRequest(
                "no address is known by which others reach this machine: give --fleet-listen HOST:50060",
                field="fleet_listen",
            ) from None
        return probe.getsockname()[0]
