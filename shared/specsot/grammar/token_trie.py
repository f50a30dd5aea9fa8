"""The tokens of a vocabulary, sorted by their bytes into tries that NumPy walks level by level."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specsot.core.vocabulary import Vocabulary

# A line feed and the first digit of a number.
_LINE_START = re.compile(rb"\n[0-9]")

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TrieLevel:
    """The nodes of a trie at one depth, in byte order. A node is one distinct beginning of tokens.

    byte: [nodes], the last byte of each node's beginning.
    children: [nodes + 1]. The children of node i are the nodes children[i] .. children[i + 1] - 1 of the next
        level.
    tokens: [k], ids of the tokens that end at this depth.
    ends: [nodes + 1]. The tokens that end at node i are tokens[ends[i]] .. tokens[ends[i + 1] - 1].
    line_bytes: [k], how many bytes each of these tokens has before its first line feed; all of its bytes if
        it has none.

    Worked example: the tokens 0 = "a", 1 = "ab", 2 = "ac" and 3 = "b".

        depth 0   byte [a b]   children [0 2 2]   tokens [0 3]   ends [0 1 2]
        depth 1   byte [b c]   children [0 0 0]   tokens [1 2]   ends [0 1 2]
    """

    byte: NDArray[np.uint8]
    children: Ints
    tokens: Ints
    ends: Ints
    line_bytes: Ints


# The levels of a trie, from the first byte of its tokens on.
Trie = tuple[TrieLevel, ...]


@functools.lru_cache(maxsize=4)
def build_tries(vocabulary: Vocabulary) -> tuple[Trie, Trie]:
    """Return two tries: of the tokens without a line feed, and of the tokens with one. The last four results
    are cached.

    The two are walked separately, because the result of a walk through the first trie is the same for the
    titles of all lines. A trie without tokens has no levels.

    vocabulary: the bytes of every token id. Tokens without bytes, such as special tokens, are left out.

    Several tokens with the same bytes end at the same node, by ascending id.
    """
    spellings = [spelling or b"" for spelling in vocabulary.bytes]
    ids = sorted((token for token, spelling in enumerate(spellings) if spelling), key=spellings.__getitem__)
    within_line = [token for token in ids if b"\n" not in spellings[token]]
    across_lines = [token for token in ids if b"\n" in spellings[token]]
    return _build(spellings, within_line), _build(spellings, across_lines)


def _build(spellings: list[bytes], ids: list[int]) -> Trie:
    """Return the trie of some tokens. Without tokens, the result has no levels.

    spellings: the bytes of every token id.
    ids: the ids of the trie's tokens, sorted by their bytes.

    The number of levels is that of the longest token's bytes.
    """
    own = [spellings[token] for token in ids]
    tokens = np.array(ids, dtype=np.int32)
    sizes = np.array([len(spelling) for spelling in own], dtype=np.int32)
    line_bytes = np.array([len(spelling.partition(b"\n")[0]) for spelling in own], dtype=np.int32)
    # One row for each token, in the order of the tokens' bytes.
    matrix = _pad(own, sizes)
    shared = _shared_beginnings(matrix, sizes)
    levels: list[TrieLevel] = []
    # The rows of the tokens that have a byte at the present depth.
    rows = np.flatnonzero(sizes > 0)
    for depth in range(matrix.shape[1]):
        # A row begins a node unless it shares its bytes up to this depth with the row before.
        fresh = shared[rows] <= depth
        # The node of each row at this depth.
        node = np.cumsum(fresh, dtype=np.int32) - 1
        longer = sizes[rows] > depth + 1
        longer_rows = rows[longer]
        # The parent of each node of the next level.
        parents = node[longer][shared[longer_rows] <= depth + 1]
        numbers = np.arange(int(fresh.sum()) + 1)
        children = np.searchsorted(parents, numbers).astype(np.int32)
        complete = rows[~longer]
        ends = np.searchsorted(node[~longer], numbers).astype(np.int32)
        byte = matrix[rows[fresh], depth]
        levels.append(TrieLevel(byte, children, tokens[complete], ends, line_bytes[complete]))
        rows = longer_rows
    return tuple(levels)


def _pad(spellings: list[bytes], sizes: Ints) -> NDArray[np.uint8]:
    """Return the bytes of tokens as an array [tokens, bytes of the longest token], with zeros after each
    token.

    spellings: the bytes of each token.
    sizes: [tokens], number of bytes of each token.

    No Python object is created for each token. Python does not return the memory of such objects to the
    operating system while objects of the trie lie between them.
    """
    width = int(sizes.max(initial=0))
    padded = np.zeros((len(spellings), width), dtype=np.uint8)
    padded[np.arange(width) < sizes[:, None]] = np.frombuffer(b"".join(spellings), dtype=np.uint8)
    return padded


def _shared_beginnings(matrix: NDArray[np.uint8], sizes: Ints) -> Ints:
    """Return how many first bytes each row of the sorted matrix shares with the row before it: [rows]. The
    first row shares 0.

    The rows "ab", "ac" and "b" share [0, 1, 0] bytes.

    matrix: [rows, width], the bytes of one token per row, sorted, with zeros after each token.
    sizes: [rows], number of bytes of each token.

    A row that equals the row before it shares all of its bytes. Without rows, the result is empty.
    """
    shared = np.zeros(len(sizes), dtype=np.int32)
    if len(sizes) > 1:
        differs = matrix[1:] != matrix[:-1]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), matrix.shape[1])
        shared[1:] = np.minimum(first, np.minimum(sizes[1:], sizes[:-1]))
    return shared


def max_lines_started(vocabulary: Vocabulary) -> int:
    """Return the largest number of numbered lines that a single token begins: 1 for "a\\n2."; 0 if no token
    begins any, which is usual.

    vocabulary: the bytes of every token id.
    """
    counts = (
        len(_LINE_START.findall(spelling)) for spelling in vocabulary.bytes if spelling and b"\n" in spelling
    )
    return max(counts, default=0)


def ranges(first: Ints, counts: Ints) -> Ints:
    """Return the concatenation of the ranges that begin at `first` and have `counts` entries.

    With first [3, 9] and counts [2, 3], the result is [3, 4, 9, 10, 11].

    first: [ranges], the first number of each range; at least one range.
    counts: [ranges], how many numbers each range has, which may be 0.
    """
    stops = np.cumsum(counts, dtype=np.int32)
    return np.arange(stops[-1], dtype=np.int32) + np.repeat(first - (stops - counts), counts)
