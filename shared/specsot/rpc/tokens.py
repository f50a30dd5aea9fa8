"""Bearer tokens that clients show: compared in constant time, read again when their file changes.

Refuses to know gRPC and HTTP. A token is never logged, and nothing of it is in memory but a digest.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from specsot.errors import Forbidden, InvalidRequest, Unauthenticated
from specsot.rpc.fresh import WatchedFiles

LONGEST = 4096  # bytes of a token
MOST = 10_000  # tokens in a file

ADMIN = "admin"  # behind a token in the file


@dataclass(frozen=True, slots=True)
class Known:
    """A token's digest. admin: it is marked as an administrator's."""

    digest: bytes
    admin: bool = False


Digests = tuple[Known, ...]


class Tokens:
    """Who shows one of these may come in. Raises InvalidRequest for a file without a token; one that loses
    all of them later lets nobody in.
    """

    def __init__(self, file: Path | None = None, token: str | None = None) -> None:
        self._fixed = digests_of(token, "SPECSOT_TOKEN") if token is not None else ()
        self._file = None if file is None else WatchedFiles([file], lambda: read_digests(file), lost=())

    def check(self, authorization: str | None) -> None:
        """`authorization` is the header's value. Raises Unauthenticated."""
        self._find(authorization)

    def owner(self, authorization: str | None) -> str:
        """By what the holder of this token is known: nobody finds the token by it. Raises Unauthenticated."""
        return hashlib.sha256(b"owner:" + self._find(authorization).digest).hexdigest()[:32]

    def check_admin(self, authorization: str | None) -> None:
        """The holder of the only token is the administrator; among several, those that are marked are.

        Raises Unauthenticated, Forbidden.
        """
        if not self._find(authorization).admin and len(self._known()) > 1:
            raise Forbidden(f"this takes an administrator's token: one with ` {ADMIN}` behind it in the file")

    def _known(self) -> Digests:
        return (*self._fixed, *(self._file.value() if self._file else ()))

    def _find(self, authorization: str | None) -> Known:
        """Every known one is compared, so that the time tells nothing."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("a token is needed: authorization: Bearer ...")
        shown = _digest(token.strip())
        found = [known for known in self._known() if hmac.compare_digest(shown, known.digest)]
        if not found:
            raise Unauthenticated("this token is not known here")
        return Known(shown, any(known.admin for known in found))


def read_digests(file: Path) -> Digests:
    try:
        return digests_of(file.read_text("utf-8"), str(file))
    except OSError as error:
        why = (error.strerror or "cannot be read").lower()
        raise InvalidRequest(f"{file}: {why}", field="token_file") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{file}: not text in UTF-8", field="token_file") from None


def digests_of(text: str, source: str) -> Digests:
    """One token a line, an administrator's with a mark behind it.

    Raises InvalidRequest, which names the source but never the token.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    tokens = [token_of(line) for line in lines]
    if not 0 < len(tokens) <= MOST:
        raise InvalidRequest(f"{source}: {'no token' if not tokens else 'too many tokens'} in it", "token")
    for number, token in enumerate(tokens, 1):
        if not (token.isascii() and token.isprintable()) or " " in token or len(token) > LONGEST:
            raise InvalidRequest(f"{source}: token {number} cannot travel in a header", field="token")
    return tuple(Known(_digest(token), token != line) for token, line in zip(tokens, lines))


def first_token(file: Path) -> str:
    """What a client shows: the first line that is one. Raises InvalidRequest."""
    read_digests(file)
    return next(token_of(line.strip()) for line in file.read_text("utf-8").splitlines() if line.strip())


def token_of(line: str) -> str:
    """Without the mark."""
    token, _, mark = line.rpartition(" ")
    return token.rstrip() if mark == ADMIN and token.strip() else line


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
