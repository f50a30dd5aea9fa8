"""The tokens of a vocabulary as tries of bytes, level by level in numpy arrays.

Refuses to know grammars, places and masks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specsot.vocabulary import Vocabulary

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TrieLevel:
    """The nodes of one depth, a node being one distinct beginning of tokens, in byte order.

    byte:     the last byte of the beginning.                                         [nodes]
    children: node i's children are the nodes children[i] .. children[i + 1] - 1 of the next level.
    tokens:   ids of the tokens that are whole at this depth.                         [ends]
    ends:     the node of each of them.                                               [ends]
    lines:    bytes of each of them before its first line feed (all of them without one). [ends]
    """

    byte: NDArray[np.uint8]
    children: Ints
    tokens: Ints
    ends: Ints
    lines: Ints


Trie = tuple[TrieLevel, ...]


@functools.lru_cache(maxsize=4)
def build_tries(vocabulary: Vocabulary) -> tuple[Trie, Trie]:
    """Two tries: of the tokens without a line feed, and of those with one. They are walked apart
    because the former can be walked once for the titles of all lines."""
    texts = sorted((text, token) for token, text in enumerate(vocabulary.bytes) if text)
    within = [entry for entry in texts if b"\n" not in entry[0]]
    across = [entry for entry in texts if b"\n" in entry[0]]
    return _build(within), _build(across)


def _build(texts: list[tuple[bytes, int]]) -> Trie:
    """The trie of sorted (text, token) pairs."""
    sizes = np.array([len(text) for text, _ in texts], dtype=np.int32)
    tokens = np.array([token for _, token in texts], dtype=np.int32)
    lines = np.array([len(text.partition(b"\n")[0]) for text, _ in texts], dtype=np.int32)
    matrix = _pad([text for text, _ in texts], int(sizes.max(initial=0)))
    shared = _shared_beginnings(matrix, sizes)
    levels: list[TrieLevel] = []
    rows = np.flatnonzero(sizes > 0)
    for depth in range(matrix.shape[1]):
        fresh = shared[rows] <= depth
        node = np.cumsum(fresh, dtype=np.int32) - 1  # of each row
        longer = sizes[rows] > depth + 1
        below = rows[longer]
        parents = node[longer][shared[below] <= depth + 1]  # of the nodes of the next level
        children = np.searchsorted(parents, np.arange(int(fresh.sum()) + 1)).astype(np.int32)
        whole = rows[~longer]
        byte = matrix[rows[fresh], depth]
        levels.append(TrieLevel(byte, children, tokens[whole], node[~longer], lines[whole]))
        rows = below
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
