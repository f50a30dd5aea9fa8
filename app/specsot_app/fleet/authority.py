"""The CA of a shared fleet, in a folder as docker/certificates.sh makes one."""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from specsot.errors import InvalidRequest

PINNED = 16  # bytes of the SHA-256 of the CA's certificate: nobody finds another one that begins so
AUTHORITY_DAYS, MEMBER_DAYS = 3650, 365  # as docker/certificates.sh has it
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
        """A new key and certificate for a role of this machine."""
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
