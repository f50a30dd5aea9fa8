"""Rows to learn from: token ids, and which of them are to be guessed; in batches, and as a file."""

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

Ids = NDArray[np.int32]
Marks = NDArray[np.bool_]
DAMAGE = (OSError, EOFError, LookupError, TypeError, ValueError, BadZipFile, zlib.error)  # as NumPy meets it


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence. learned[i]: whether token i is one that the base writes, so that a head must guess it.

    group: rows of one question or conversation have the same, and are never split between training and
    measuring.
    """

    tokens: Ids
    learned: Marks
    group: int

    def cut(self, length: int) -> Row:
        """Return the row's first `length` tokens; the whole row if it is shorter."""
        return Row(self.tokens[:length], self.learned[:length], self.group)

    @property
    def useful(self) -> bool:
        """Return whether there is a token to guess: the first two tokens never are."""
        return bool(self.learned[2:].any())


def row_of(segments: Sequence[tuple[Sequence[int], bool]], group: int) -> Row:
    """Return a row that consists of segments of token ids, each with whether it is learned.

    segments: (token ids, learned), at least one. group: number of the row's group.
    """
    tokens = np.concatenate([np.asarray(ids, np.int32) for ids, _ in segments])
    learned = np.concatenate([np.full(len(ids), mark) for ids, mark in segments])
    return Row(tokens, learned, group)


def split(rows: Sequence[Row], held_out_share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Return (rows to train on, rows to measure on): whole groups, at least one of each.

    rows: all rows. held_out_share: fraction of the groups that are measured on. seed: of the choice.
    Raises ModelError if there are fewer than two groups.
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
    """Return [vocab_size] how often each token id is to be guessed."""
    counts = np.zeros(vocab_size, np.int64)
    for row in rows:
        counts += np.bincount(row.tokens[row.learned], minlength=vocab_size)
    return counts


def most_frequent(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the draft vocabulary: the ids that occur most, ascending; the lower id wins where two occur
    equally.

    counts: [vocab_size] occurrences of each id. size: maximum number of ids.
    """
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[: min(size, len(counts))])


def batches(rows: Sequence[Row], max_positions: int, seed: int, epoch: int) -> list[list[int]]:
    """Return row numbers, batch by batch: one epoch's order, a function of its arguments alone.

    Rows of similar length share a batch of at most `max_positions` padded positions; the batches are
    shuffled. A single row may be longer.

    rows: all rows. seed: of the run. epoch: passes over the rows so far.
    """
    generator = np.random.default_rng((seed, epoch))
    widths = np.array([width_of(len(row.tokens)) for row in rows])
    result: list[list[int]] = [[]]
    for row_number in np.lexsort((generator.random(len(rows)), widths)).tolist():
        if result[-1] and (len(result[-1]) + 1) * widths[row_number] > max_positions:
            result.append([])
        result[-1].append(row_number)
    return [result[index] for index in generator.permutation(len(result))]


def endless(rows: Sequence[Row], max_positions: int, seed: int) -> Iterator[list[Row]]:
    """Yield batches of rows, epoch after epoch, without end. The arguments are those of `batches`."""
    for epoch in count():
        for numbers in batches(rows, max_positions, seed, epoch):
            yield [rows[number] for number in numbers]


def width_of(length: int) -> int:
    """Return the length to which a row is padded, a multiple of 32, so that there are few shapes:
    33 -> 64.
    """
    return -(-length // 32) * 32


def pad(rows: Sequence[Row]) -> tuple[Ids, Marks]:
    """Return [num_rows, longest] token ids and marks of learned tokens; padding is id 0 and never learned.

    rows: at least one.
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


def save(rows: Sequence[Row], path: Path, made: Mapping[str, Any] | None = None) -> None:
    """Write all rows as one .npz file, whole or not at all.

    rows: at least one. path: the file; its folder is created. made: what the rows were made of, by name;
        None: unknown.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:  # to a name, NumPy would add .npz
        np.savez_compressed(
            file,
            tokens=np.concatenate([row.tokens for row in rows]),
            learned=np.packbits(np.concatenate([row.learned for row in rows])),
            lengths=np.array([len(row.tokens) for row in rows]),
            groups=np.array([row.group for row in rows]),
            made=np.array(json.dumps(made)),
        )
    fresh.replace(path)


def load(path: Path) -> list[Row]:
    """Return the rows of a file that `save` wrote. Raises ModelError for any other file."""
    with _opened(path) as held:
        ends = np.cumsum(held["lengths"])
        tokens = np.split(held["tokens"], ends[:-1])
        learned = np.unpackbits(held["learned"], count=int(ends[-1])).astype(np.bool_)
        marks = np.split(learned, ends[:-1])
        groups = held["groups"].tolist()
    return [Row(*each) for each in zip(tokens, marks, groups)]


def made_of(path: Path) -> dict[str, Any] | None:
    """Return what a file's rows were made of; None if the file does not say. Raises ModelError for a file
    that `save` did not write.
    """
    with _opened(path) as held:
        return json.loads(held["made"].item()) if "made" in held else None


@contextmanager
def _opened(path: Path) -> Generator[NpzFile]:
    """Yield the arrays of a file within the context. Raises ModelError if it is damaged or no such file."""
    try:
        with np.load(path, allow_pickle=False) as held:
            yield held
    except DAMAGE as error:
        raise ModelError(f"{path}: no whole file of rows ({error})") from None


def useful(rows: Sequence[Row], length: int) -> Iterator[Row]:
    """Return the rows, cut to `length` tokens, without those that have no token to guess."""
    return (cut for row in rows if (cut := row.cut(length)).useful)
