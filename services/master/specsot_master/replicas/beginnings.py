"""Which replica was given a prompt that begins like this one, so that its KV may be there still.

Pure. Refuses to know tokens and whether the KV is: a wrong guess costs a prefill, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

from specsot.params import Ask

BLOCK_CHARACTERS, MAX_PROMPT_BLOCKS = (
    256,
    64,
)  # characters that must agree; how many such blocks are looked at
MAX_KNOWN_BLOCKS = 4096  # blocks remembered, the newest


class PrefixAffinity:
    """Prompts are known by hashes of their first blocks, each with all before it."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, int] = OrderedDict()

    def note(self, ask: Ask, replica: int) -> None:
        """It goes there."""
        for mark in block_hashes(ask):
            self._replicas[mark] = replica
            self._replicas.move_to_end(mark)
        while len(self._replicas) > MAX_KNOWN_BLOCKS:
            self._replicas.popitem(last=False)

    def find(self, ask: Ask) -> int | None:
        """Where the one went that agrees longest; None where none agrees."""
        known = [self._replicas[mark] for mark in block_hashes(ask) if mark in self._replicas]
        return known[-1] if known else None


def block_hashes(ask: Ask) -> Iterator[bytes]:
    """Of the prompt's beginnings, ever longer."""
    turns = "".join(f"{one.role}\0{one.content}\0" for one in ask.messages)
    text = ask.mode + (
        ask.prompt or turns or ",".join(map(str, ask.tokens[: BLOCK_CHARACTERS * MAX_PROMPT_BLOCKS]))
    )
    seen = blake2b(digest_size=16)
    for begin in range(
        0, min(len(text) // BLOCK_CHARACTERS, MAX_PROMPT_BLOCKS) * BLOCK_CHARACTERS, BLOCK_CHARACTERS
    ):
        seen.update(text[begin : begin + BLOCK_CHARACTERS].encode(errors="surrogatepass"))
        yield seen.digest()
