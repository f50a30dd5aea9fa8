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
        return Row(self.tokens[:length], self.learned[:length], self.group)

    @property
    def useful(self) -> bool:
        """Whether there is anything to guess: the first two tokens never are."""
        return bool(self.learned[2:].any())


def row_of(parts: Sequence[tuple[Sequence[int], bool]], group: int) -> Row:
    """From stretches of ids, each with whether it is learned."""
    tokens = np.concatenate([np.asarray(ids, np.int32) for ids, _ in parts])
    learned = np.concatenate([np.full(len(ids), mark) for ids, mark in parts])
    return Row(tokens, learned, group)


def split(rows: Sequence[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and rows to measure on: whole groups, at least one of each. Raises ModelError."""
    groups = np.unique([row.group for row in rows])
    if len(groups) < 2:
        raise ModelError(f"{len(groups)} question(s) or conversation(s): at least two are needed")
    np.random.default_rng(seed).shuffle(groups)
    kept_back = set(groups[: max(1, min(round(len(groups) * share), len(groups) - 1))].tolist())
    measured = [row for row in rows if row.group in kept_back]
    return [row for row in rows if row.group not in kept_back], measured


def frequencies(rows: Sequence[Row], vocabulary: int) -> NDArray[np.int64]:
    """How often each id is to be guessed."""
    counts = np.zeros(vocabulary, np.int64)
    for row in rows:
        counts += np.bincount(row.tokens[row.learned], minlength=vocabulary)
    return counts


def most_frequent(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The draft vocabulary: ids that occur most, ascending; the lower id first where two occur equally."""
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[: min(size, len(counts))])


def batches(rows: Sequence[Row], positions: int, seed: int, epoch: int) -> list[list[int]]:
    """Row numbers, batch by batch: one epoch's order, a function of its arguments alone.

    Rows of like length go together, `positions` of them with padding at most; the batches are shuffled.
    """
    dice = np.random.default_rng((seed, epoch))
    widths = np.array([width_of(len(row.tokens)) for row in rows])
    found: list[list[int]] = [[]]
    for number in np.lexsort((dice.random(len(rows)), widths)).tolist():
        if found[-1] and (len(found[-1]) + 1) * widths[number] > positions:
            found.append([])
        found[-1].append(number)
    return [found[place] for place in dice.permutation(len(found))]


def endless(rows: Sequence[Row], positions: int, seed: int) -> Iterator[list[Row]]:
    """Batches, epoch after epoch."""
    for epoch in count():
        for numbers in batches(rows, positions, seed, epoch):
            yield [rows[number] for number in numbers]


def width_of(length: int) -> int:
    """What a row of this length is padded to, so that there are few shapes."""
    return -(-length // 32) * 32


def pad(rows: Sequence[Row]) -> tuple[Ids, Marks]:
    """[rows, longest] ids and marks; padding is id 0 and never learned."""
    width = width_of(max(len(row.tokens) for row in rows))
    tokens = np.zeros((len(rows), width), np.int32)
    learned = np.zeros((len(rows), width), np.bool_)
    for place, row in enumerate(rows):
        tokens[place, : len(row.tokens)], learned[place, : len(row.tokens)] = row.tokens, row.learned
    return tokens, learned


def save(rows: Sequence[Row], path: Path, made: Mapping[str, Any] | None = None) -> None:
    """All rows as one .npz, whole or not at all. made: what they were made of, if that is known."""
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
    """The rows back. Raises ModelError for what is no such file."""
    with _opened(path) as held:
        ends = np.cumsum(held["lengths"])
        tokens = np.split(held["tokens"], ends[:-1])
        learned = np.unpackbits(held["learned"], count=int(ends[-1])).astype(np.bool_)
        marks = np.split(learned, ends[:-1])
        groups = held["groups"].tolist()
    return [Row(*each) for each in zip(tokens, marks, groups)]


def made_of(path: Path) -> dict[str, Any] | None:
    """What a file's rows were made of; None: it does not say. Raises ModelError for what is no such file."""
    with _opened(path) as held:
        return json.loads(held["made"].item()) if "made" in held else None


@contextmanager
def _opened(path: Path) -> Generator[NpzFile]:
    try:
        with np.load(path, allow_pickle=False) as held:
            yield held
    except DAMAGE as error:
        raise ModelError(f"{path}: no whole file of rows ({error})") from None


def useful(rows: Sequence[Row], length: int) -> Iterator[Row]:
    """Cut to a length; those without anything to guess are left out."""
    return (cut for row in rows if (cut := row.cut(length)).useful)
