"""How far a sequence may be fed before the master must be heard from again.

Pure. A master that is gone, or a client that does not read, thus stops a sequence without a word.
"""

from __future__ import annotations


def first_lease(prompt: int, grant: int) -> int:
    """The position up to which a new sequence may be fed."""
    return prompt + grant


def renewed_lease(position: int, lease: int, last: int, grant: int) -> int | None:
    """The next lease, or None while there is no need: less than half is used, or it reaches the end.

    position: tokens there are, prompt included. last: the position no token can lie behind.
    """
    if lease >= last or lease - position > grant // 2:
        return None
    return max(lease, position) + grant
