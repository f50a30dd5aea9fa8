"""Reads tensors out of a GGUF file: maps each tensor's own bytes and dequantizes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
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

    def get_slice(self, name: str) -> Shaped:
        """Return an object with a tensor's shape, without reading the tensor. Raises KeyError if the file has
        no such tensor.

        name: Name of the tensor in the model.
        """
        return Shaped(self._places[name])

    def get_tensor(self, name: str) -> Tensor:
        """Read and dequantize a tensor, and return it in fp32.

        The result has the shape, the order of rows and the values of the published model: rows that the file
        stores in another order are put back, and a constant that was added to the file's numbers is
        subtracted.

        name: Name of the tensor in the model.

        Raises KeyError if the file has no such tensor, ModelError if the file cannot be read.
        """
        from gguf import GGMLQuantizationType, dequantize

        place = self._places[name]
        try:
            stored: Bytes = np.memmap(place.file, np.uint8, "r", place.begin, (place.bytes,))
        except (OSError, ValueError) as error:
            raise ModelError(f"{place.file}: {name}: {error}") from None
        rows = stored.reshape(place.shape[0], -1)
        if place.order:
            axes, order = place.order
            rows = rows.reshape(*axes, -1).transpose(*order, len(axes)).reshape(rows.shape)
        kind = GGMLQuantizationType(place.kind)
        numbers = np.empty(place.shape, np.float32)
        rows_out = numbers.reshape(len(rows), -1)
        rows_at_a_time = max(AT_ONCE // rows_out.shape[1], 1)
        for first in range(0, len(rows), rows_at_a_time):
            part = rows[first : first + rows_at_a_time]
            rows_out[first : first + rows_at_a_time] = dequantize(part.reshape(1, -1), kind).reshape(
                len(part), -1
            )
        return torch.from_numpy(numbers - np.float32(place.more) if place.more else numbers)


class Shaped:
    """The shape of a tensor, with the interface of a safetensors slice.

    place: Where the tensor lies, and its shape.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def get_shape(self) -> list[int]:
        """Return the size of each dimension."""
        return list(self._place.shape)
