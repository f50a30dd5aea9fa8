"""Reads tensors out of a GGUF file: of each one only its own bytes, mapped, and dequantized."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specsot.errors import ModelError
from specsot.model.gguf.directory import read_places
from specsot.model.gguf.layout import Place


class GgufTensors:
    """Has the face of what `safetensors.safe_open` returns. Raises ModelError."""

    def __init__(self, pointer: Path) -> None:
        """pointer: the file in a model directory that names each tensor's place."""
        self._places = read_places(pointer)

    def keys(self) -> Iterable[str]:
        return self._places.keys()

    def get_slice(self, name: str) -> Shaped:
        return Shaped(self._places[name])

    def get_tensor(self, name: str) -> Tensor:
        """In fp32."""
        from gguf import GGMLQuantizationType, dequantize

        place = self._places[name]
        try:
            stored = np.memmap(place.file, np.uint8, "r", place.begin, (place.bytes,))
        except (OSError, ValueError) as error:
            raise ModelError(f"{place.file}: {name}: {error}") from None
        rows = stored.reshape(*place.shape[:-1], -1)
        values = dequantize(rows, GGMLQuantizationType(place.kind)).reshape(place.shape)
        if place.order:
            axes, order = place.order
            seen = values.reshape(*axes, *place.shape[1:])
            values = seen.transpose(*order, *range(len(axes), seen.ndim)).reshape(place.shape)
        return torch.from_numpy(np.require(values, np.float32, ["C", "W", "O"]))


class Shaped:
    """A tensor that is not read."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def get_shape(self) -> list[int]:
        return list(self._place.shape)
