"""Bearer tokens that clients show: compared in constant time, read again when their file changes.

Refuses to know gRPC and HTTP. A token is never logged, and nothing of it is in memory but a digest.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from specsot.errors import InvalidRequest, Unauthenticated
from specsot.rpc.fresh import Fresh

LONGEST = 4096  # bytes of a token
MOST = 10_000  # tokens in a file

Digests = tuple[bytes, ...]


class Tokens:
    """Who shows one of these may come in. Raises InvalidRequest for a file without a token; one that loses
    all of them later lets nobody in.
    """

    def __init__(self, file: Path | None = None, token: str | None = None) -> None:
        self._fixed = digests_of(token, "SPECSOT_TOKEN") if token is not None else ()
        self._file = None if file is None else Fresh([file], lambda: read_digests(file), lost=())

    def check(self, authorization: str | None) -> None:
        """`authorization` is the header's value. Raises Unauthenticated."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("a token is needed: authorization: Bearer ...")
        if not self._holds(token.strip()):
            raise Unauthenticated("this token is not known here")

    def _holds(self, token: str) -> bool:
        """Every known one is compared, so that the time tells nothing."""
        shown, found = _digest(token), False
        for known in (*self._fixed, *(self._file.value() if self._file else ())):
            found |= hmac.compare_digest(shown, known)
        return found


def read_digests(file: Path) -> Digests:
    try:
        return digests_of(file.read_text("utf-8"), str(file))
    except OSError as error:
        why = (error.strerror or "cannot be read").lower()
        raise InvalidRequest(f"{file}: {why}", field="token_file") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{file}: not text in UTF-8", field="token_file") from None


def digests_of(text: str, source: str) -> Digests:
    """One token a line. Raises InvalidRequest, which names the source but never the token."""
    tokens = [line.strip() for line in text.splitlines() if line.strip()]
    if not 0 < len(tokens) <= MOST:
        raise InvalidRequest(f"{source}: {'no token' if not tokens else 'too many tokens'} in it", "token")
    for number, token in enumerate(tokens, 1):
        if not (token.isascii() and token.isprintable()) or " " in token or len(token) > LONGEST:
            raise InvalidRequest(f"{source}: token {number} cannot travel in a header", field="token")
    return tuple(map(_digest, tokens))


def first_token(file: Path) -> str:
    """What a client shows: the first line that is one. Raises InvalidRequest."""
    read_digests(file)
    return next(line.strip() for line in file.read_text("utf-8").splitlines() if line.strip())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
