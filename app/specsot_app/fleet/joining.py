"""How a second machine joins a shared fleet: it shows a code, and gets a certificate
that the fleet's own authority signs.

door > {"specsot": version, "ca": PEM}               read first without trust, and compared with the code;
                                                     then again in a connection that this CA vouches for
door < {"secret": ..., "request": PEM}               the key of the request never leaves its machine
door > {"certificate": PEM, "master": ..., "flags": [...]}  or {"refused": why}
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

PINNED = 16  # bytes of the SHA-256 of the CA's certificate: nobody finds another one that begins so
# as docker/certificates.sh has it
AUTHORITY_DAYS = 3650
MEMBER_DAYS = 365
HERE = (x509.DNSName("localhost"), *(x509.IPAddress(ip_address(own)) for own in ("127.0.0.1", "::1")))
USES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])


class Authority:
    """Signs for members. Its key stays in its folder."""

    def __init__(self, folder: Path) -> None:
        """Made at its first use. Raises InvalidRequest, OSError."""
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
        return (self._folder / "ca.pem").read_text()

    def write(self, role: str) -> None:
        key = write_key(self._folder / role)
        write_identity(self._folder / role, self.sign(request_of(key), role), self.pem)

    def sign(self, request: str, role: str) -> str:
        """Whatever the request says it is, the certificate is for this role. Raises InvalidRequest."""
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
        key = write_key(self._folder, "ca.key")
        name = _named("SpecSoT fleet")
        made = _begun("SpecSoT fleet", name, AUTHORITY_DAYS).public_key(key.public_key())
        made = made.add_extension(x509.BasicConstraints(True, 0), critical=True)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        made = made.add_extension(_usage(signs=True), critical=True).add_extension(own, critical=False)
        signed = made.sign(key, hashes.SHA256())
        (self._folder / "ca.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def pin(ca: str) -> bytes:
    """How the SHA-256 of a CA's certificate begins. Raises ValueError."""
    held = x509.load_pem_x509_certificate(ca.encode())
    return hashlib.sha256(held.public_bytes(serialization.Encoding.DER)).digest()[:PINNED]


def write_key(folder: Path, name: str = "own.key") -> ec.EllipticCurvePrivateKey:
    """A new one; nobody else on this machine may read it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / name).unlink(missing_ok=True)
    with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(*form))
    return key


def request_of(key: ec.EllipticCurvePrivateKey) -> str:
    """Asks for a certificate for this key, which stays where it is."""
    made = x509.CertificateSigningRequestBuilder().subject_name(_named("member")).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


def write_identity(folder: Path, certificate: str, ca: str) -> None:
    (folder / "own.pem").write_text(certificate)
    (folder / "ca.pem").write_text(ca)


def holds(folder: Path, now: datetime) -> bool:
    """There is a certificate that does not end within a day."""
    try:
        held = x509.load_pem_x509_certificate((folder / "own.pem").read_bytes())
    except (OSError, ValueError):
        return False
    return held.not_valid_after_utc > now + timedelta(days=1)


def _begun(name: str, issuer: x509.Name, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(_named(name)).issuer_name(issuer)
    made = made.serial_number(x509.random_serial_number())
    # Clocks of two machines differ.
    return made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=days))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)


SECRET = 11  # bytes, drawn at random: 88 bits, asked for one at a time


@dataclass(frozen=True, slots=True)
class JoinCode:
    """address: where the first machine lets others in. authority: how the hash of its CA begins."""

    address: str
    authority: bytes
    secret: bytes

    def __str__(self) -> str:
        return f"{self.address}/{urlsafe_b64encode(self.authority + self.secret).decode()}"


def parse_code(written: str) -> JoinCode:
    """Raises InvalidRequest."""
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


DOOR = "join"  # the role of its certificate: no member has it
PORT = 50059  # of the door, beside the members' 50060
PATIENCE = 15.0  # seconds for all that one machine says, and to reach the door; not measured
LONGEST = 1 << 16  # bytes of a line
MOST = 16  # machines at the door at once; not measured
# What workers of one ring have in common. Values are words, so nothing here can name a file.
SHARED = ("--dtype", "--quantization", "--kv-cache-dtype", "--batch-invariant")

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class JoinedFleet:
    """What a machine that joined knows. own: this machine's address, as the first one sees it."""

    master: str
    own: str
    flags: tuple[str, ...]


class JoinDoor:
    """Lets in who shows the code of this moment; then there is another one. tell: hears of both."""

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
            pass  # it looked at the CA, or went away
        finally:
            self._inside -= 1
            writer.close()

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        shown = str(asked.get("secret", "")).encode()
        if not hmac.compare_digest(shown, b64encode(self.code.secret)):
            return {"refused": "its code was used already, or is mistyped: take the newest one"}
        try:
            certificate = self._authority.sign(str(asked.get("request", "")), "worker")
        except InvalidRequest as error:
            return {"refused": str(error)}
        self.code = self._draw()  # spent, whether or not the answer arrives
        return {"certificate": certificate, **self._told}

    def _draw(self) -> JoinCode:
        return JoinCode(self._address, pin(self._authority.pem), secrets.token_bytes(SECRET))


def invitation(code: JoinCode) -> str:
    return f"on the next machine: specsot join {code}"


@asynccontextmanager
async def open_door(
    folder: Path, roles: tuple[str, ...], address: str, master: str, flags: tuple[str, ...], tell: Tell
) -> AsyncGenerator[JoinDoor]:
    """roles: of this machine; their certificates are made anew. Raises InvalidRequest, Unavailable."""
    authority = Authority(folder)
    for role in (DOOR, *roles):
        authority.write(role)
    door = JoinDoor(authority, address, master, flags, tell)
    context = context_of(Tls(cert=folder / DOOR / "own.pem", key=folder / DOOR / "own.key"))
    host, _, port = address.rpartition(":")
    try:
        server = await asyncio.start_server(
            door.meet, host.strip("[]"), int(port), ssl=context, limit=LONGEST
        )
    except OSError as error:
        raise Unavailable(f"cannot listen at {address}: {reason(error)}") from None
    async with server:
        tell(invitation(door.code))
        yield door


async def join_fleet(written: str, folder: Path) -> tuple[JoinedFleet, Tls]:
    """Be let in, and keep the certificate in the folder. A code that this machine has used already is not
    asked about again; another one of the same fleet is, which may be elsewhere by now, or have other flags.
    Raises InvalidRequest, Refused, Unavailable: in one line, whatever is wrong.
    """
    code = parse_code(written)
    own = folder / hashlib.sha256(str(code).encode()).hexdigest()[:32]
    if not (holds(own, datetime.now(UTC)) and (own / "place.json").exists()):
        await _be_let_in(code, own)
    kept = json.loads((own / "place.json").read_text())
    tls = Tls(own / "ca.pem", own / "own.pem", own / "own.key")
    return JoinedFleet(kept["master"], kept["own"], _checked(kept["flags"])), tls


async def _be_let_in(code: JoinCode, own: Path) -> None:
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
    """Only what workers of a ring have in common. Raises Refused."""
    words = [str(word) for word in flags]
    known = all(name in SHARED for name in words[::2]) and len(words) % 2 == 0
    if not known or not all(re.fullmatch(r"[a-z0-9]{1,16}", value) for value in words[1::2]):
        raise Refused(f"the fleet asks for flags that no worker of it needs: {' '.join(words)[:200]}")
    return tuple(words)


@asynccontextmanager
async def _connection(
    address: str, context: ssl.SSLContext
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Raises Unavailable: nobody there, cut off, or another CA's."""
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
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _hear(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Raises Unavailable where there is no whole line of JSON."""
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
    """By which other machines reach this one: that of its way out; nothing is sent. Raises InvalidRequest."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", PORT))  # reserved for documents: RFC 5737
        except OSError:
            raise InvalidRequest(
                "no address is known by which others reach this machine: give --fleet-listen HOST:50060",
                field="fleet_listen",
            ) from None
        return probe.getsockname()[0]
