"""The one source of randomness: a uniform number for each (seed, ordinal, position).

Refuses to know state: no generator, no clock. Counter-based, so the same token is drawn whatever
tree, batch, drafter or repair led to it.
"""

from __future__ import annotations

import hashlib
import struct

_PACK = struct.Struct("<QQQ")
_SCALE = 2.0**-53


def uniform(seed: int, ordinal: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, for the token at `position` of branch `ordinal`."""
    word = _PACK.pack(seed & (2**64 - 1), ordinal, position)
    digest = hashlib.blake2b(word, digest_size=8, person=b"specsot-draw-v1").digest()
    return (int.from_bytes(digest, "little") >> 11) * _SCALE
