"""TLS files, bearer tokens, and which addresses other machines can reach; changed files are read again."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from specsot.errors import Forbidden, InvalidRequest, SpecsotError, Unauthenticated
from specsot.service.option_table import option

T = TypeVar("T")
# Modification time in nanoseconds, size in bytes and inode of a file; None if it does not exist.
Stamp = tuple[int, int, int] | None


class WatchedFiles(Generic[T]):
    """A value that is read from files, and read again when their modification time, size or inode changes."""

    def __init__(self, paths: Iterable[Path], read: Callable[[], T], fallback: T | None = None) -> None:
        """Read the value, and remember the state of the files.

        paths: the files, which may be missing. Their status is compared at each call of `value`.
        read: returns the value. Called at once, and what it raises then is raised here. If it raises
            SpecsotError after a later change, that is only logged.
        fallback: the value after a change that could not be read. None: the previous value stays, because two
            files that belong together never change at the same moment.
        """
        self._paths = tuple(paths)
        self._read = read
        self._fallback = fallback
        self._stamps = self._read_stamps()
        self._value = read()

    def value(self) -> T:
        """Return the present value. Reads the status of each file to notice changes.

        If the files have changed, the value is read again; if that raises SpecsotError, a warning is logged
        and the fallback, or without one the previous value, is returned. The same change is not tried again.
        """
        stamps = self._read_stamps()
        if stamps != self._stamps:
            self._stamps = stamps
            self._renew()
        return self._value

    def _renew(self) -> None:
        """Read the value again, and log whether that succeeded.

        If SpecsotError is raised, the value becomes the fallback, or stays if there is none. Any other error
        is raised, and the value stays.
        """
        # Imported here, because clients never get here and should not spend time on the import.
        import structlog

        log = structlog.get_logger()
        try:
            self._value = self._read()
        except SpecsotError as error:
            log.warning("changed files rejected", reason=str(error))
            self._value = self._value if self._fallback is None else self._fallback
        else:
            log.info("changed files applied", files=[str(path) for path in self._paths])

    def _read_stamps(self) -> tuple[Stamp, ...]:
        """Return the status of each file, in the order of the paths."""
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> Stamp:
    """Return a file's time, size and number, or None if it does not exist or cannot be accessed.

    Links are followed, because Kubernetes changes files by changing links.

    path: the file.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS files of a service, in PEM.

    A server with `cert` uses TLS; if it has `ca` too, clients need a certificate of that CA. A channel with
    `ca` uses TLS, and sends `cert` if the server asks for a certificate.

    ca: certificates of the CA that verifies peers.
    cert: certificate of this service.
    key: private key of the certificate.

    Raises InvalidRequest if only one of `cert` and `key` is given.
    """

    ca: Path | None = option(
        None,
        "CA certificates (PEM) that verify the other services of the fleet.",
        flag="tls-ca",
        metavar="FILE",
    )
    cert: Path | None = option(None, "Certificate of this service (PEM).", flag="tls-cert", metavar="FILE")
    key: Path | None = option(
        None,
        "Private key of the certificate (PEM).",
        flag="tls-key",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        """Raise InvalidRequest, whose field is "tls", if only one of `cert` and `key` is given."""
        if (self.cert is None) != (self.key is None):
            given, missing = ("--tls-cert", "--tls-key") if self.cert else ("--tls-key", "--tls-cert")
            raise InvalidRequest(f"{given} needs {missing}", field="tls")

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are given, for watching them. Empty without TLS."""
        return tuple(path for path in (self.ca, self.cert, self.key) if path is not None)

    @property
    def mutual(self) -> bool:
        """True if both sides of every connection need a certificate."""
        return self.ca is not None and self.cert is not None


# No TLS.
PLAIN = Tls()


@dataclass(frozen=True, slots=True)
class Pems:
    """The contents of the TLS files.

    ca: certificates of the CA, or None.
    pair: the private key, and the certificate with its chain; or None.
    """

    ca: bytes | None
    pair: tuple[bytes, bytes] | None


def read_pems(tls: Tls) -> Pems:
    """Return the contents of the TLS files. Raises InvalidRequest if a file is unreadable or invalid.

    tls: the paths of the files.

    Contents of files that are not given are None. The certificates and the key are checked before they are
    returned.
    """
    context_of(tls)
    pair = (_read(tls.key), _read(tls.cert)) if tls.cert and tls.key else None
    return Pems(_read(tls.ca) if tls.ca else None, pair)


def context_of(tls: Tls) -> ssl.SSLContext:
    """Return an SSL context for a server of Python's own. Raises InvalidRequest if a file is invalid.

    tls: the paths of the files. Without a certificate, the context has none.

    Peers are verified by the certificates of `ca` if there are any; whether they need a certificate is for
    the caller to set. TLS 1.2 is the oldest version. Raises InvalidRequest for a file that cannot be read or
    is no PEM, for a key that does not belong to the certificate, and for a key that needs a password.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.ca is not None:
        # Reading the file first gives a clearer error if it cannot be read.
        _read(tls.ca)
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
    """Return an SSL context for a server of Python's own, or None if `tls` has no certificate.

    Changed files apply from the next handshake on.

    tls: the paths of the files. Raises InvalidRequest if they are invalid.

    If changed files are invalid, that is logged and the previous ones stay in use.
    """
    if tls.cert is None:
        return None
    fresh = WatchedFiles(tls.paths, lambda: context_of(tls))

    def renew(connection: ssl.SSLObject, host: str | None, context: ssl.SSLContext) -> None:
        """Give a connection the context of the files as they are now.

        connection: the connection whose handshake has started.
        host: the host name that the client asked for, or None. Not needed.
        context: the context with which the connection began. Not needed.
        """
        connection.context = fresh.value()

    first = fresh.value()
    first.sni_callback = renew
    return first


def _no_password() -> str:
    """Refuse to ask for the password of an encrypted key, because a service has no user to ask."""
    raise ValueError("the key is encrypted")


def _complaint(cert: Path, key: Path, error: Exception) -> str:
    """Return the message for a certificate or key that cannot be loaded, which names the file.

    cert: path of the certificate.
    key: path of the key.
    error: what loading them raised.

    The message says that the key is not that of the certificate (naming both files), that one of them is no
    PEM (naming both files), or, for an error that is not of SSL, such as a key with a password, names the key
    only and adds the error's text.
    """
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"{key} is not the key of {cert}"
    if isinstance(error, ssl.SSLError):
        return f"{cert}, {key}: not a certificate and its key in PEM"
    return f"{key}: {error}"


def _read(path: Path) -> bytes:
    """Return the bytes of a TLS file. Raises InvalidRequest if it cannot be read.

    path: the file.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: {(error.strerror or 'cannot be read').lower()}", field="tls") from None


# Bytes. Bounds a token, which must fit into METADATA_BYTES.
MAX_TOKEN_BYTES = 4096
# Tokens. Bounds a file, because every call's digest is compared with all of them. Untuned.
MAX_TOKENS = 10_000

# The mark after an administrator's token in the file.
ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Known:
    """A known bearer token.

    digest: SHA-256 of the token.
    admin: True if the token is marked as an administrator's.
    """

    digest: bytes
    admin: bool = False


Digests = tuple[Known, ...]


class Tokens:
    """Checks the bearer tokens of calls. If a token file becomes invalid or empty later, every token is
    rejected.
    """

    def __init__(self, file: Path | None = None, token: str | None = None) -> None:
        """file: a file with tokens, which is read again when it changes; or None.
        token: tokens as text, as in the variable SPECSOT_TOKEN; or None.

        Raises InvalidRequest if either has no valid token.
        """
        self._fixed = digests_of(token, "SPECSOT_TOKEN") if token is not None else ()
        self._file = None if file is None else WatchedFiles([file], lambda: read_digests(file), fallback=())

    def check(self, authorization: str | None) -> None:
        """Raise Unauthenticated unless the header has a known token.

        authorization: the value of the authorization header, "Bearer TOKEN", or None if there is none.
        """
        self._find(authorization)

    def owner(self, authorization: str | None) -> str:
        """Return an id of the token's holder, from which the token cannot be found: 32 hex digits.

        authorization: the value of the authorization header. Raises Unauthenticated unless it has a known
            token.
        """
        return hashlib.sha256(b"owner:" + self._find(authorization).digest).hexdigest()[:32]

    def check_admin(self, authorization: str | None) -> None:
        """Raise Forbidden unless the token is an administrator's, Unauthenticated if it is unknown.

        If there is only one token, its holder is the administrator; otherwise the holders of marked tokens
        are.

        authorization: the value of the authorization header, or None.
        """
        if not self._find(authorization).admin and len(self._known()) > 1:
            raise Forbidden(
                f"this call needs an administrator's token: one followed by ` {ADMIN}` in the token file"
            )

    def _known(self) -> Digests:
        """Return all known tokens: those given as text, then those of the file as it is now."""
        return (*self._fixed, *(self._file.value() if self._file else ()))

    def _find(self, authorization: str | None) -> Known:
        """Return the known token of a header. Raises Unauthenticated if there is none.

        All known tokens are compared, so that the time of the check reveals nothing about them.

        authorization: the value of the authorization header, or None.

        The result is an administrator's if any entry with this token is. "Bearer" may be in any case, and
        spaces around the token are ignored. A header with another scheme or without a token is rejected as
        well.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("a token is needed: authorization: Bearer ...")
        digest = _digest(token.strip())
        matches = [known for known in self._known() if hmac.compare_digest(digest, known.digest)]
        if not matches:
            raise Unauthenticated("this token is not known here")
        return Known(digest, any(known.admin for known in matches))


def read_digests(file: Path) -> Digests:
    """Return the tokens of a file. Raises InvalidRequest if it cannot be read or has no valid token.

    file: a text file in UTF-8 with one token per line.

    The error names the file, and says whether the file cannot be read, is not encoded in UTF-8, has no token,
    has more than MAX_TOKENS, or which of its tokens is invalid. Empty lines are ignored.
    """
    try:
        return digests_of(file.read_text("utf-8"), str(file))
    except OSError as error:
        why = (error.strerror or "cannot be read").lower()
        raise InvalidRequest(f"{file}: {why}", field="token_file") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{file}: not text in UTF-8", field="token_file") from None


def digests_of(text: str, source: str) -> Digests:
    """Return the tokens of a text with one token per line; an administrator's is followed by " admin".

    text: the lines.
    source: name of the file or variable, for error messages.

    Raises InvalidRequest, which names the source but never a token, if there is no token, if there are more
    than MAX_TOKENS, or if one is invalid: not printable ASCII, with a space, or longer than MAX_TOKEN_BYTES.

    Empty lines and spaces around lines are ignored. Tokens are numbered from 1 in errors, without empty
    lines.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    tokens = [token_of(line) for line in lines]
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise InvalidRequest(
            f"{source}: {'it has no token' if not tokens else 'it has too many tokens'}", "token"
        )
    for number, token in enumerate(tokens, 1):
        if not (token.isascii() and token.isprintable()) or " " in token or len(token) > MAX_TOKEN_BYTES:
            raise InvalidRequest(f"{source}: token {number} cannot travel in a header", field="token")
    return tuple(Known(_digest(token), token != line) for token, line in zip(tokens, lines))


def first_token(file: Path) -> str:
    """Return the first token of a file, which a client sends. Raises InvalidRequest if the file has no valid
    token.

    file: a text file in UTF-8 with one token per line.

    An administrator's mark is left out of the token.
    """
    read_digests(file)
    return next(token_of(line.strip()) for line in file.read_text("utf-8").splitlines() if line.strip())


def token_of(line: str) -> str:
    """Return the token of a line without an administrator's mark: "abc admin" and "abc" are both "abc".

    line: a line of a token file, without spaces around it.
    """
    token, _, mark = line.rpartition(" ")
    return token.rstrip() if mark == ADMIN and token.strip() else line


def _digest(token: str) -> bytes:
    """Return the SHA-256 of a token.

    token: the token.
    """
    return hashlib.sha256(token.encode()).digest()


def exposed(address: str) -> bool:
    """Return True if other machines may reach an address. False for a unix socket, and for localhost and
    other loopback addresses.

    Host names other than localhost count as reachable.

    address: host:port or unix:path.

    An address without a host listens on all interfaces, so that it counts as reachable.
    """
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    if host.lower() == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True
