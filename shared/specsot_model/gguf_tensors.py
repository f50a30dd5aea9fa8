"""Reads tensors out of a GGUF file: maps each tensor's own bytes, and dequantizes them if asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsot.checkpoint.gguf.directory import read_places
from specsot.checkpoint.gguf.layout import Place
from specsot.errors import ModelError

# Bytes of a tensor as the file stores them.
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
# Numbers. How many are dequantized at once, as one row. Chosen by measurement: 1.2 to 2.9 times as fast as
# the gguf package, which takes 16 rows at a time (Q4_1, Q8_0, Q4_K, Q6_K, IQ3_S; 768 and 4,096 columns; one
# thread).
AT_ONCE = 1 << 18


class GgufTensors:
    """The tensors of a GGUF file, with the interface of what `safetensors.safe_open` returns.

    Methods raise ModelError if the file cannot be read.
    """

    def __init__(self, pointer: Path) -> None:
        """Read where each tensor of the file lies.

        pointer: The file in a model directory that names each tensor's place; see `gguf.directory`.
        """
        self._places = read_places(pointer)

    def keys(self) -> Iterable[str]:
        """Return the names of all tensors of the file."""
        return self._places.keys()

    def place(self, name: str) -> Place:
        """Return where a tensor's bytes lie. Raises KeyError if the file has no such tensor.

        name: Name of the tensor in the model.
        """
        return self._places[name]

    def get_tensor(self, name: str) -> Tensor:
        """Read and dequantize a tensor, and return it in fp32.

        The result has the shape, the order of rows and columns and the values of the published model: what
        the file stores in another order is put back, and what a converter did to all numbers is undone.

        name: Name of the tensor in the model.

        Raises KeyError if the file has no such tensor, ModelError if the file cannot be read.
        """
        place = self._places[name]
        rows = self._map(name)
        if place.order:
            rows = rows[_stored_rows(place)]
        numbers = np.empty(place.shape, np.float32)
        rows_out = numbers.reshape(len(rows), -1)
        rows_at_a_time = max(AT_ONCE // rows_out.shape[1], 1)
        for first in range(0, len(rows), rows_at_a_time):
            part = rows[first : first + rows_at_a_time]
            rows_out[first : first + rows_at_a_time] = decode_rows(part, place.kind)
        if place.columns:
            axes, order = place.columns
            numbers = numbers[:, np.arange(place.shape[1]).reshape(axes).transpose(order).flatten()]
        if place.log:
            numbers = np.log(-numbers)
        return torch.from_numpy(numbers - np.float32(place.more) if place.more else numbers)

    def blocks(self, name: str) -> StoredRows | None:
        """Return a matrix as the blocks that the file stores, mapped and not decoded.

        Return None if its columns have to be reordered, because a block has numbers of several columns.

        name: Name of the tensor in the model. No constant was added to its numbers, and it has two
            dimensions.

        Raises KeyError if the file has no such tensor, ModelError if the file cannot be read.
        """
        place = self._places[name]
        if place.columns:
            return None
        stored_rows = _stored_rows(place)
        outputs = np.empty_like(stored_rows)
        outputs[stored_rows] = np.arange(len(stored_rows))
        part = StoredPart(self._map(name), place.kind, outputs)
        return StoredRows(torch.Size(place.shape), (part,))

    def _map(self, name: str) -> Bytes:
        """Return a tensor's bytes, mapped: [rows, bytes of a row], in the order of the file.

        name: Name of the tensor in the model.

        Raises KeyError if the file has no such tensor, ModelError if the file cannot be read.
        """
        place = self._places[name]
        try:
            stored: Bytes = np.memmap(place.file, np.uint8, "r", place.begin, (place.bytes,))
        except (OSError, ValueError) as error:
            raise ModelError(f"{place.file}: {name}: {error}") from None
        return stored.reshape(place.shape[0], -1)


def _stored_rows(place: Place) -> NDArray[np.int64]:
    """Return by row of a tensor the row in which the file stores it.

    place: Where the tensor lies, and how its rows have to be reordered.

    # 1 row kept, axes (2, 2), order (1, 0): 0 1 3 2 4
    """
    rows = np.arange(place.shape[0])
    if place.order is None:
        return rows
    axes, order = place.order
    return np.concatenate((rows[: place.kept], rows[place.kept :].reshape(axes).transpose(order).flatten()))


class StoredPart(NamedTuple):
    """Rows of a matrix as one tensor of a GGUF file stores them.

    rows: uint8 [rows, bytes of a row], mapped.
    kind: ggml's number of the tensor's type.
    outputs: int64 [rows], the output of the matrix that each row is.
    """

    rows: Bytes
    kind: int
    outputs: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A matrix [out, in] as the blocks of a GGUF file, perhaps of several tensors.

    shape: (out, in).
    parts: The tensors. Together they have each output once.
    """

    shape: torch.Size
    parts: tuple[StoredPart, ...]

    @property
    def device(self) -> torch.device:
        """Return the device of the matrix: the CPU."""
        return torch.device("cpu")

    def decode(self, numbers: Tensor) -> Tensor:
        """Return some rows in fp32, [rows, in].

        numbers: LongTensor [rows], the outputs whose rows are decoded.
        """
        decoded = torch.empty(len(numbers), self.shape[1])
        for part in self.parts:
            stored_row = np.full(self.shape[0], -1)
            stored_row[part.outputs] = np.arange(len(part.outputs))
            of_numbers = stored_row[numbers.numpy()]
            (found,) = np.nonzero(of_numbers >= 0)
            decoded[torch.from_numpy(found)] = torch.from_numpy(
                decode_rows(part.rows[of_numbers[found]], part.kind)
            )
        return decoded


def join_rows(matrices: Sequence[StoredRows], join: Callable[..., Tensor]) -> StoredRows:
    """Return several matrices as one, whose outputs are in the order that a function gives them.

    matrices: The matrices, which have the same number of inputs.
    join: Joins tensors [outputs, ...], one of each matrix, along their outputs.

    # matrices of 2 and 1 outputs; join puts the last one first: output 1, 2 and 0
    """
    counts = [matrix.shape[0] for matrix in matrices]
    numbers = torch.arange(sum(counts))
    outputs = torch.empty_like(numbers)
    outputs[join(*numbers.split(counts))] = numbers
    parts = [
        StoredPart(part.rows, part.kind, of_matrix.numpy()[part.outputs])
        for matrix, of_matrix in zip(matrices, outputs.split(counts))
        for part in matrix.parts
    ]
    return StoredRows(torch.Size((len(numbers), matrices[0].shape[1])), tuple(parts))


def decode_rows(rows: Bytes, kind: int) -> NDArray[np.float32]:
    """Return rows in fp32, [rows, in], decoded by the package gguf.

    rows: uint8 [rows, bytes of a row].
    kind: ggml's number of the rows' type.
    """
    from gguf import GGMLQuantizationType, dequantize

    return dequantize(rows.reshape(1, -1), GGMLQuantizationType(kind)).reshape(len(rows), -1)
