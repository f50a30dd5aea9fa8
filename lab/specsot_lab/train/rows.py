"""Rows to learn from: token ids, and which of them a head learns to predict. They are stored in files and
read in batches.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from specsot.errors import ModelError

# Token ids, [length] or [num_rows, length].
Ids = NDArray[np.int32]
# A flag for each token.
Flags = NDArray[np.bool_]
# What NumPy raises for a damaged file.
READ_ERRORS = (
    OSError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to learn from.

    tokens: Token ids, [length].
    learned: [length] True for tokens that the base model writes, so that a head learns to predict them.
    group: Number of the question or conversation. All rows of a group are either trained on or measured.
    """

    tokens: Ids
    learned: Flags
    group: int

    def truncated(self, length: int) -> Row:
        """Return the row's first tokens; the whole row if it is shorter.

        length: Maximum number of tokens.
        """
        return Row(self.tokens[:length], self.learned[:length], self.group)

    @property
    def has_targets(self) -> bool:
        """Return True if the row has a token to predict. The first two tokens never are, because a prediction
        needs a state and the token after it.
        """
        return bool(self.learned[2:].any())


def row_of(segments: Sequence[tuple[Sequence[int], bool]], group: int) -> Row:
    """Return a row that consists of segments.

    segments: (token ids, True if they are learned) of each segment, at least one.
    group: Number of the row's group.

    The tokens of all segments follow each other. Raises ValueError without segments.
    """
    tokens = np.concatenate([np.asarray(ids, np.int32) for ids, _ in segments])
    learned = np.concatenate([np.full(len(ids), mark) for ids, mark in segments])
    return Row(tokens, learned, group)


def split(rows: Sequence[Row], held_out_share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Return (rows to train on, rows to measure). Groups stay whole, and each of the two lists has at least
    one.

    rows: All rows.
    held_out_share: Fraction of the groups that is measured.
    seed: Seed of the choice of groups.
    Raises ModelError if there are fewer than two groups.

    The fraction is rounded to whole groups: at least one group is measured, and at least one is trained on,
    whatever the fraction. The rows keep their order. Equal arguments give the same split.
    """
    groups = np.unique([row.group for row in rows])
    if len(groups) < 2:
        raise ModelError(f"{len(groups)} question(s) or conversation(s): at least two are needed")
    np.random.default_rng(seed).shuffle(groups)
    held_out_groups = set(
        groups[: max(1, min(round(len(groups) * held_out_share), len(groups) - 1))].tolist()
    )
    measured = [row for row in rows if row.group in held_out_groups]
    return [row for row in rows if row.group not in held_out_groups], measured


def frequencies(rows: Sequence[Row], vocab_size: int) -> NDArray[np.int64]:
    """Return how often each token id is to be predicted, [vocab_size]; zeros without rows.

    rows: The rows to count in.
    vocab_size: Size of the base model's vocabulary.

    Only learned tokens count. An id outside of the vocabulary raises ValueError.
    """
    counts = np.zeros(vocab_size, np.int64)
    for row in rows:
        counts += np.bincount(row.tokens[row.learned], minlength=vocab_size)
    return counts


def most_frequent(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the ids that occur most often, ascending: the draft vocabulary. Of ids that occur equally often,
    the lower ones are chosen.

    counts: [vocab_size] occurrences of each id.
    size: Maximum number of ids.
    """
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[: min(size, len(counts))])


def batches(rows: Sequence[Row], max_positions: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of one epoch, as lists of row numbers. They depend on nothing but the arguments.

    Rows of similar length share a batch, and the batches are shuffled.

    rows: All rows, at least one.
    max_positions: Maximum number of positions of a batch, padding included. A row that is longer has a batch
        of its own.
    seed: Seed of the run.
    epoch: Number of earlier passes over the rows.

    A batch is never empty. The width of a row is its length rounded up, see `width_of`.
    """
    generator = np.random.default_rng((seed, epoch))
    widths = np.array([width_of(len(row.tokens)) for row in rows])
    batches_so_far: list[list[int]] = [[]]
    for row_number in np.lexsort((generator.random(len(rows)), widths)).tolist():
        if batches_so_far[-1] and (len(batches_so_far[-1]) + 1) * widths[row_number] > max_positions:
            batches_so_far.append([])
        batches_so_far[-1].append(row_number)
    return [batches_so_far[index] for index in generator.permutation(len(batches_so_far))]


def endless_batches(rows: Sequence[Row], max_positions: int, seed: int) -> Iterator[list[Row]]:
    """Yield batches of rows, epoch after epoch, without end.

    rows: All rows, at least one.
    max_positions: Maximum number of positions of a batch, padding included.
    seed: Seed of the run.

    The batches of each epoch are those of `batches`, with the number of the epoch from 0.
    """
    for epoch in count():
        for numbers in batches(rows, max_positions, seed, epoch):
            yield [rows[number] for number in numbers]


def width_of(length: int) -> int:
    """Return the length to which a row is padded: the next multiple of 32, so that there are few different
    shapes. 33 -> 64, 0 -> 0

    length: Number of tokens of the row.
    """
    return -(-length // 32) * 32


def pad(rows: Sequence[Row]) -> tuple[Ids, Flags]:
    """Return the token ids [num_rows, width] of some rows, and the flags of their learned tokens, of the same
    shape. Padding has the id 0, and is never learned.

    rows: The rows, at least one.

    The width is that of the longest row, see `width_of`.
    """
    width = width_of(max(len(row.tokens) for row in rows))
    tokens = np.zeros((len(rows), width), np.int32)
    learned = np.zeros((len(rows), width), np.bool_)
    for row_number, row in enumerate(rows):
        tokens[row_number, : len(row.tokens)], learned[row_number, : len(row.tokens)] = (
            row.tokens,
            row.learned,
        )
    return tokens, learned


def save(rows: Sequence[Row], path: Path, sources: Mapping[str, Any] | None = None) -> None:
    """Write all rows as one .npz file, whole or not at all.

    rows: The rows, at least one.
    path: The file; its folder is created if missing.
    sources: What the rows were made of, by name. None: unknown.

    An existing file is replaced. Raises ValueError without rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    # NumPy would append ".npz" to a name, so it gets an open file.
    with temporary.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=np.concatenate([row.tokens for row in rows]),
            learned=np.packbits(np.concatenate([row.learned for row in rows])),
            lengths=np.array([len(row.tokens) for row in rows]),
            groups=np.array([row.group for row in rows]),
            made=np.array(json.dumps(sources)),
        )
    temporary.replace(path)


def load(path: Path) -> list[Row]:
    """Return the rows of a file that `save` wrote.

    path: The file.
    Raises ModelError for any other file.

    Raises ModelError also for a missing or a damaged file. Rows have the order in which they were saved.
    """
    with _opened(path) as arrays:
        ends = np.cumsum(arrays["lengths"])
        tokens = np.split(arrays["tokens"], ends[:-1])
        learned = np.unpackbits(arrays["learned"], count=int(ends[-1])).astype(np.bool_)
        marks = np.split(learned, ends[:-1])
        groups = arrays["groups"].tolist()
    return [Row(*row_parts) for row_parts in zip(tokens, marks, groups)]


def read_sources(path: Path) -> dict[str, Any] | None:
    """Return what a file's rows were made of, by name; None if the file does not say it.

    path: The file.
    Raises ModelError for a file that `save` did not write.
    """
    with _opened(path) as arrays:
        return json.loads(arrays["made"].item()) if "made" in arrays else None


@contextmanager
def _opened(path: Path) -> Generator[NpzFile]:
    """Open a file of rows, yield its arrays, and close it.

    path: The file.
    Raises ModelError if the file is damaged or missing, also while its arrays are read.

    ModelError covers errors of NumPy, of the zip format and of missing arrays.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except READ_ERRORS as error:
        raise ModelError(f"{path}: no whole file of rows ({error})") from None


def useful_rows(rows: Sequence[Row], length: int) -> Iterator[Row]:
    """Yield the rows, truncated, without those that have no token to predict.

    rows: All rows.
    length: Maximum number of tokens of a row.
    """
    return (truncated for row in rows if (truncated := row.truncated(length)).has_targets)
