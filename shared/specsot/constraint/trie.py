"""All tokens of a vocabulary as one trie of bytes, level by level in numpy arrays.

Refuses to know grammars, states and masks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specsot.vocabulary import Vocabulary

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one depth: node = one distinct beginning of tokens.

    parent: node numbers in the level above (all 0 in the first).  [nodes]
    byte:   the byte that leads from the parent here.              [nodes]
    tokens: ids of the tokens that end in this level.              [ends]
    ends:   the node in which each of them ends.                   [ends]
    """

    parent: Ints
    byte: NDArray[np.uint8]
    tokens: Ints
    ends: Ints


@functools.lru_cache(maxsize=4)
def build_trie(vocabulary: Vocabulary) -> tuple[Level, ...]:
    """The levels of the trie, shortest beginnings first."""
    texts = sorted((text, token) for token, text in enumerate(vocabulary.bytes) if text)
    sizes = np.array([len(text) for text, _ in texts], dtype=np.int32)
    tokens = np.array([token for _, token in texts], dtype=np.int32)
    matrix = _pad([text for text, _ in texts], int(sizes.max(initial=0)))
    shared = _shared_beginnings(matrix, sizes)
    levels: list[Level] = []
    rows = np.arange(len(texts))
    above = np.zeros(len(texts), dtype=np.int32)  # of each row its node in the level above
    for depth in range(matrix.shape[1]):
        rows = rows[sizes[rows] > depth]
        fresh = shared[rows] <= depth
        above[rows], parent = np.cumsum(fresh, dtype=np.int32) - 1, above[rows[fresh]]
        last = rows[sizes[rows] == depth + 1]
        levels.append(Level(parent, matrix[rows[fresh], depth], tokens[last], above[last]))
    return tuple(levels)


def _pad(texts: list[bytes], width: int) -> NDArray[np.uint8]:
    """[texts, width], zeros behind each text."""
    padded = b"".join(text.ljust(width, b"\0") for text in texts)
    return np.frombuffer(padded, dtype=np.uint8).reshape(len(texts), width)


def _shared_beginnings(matrix: NDArray[np.uint8], sizes: Ints) -> Ints:
    """Of each row of the sorted matrix, how many first bytes it shares with the row before."""
    shared = np.zeros(len(sizes), dtype=np.int32)
    if len(sizes) > 1:
        differs = matrix[1:] != matrix[:-1]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), matrix.shape[1])
        shared[1:] = np.minimum(first, np.minimum(sizes[1:], sizes[:-1]))
    return shared
