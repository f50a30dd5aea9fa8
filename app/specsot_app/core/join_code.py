"""The code by which another machine joins: where to ask, whom to trust, and a secret that is good once."""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass

from specsot.errors import InvalidRequest

PINNED = 16  # bytes of the SHA-256 of the CA's certificate: nobody finds another one that begins so
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
