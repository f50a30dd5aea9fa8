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
PIN_BYTES = 16
# Days that certificates are valid. Precedent: docker/certificates.sh.
AUTHORITY_DAYS = 3650
# Days that the certificates of members are valid. Precedent: docker/certificates.sh.
MEMBER_DAYS = 365
# Names and addresses under which every certificate is valid on its own machine.
HERE = (x509.DNSName("localhost"), *(x509.IPAddress(ip_address(address)) for address in ("127.0.0.1", "::1")))
# What members' certificates may be used for: as servers and as clients.
USES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])


class Authority:
    """A certificate authority that signs members' certificates. Its key stays in its folder."""

    def __init__(self, folder: Path) -> None:
        """Open the authority in a folder, or create it there.

        If ca.key is missing, a new key and certificate are made, and a ca.pem without its key is
        overwritten. If ca.key exists, both files are only read.

        folder: Folder of ca.key and ca.pem; created if missing.
        Raises InvalidRequest if the folder has no usable key and certificate, OSError if it cannot be
            written.
        """
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / "ca.key").exists():
            self._make()
        try:
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
            self._key = cast("ec.EllipticCurvePrivateKey", key)
            self._certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        except (ValueError, TypeError, OSError) as error:
            raise InvalidRequest(f"{folder}: it has no usable CA ({error})", field="certificates") from None

    @property
    def pem(self) -> str:
        """Return the CA's certificate as PEM text."""
        return (self._folder / "ca.pem").read_text()

    def write(self, role: str) -> None:
        """Write a new key and certificate of one of this machine's roles into a folder of the role's name.

        The folder lies in the authority's folder and is created if missing. Older files own.key, own.pem and
        ca.pem in it are replaced.

        role: Name of the role: "master", "worker", "drafter" or JOIN_ROLE.
        """
        key = write_key(self._folder / role)
        write_identity(self._folder / role, self.sign(request_of(key), role), self.pem)

    def sign(self, request: str, role: str) -> str:
        """Return a certificate (PEM) for a role, whatever name the request has.

        The certificate is valid for MEMBER_DAYS days, for the DNS name `role` and for this machine's own
        names (HERE), as a server's and as a client's. Names and extensions of the request are ignored.

        request: A certificate request as PEM text, whose signature is checked.
        role: Name to write into the certificate.
        Raises InvalidRequest for anything but a valid request.
        """
        try:
            parsed = x509.load_pem_x509_csr(request.encode())
        except ValueError:
            parsed = None
        if parsed is None or not parsed.is_signature_valid:
            raise InvalidRequest("the message has no valid certificate request", field="request")
        alternative_names = x509.SubjectAlternativeName([x509.DNSName(role), *HERE])
        builder = _certificate_builder(role, self._certificate.subject, MEMBER_DAYS).public_key(
            parsed.public_key()
        )
        builder = builder.add_extension(alternative_names, critical=False).add_extension(USES, critical=False)
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        builder = builder.add_extension(_usage(signs=False), critical=True)
        authority_id = x509.SubjectKeyIdentifier.from_public_key(self._certificate.public_key())
        issuer_id = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_id)
        signed = builder.add_extension(issuer_id, critical=False).sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM).decode()

    def _make(self) -> None:
        """Create key and certificate of the authority in its folder. An older key is replaced.

        The certificate is valid for AUTHORITY_DAYS days and may sign members' certificates, but no further
        CAs.
        """
        key = write_key(self._folder, "ca.key")
        name = _x509_name("SpecSoT fleet")
        builder = _certificate_builder("SpecSoT fleet", name, AUTHORITY_DAYS).public_key(key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
        key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(_usage(signs=True), critical=True).add_extension(
            key_id, critical=False
        )
        signed = builder.sign(key, hashes.SHA256())
        (self._folder / "ca.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def pin(ca: str) -> bytes:
    """Return the first PIN_BYTES bytes of the SHA-256 of a CA's certificate.

    ca: The certificate as PEM text.
    Raises ValueError if it is none.
    """
    certificate = x509.load_pem_x509_certificate(ca.encode())
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()[:PIN_BYTES]


def write_key(folder: Path, name: str = "own.key") -> ec.EllipticCurvePrivateKey:
    """Write a new private key that only this user can read, and return it; an older key of this name is
    replaced.

    The file has the mode 0600 and the key in PEM without a password; a new folder has the mode 0700. Raises
    OSError if it cannot be written.

    folder: Folder of the file, created if missing.
    name: Name of the file.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / name).unlink(missing_ok=True)
    with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(*encoding))
    return key


def request_of(key: ec.EllipticCurvePrivateKey) -> str:
    """Return a certificate request as PEM text; the private key itself is not in it.

    key: The private key whose public half the certificate shall have.
    """
    request = (
        x509.CertificateSigningRequestBuilder().subject_name(_x509_name("member")).sign(key, hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.PEM).decode()


def write_identity(folder: Path, certificate: str, ca: str) -> None:
    """Write a certificate as own.pem and its CA as ca.pem.

    folder: Existing folder to write to.
    certificate: The certificate as PEM text.
    ca: The CA's certificate as PEM text.
    """
    (folder / "own.pem").write_text(certificate)
    (folder / "ca.pem").write_text(ca)


def is_valid(folder: Path, now: datetime) -> bool:
    """Return whether the folder has a certificate that is valid for at least another day.

    A file that cannot be read, or is no certificate, also gives False. Who signed the certificate is not
    checked.

    folder: Folder of own.pem; without that file the result is False.
    now: The present time, with a time zone.
    """
    try:
        certificate = x509.load_pem_x509_certificate((folder / "own.pem").read_bytes())
    except (OSError, ValueError):
        return False
    return certificate.not_valid_after_utc > now + timedelta(days=1)


def _certificate_builder(name: str, issuer: x509.Name, valid_days: int) -> x509.CertificateBuilder:
    """Return a certificate builder with names, serial number and validity, which begins an hour ago.

    The builder has no public key yet.

    name: Common name that the certificate gets.
    issuer: Name of the CA.
    valid_days: Days from now until the certificate's validity ends.
    """
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(_x509_name(name)).issuer_name(issuer)
    builder = builder.serial_number(x509.random_serial_number())
    # Validity begins an hour ago, since the clocks of two machines differ.
    return builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(
        now + timedelta(days=valid_days)
    )


def _x509_name(name: str) -> x509.Name:
    """Return an X.509 name that consists of a common name.

    name: The common name.
    """
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(signs: bool) -> x509.KeyUsage:
    """Return the key usage of a certificate.

    signs: True: the certificate's key signs other certificates; False: it identifies a service.
    """
    return x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)


# Random bytes of a code's secret: 88 bits, of which one connection can try one value.
SECRET_BYTES = 11


@dataclass(frozen=True, slots=True)
class JoinCode:
    """What a machine needs to join.

    address: Address of the first machine's join server, host:port.
    authority: The first PIN_BYTES bytes of the SHA-256 of the fleet's CA certificate.
    secret: Random bytes, valid for one machine.
    """

    address: str
    authority: bytes
    secret: bytes

    def __str__(self) -> str:
        """Return the code as it is printed: the address, a slash, then authority and secret in base64."""
        return f"{self.address}/{urlsafe_b64encode(self.authority + self.secret).decode()}"


def parse_code(code_text: str) -> JoinCode:
    """Return a code from its printed text.

    The text must end in "/" and base64 of exactly PIN_BYTES + SECRET_BYTES bytes, and the address before it
    in ":" and a decimal port; anything else raises.

    code_text: The text that `specsot serve --share` printed; white space around it is ignored.
    Raises InvalidRequest for a text that is incomplete or no code.
    """
    address, _, encoded = code_text.strip().rpartition("/")
    try:
        decoded = urlsafe_b64decode(encoded)
    except (binascii.Error, ValueError):
        decoded = b""
    if len(decoded) != PIN_BYTES + SECRET_BYTES or not address.rpartition(":")[2].isdecimal():
        raise InvalidRequest(
            "the code is incomplete: copy all of what `specsot serve --share` printed", "code"
        )
    return JoinCode(address, decoded[:PIN_BYTES], decoded[PIN_BYTES:])


# Role of the join server's certificate; no member has this role.
JOIN_ROLE = "join"
# Port of the join server, next to the members' 50060.
PORT = 50059
# Seconds. Limits a whole exchange with one machine, and connecting to the join server. Untuned.
EXCHANGE_TIMEOUT = 15.0
# Bytes. Maximum length of a line of the protocol.
MAX_LINE_BYTES = 1 << 16
# Connections. Maximum that the join server handles at a time. Untuned.
MAX_CONNECTIONS = 16
# Flags that all workers of a ring share. Their values are plain words, so that no value can name a file.
SHARED = ("--dtype", "--quantization", "--kv-cache-dtype", "--batch-invariant", "--draft-invariant")

# Called with a line for the user.
PrintLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class JoinedFleet:
    """What a machine that joined knows.

    master: Address of the master, host:port.
    own_host: This machine's address on its connection to the first machine, without a port.
    flags: Command-line flags that workers of the ring share, names and values in turn.
    """

    master: str
    own_host: str
    flags: tuple[str, ...]


class JoinServer:
    """The join server: admits a machine that presents the current code, then draws another code.

    authority: The authority that signs the certificates.
    address: Address at which the server listens, host:port; it is part of the code.
    master: Address of the members' server, host:port.
    flags: Command-line flags that workers share, names and values in turn.
    print_line: Called with a line for each machine, and with each new invitation.
    """

    def __init__(
        self, authority: Authority, address: str, master: str, flags: tuple[str, ...], print_line: PrintLine
    ) -> None:
        self._authority = authority
        self._address = address
        self._print_line = print_line
        self._answer_fields = {"master": master, "flags": flags}
        self._num_connections = 0
        self.code = self._draw()

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection, as the module's docstring describes; close it at once if there are
        MAX_CONNECTIONS already.

        A connection that ends early, or takes longer than EXCHANGE_TIMEOUT seconds, is dropped without a
        line.

        A refused machine gets {"refused": why}, and the line that is printed names its address and the
        reason. After an admitted machine, the invitation with the new code is printed as well. The
        connection is closed in every case, and no exception of a dropped connection is raised.

        reader, writer: The two directions of the connection.
        """
        self._num_connections += 1
        try:
            if self._num_connections > MAX_CONNECTIONS:
                return
            async with asyncio.timeout(EXCHANGE_TIMEOUT):
                await _send_message(writer, {"specsot": __version__, "ca": self._authority.pem})
                message = await _read_message(reader)
                answer = self._answer(message)
                host = writer.get_extra_info("peername")[0]
                self._print_line(
                    f"{host} was {'refused: ' + answer['refused'] if 'refused' in answer else 'admitted'}"
                )
                if "refused" not in answer:
                    self._print_line(invitation(self.code))
                await _send_message(writer, answer)
        except (TimeoutError, SpecsotError, OSError):
            # The machine only read the CA, or disconnected.
            pass
        finally:
            self._num_connections -= 1
            writer.close()

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a machine's message: a certificate, or why it is refused. If a certificate is
        granted, a new code is drawn.

        The result is {"refused": why} for a secret that is missing, mistyped or used already, and for an
        invalid certificate request; the code then stays valid. Otherwise it has the certificate (PEM), the
        master's address and the shared flags. The certificate is always one of a worker.

        message: The machine's message, with its secret and its certificate request.
        """
        shown_secret = str(message.get("secret", "")).encode()
        if not hmac.compare_digest(shown_secret, b64encode(self.code.secret)):
            return {"refused": "its code has been used already or is mistyped: use the newest code"}
        try:
            certificate = self._authority.sign(str(message.get("request", "")), "worker")
        except InvalidRequest as error:
            return {"refused": str(error)}
        # The code is used up, whether or not the answer arrives.
        self.code = self._draw()
        return {"certificate": certificate, **self._answer_fields}

    def _draw(self) -> JoinCode:
        """Return a new code with a random secret."""
        return JoinCode(self._address, pin(self._authority.pem), secrets.token_bytes(SECRET_BYTES))


def invitation(code: JoinCode) -> str:
    """Return the line that shows a user how to join with a code.

    code: The code that is valid now.
    """
    return f"on the next machine: specsot join {code}"


@asynccontextmanager
async def open_join_server(
    folder: Path,
    roles: tuple[str, ...],
    address: str,
    master: str,
    flags: tuple[str, ...],
    print_line: PrintLine,
) -> AsyncGenerator[JoinServer]:
    """Run the join server within the context.

    The context yields the server, whose attribute `code` is the code that is valid now. At the end of the
    context it stops listening.

    folder: Folder of the authority, created if missing.
    roles: Roles of this machine, whose certificates are made anew.
    address: Address to listen at, host:port.
    master: Address of the members' server, host:port.
    flags: Command-line flags that workers share.
    print_line: Called with lines for the user, the invitation first.
    Raises InvalidRequest for a folder without a usable CA, Unavailable if the address is taken.
    """
    authority = Authority(folder)
    for role in (JOIN_ROLE, *roles):
        authority.write(role)
    join_server = JoinServer(authority, address, master, flags, print_line)
    context = context_of(Tls(cert=folder / JOIN_ROLE / "own.pem", key=folder / JOIN_ROLE / "own.key"))
    host, _, port = address.rpartition(":")
    try:
        server = await asyncio.start_server(
            join_server.handle_connection, host.strip("[]"), int(port), ssl=context, limit=MAX_LINE_BYTES
        )
    except OSError as error:
        raise Unavailable(f"cannot listen at {address}: {reason(error)}") from None
    async with server:
        print_line(invitation(join_server.code))
        yield join_server


async def join_fleet(code_text: str, folder: Path) -> tuple[JoinedFleet, Tls]:
    """Join a fleet, and keep the certificate in a folder. Return (addresses and flags that the fleet sent,
    paths of the TLS files).

    A code that this machine has already used is not presented again. Another code of the same fleet is, since
    the fleet may have another address or other flags by now.

    A stored certificate is used only if it is valid for at least another day and place.json exists;
    otherwise a new one is requested with the code.

    code_text: The code as it was printed.
    folder: Folder that gets a folder for each code, with key, certificate and place.json.
    Raises InvalidRequest for a text that is no code, Refused and Unavailable, each in one line.
    """
    code = parse_code(code_text)
    code_folder = folder / hashlib.sha256(str(code).encode()).hexdigest()[:32]
    if not (is_valid(code_folder, datetime.now(UTC)) and (code_folder / "place.json").exists()):
        await _request_certificate(code, code_folder)
    stored = json.loads((code_folder / "place.json").read_text())
    tls = Tls(code_folder / "ca.pem", code_folder / "own.pem", code_folder / "own.key")
    return JoinedFleet(stored["master"], stored["own"], _checked_flags(stored["flags"])), tls


async def _request_certificate(code: JoinCode, code_folder: Path) -> None:
    """Check the fleet's CA against the code, present the code, and write the certificate.

    The CA is read on a first connection that trusts any certificate; the version and the answer are read on
    a second one that is verified with this CA. The key is new each time. Refused is also raised for flags
    that workers do not share; the certificate is then written, but place.json is not. Each connection may
    take EXCHANGE_TIMEOUT seconds.

    code: The code that the user was shown.
    code_folder: Folder that gets key, certificate, CA and place.json; created if missing.
    Raises Refused (another CA, another version, or the code is not accepted), Unavailable.
    """
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    async with _connection(code.address, unverified) as (reader, _):
        ca = str((await _read_message(reader)).get("ca", ""))
    try:
        genuine = hmac.compare_digest(pin(ca), code.authority)
    except ValueError:
        genuine = False
    if not genuine:
        raise Refused(f"the server at {code.address} is not the fleet of this code, or the code is mistyped")
    async with _connection(code.address, ssl.create_default_context(cadata=ca)) as (reader, writer):
        their_version = (await _read_message(reader)).get("specsot")
        if their_version != __version__:
            raise Refused(
                f"the fleet at {code.address} runs SpecSoT {their_version}, this machine {__version__}"
            )
        key = write_key(code_folder)
        await _send_message(writer, {"secret": b64encode(code.secret).decode(), "request": request_of(key)})
        answer = await _read_message(reader)
        if "refused" in answer:
            raise Refused(f"{code.address} refused this machine: {answer['refused']}")
        write_identity(code_folder, str(answer["certificate"]), ca)
        addresses = {"master": str(answer["master"]), "own": writer.get_extra_info("sockname")[0]}
        (code_folder / "place.json").write_text(
            json.dumps({**addresses, "flags": _checked_flags(answer["flags"])})
        )


def _checked_flags(flags: Any) -> tuple[str, ...]:
    """Return the flags, if they are flags that workers of a ring share, with plain words as values.

    The names must be in SHARED, each with a value of 1 to 16 lower-case letters and digits. No flags give
    ().

    flags: Names and values in turn, as the first machine sent them.
    Raises Refused for any other flag, so that a fleet cannot make this machine read files.
    """
    parts = [str(word) for word in flags]
    known = all(name in SHARED for name in parts[::2]) and len(parts) % 2 == 0
    if not known or not all(re.fullmatch(r"[a-z0-9]{1,16}", value) for value in parts[1::2]):
        raise Refused(f"the fleet sent flags that its workers do not share: {' '.join(parts)[:200]}")
    return tuple(parts)


@asynccontextmanager
async def _connection(
    address: str, context: ssl.SSLContext
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a join server; yield the reader and writer of the connection within the context.

    The whole context may take EXCHANGE_TIMEOUT seconds; after that, Unavailable says "no answer". The
    connection is closed at the end of the context. The server must have the name JOIN_ROLE if its
    certificate is verified.

    address: Address of the join server, host:port.
    context: TLS settings, which decide whether the server's certificate is verified.
    Raises Unavailable: no answer, connection lost, or a certificate of another CA.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(EXCHANGE_TIMEOUT):
            reader, writer = await asyncio.open_connection(
                host.strip("[]"), int(port), ssl=context, server_hostname=JOIN_ROLE, limit=MAX_LINE_BYTES
            )
            try:
                yield reader, writer
            finally:
                writer.close()
    except ssl.SSLError as error:
        raise Unavailable(f"{address} has no certificate of the fleet: {error.reason}") from None
    except (TimeoutError, OSError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else (error.strerror or "no answer").lower()
        raise Unavailable(f"cannot join at {address}: {reason}") from None


async def _send_message(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message as a line of JSON.

    writer: The outgoing direction of the connection.
    message: The message's fields, which JSON can express.
    """
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message.

    A line longer than MAX_LINE_BYTES, or one that is not JSON, raises as well.

    reader: The incoming direction of the connection.
    Raises Unavailable if there is no whole line that is a JSON object.
    """
    try:
        message = json.loads(await reader.readuntil(b"\n"))
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        message = None
    if not isinstance(message, dict):
        raise Unavailable("the other machine closed the connection early; use the newest code and try again")
    return cast("dict[str, Any]", message)


def own_address() -> str:
    """Return the address at which other machines reach this one: that of its default route. Nothing is sent.

    The address is an IPv4 address without a port.

    Raises InvalidRequest if this machine has no such route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # RFC 5737 reserves this address for documentation.
            probe.connect(("192.0.2.1", PORT))
        except OSError:
            raise InvalidRequest(
                "this machine has no address that others can reach: give --fleet-listen HOST:50060",
                field="fleet_listen",
            ) from None
        return probe.getsockname()[0]
