"""Reads a model's tensors from files in which some matrices are published quantized."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from specsot.checkpoint.config import read_config, text_fields
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.quantization_config import MARKS, Published, read_published
from specsot.errors import InvalidRequest, ModelError
from specsot.members import Quantization
from specsot.service.options import ModelOptions
from specsot_model.decoding import Codes, StoredMatrix, codes_of, decode, quant_state
from specsot_model.fp8 import multiplies_fp8
from specsot_model.int8 import multiplies_int8
from specsot_model.linear import of_lm_head, packs
from specsot_model.weights import WeightFiles, Weights

Given = TypeVar("Given", bound=ModelOptions)


def open_weights(
    directory: Path, allow_pickle_bin: bool = False, quantization: Quantization | None = None
) -> WeightFiles | PublishedWeights:
    """Open the weight files of a base model, whether they are quantized or not.

    quantization: Form in which its matrices are to be stored.

    Raises ModelError if the files cannot be read, and InvalidRequest if they are quantized already in another
    form than `quantization`.
    """
    files = WeightFiles(directory, allow_pickle_bin)
    published = published_of(directory, quantization)
    return files if published is None else PublishedWeights(files, published)


def published_of(directory: Path, quantization: Quantization | None = None) -> Published | None:
    """Return how a model's files are quantized, or None if they are not.

    quantization: The form that is asked for; None: any. Another form than that of the files raises
        InvalidRequest, because weights would be rounded twice.

    Raises like `open_weights`.
    """
    config = directory / "config.json"
    published = read_published(text_fields(read_json(config), config), config) if config.is_file() else None
    if published and quantization not in (None, published.form):
        fits = f" or say {published.form}" if published.form else ""
        raise InvalidRequest(
            f"{directory} is quantized already ({published}): leave out --quantization{fits}", "quantization"
        )
    return published


def as_published(options: Given, base: Path) -> Given:
    """Set `options.quantization` to the form that can hold the codes of a quantized model as they are.

    The options stay unchanged if the user gave a quantization or a dtype, or if no kernels of this machine
    run that form. Raises ModelError if the config of `base` cannot be read.
    """
    config = read_config(base)
    form = config.published.form if config.published else None
    if form is None or options.quantization or options.dtype != "auto":
        return options
    device = torch.device(options.device)
    if packs(form, device):
        runs = find_spec("numba") is not None
    else:
        # Experts run as one grouped product, and batch-invariant layers in int8 or floats; other forms are
        # decoded to --dtype.
        decoded = config.routing or (options.batch_invariant and form != "int8")
        multiplied = {"fp8": multiplies_fp8, "int8": multiplies_int8}.get(form)
        runs = not decoded and multiplied is not None and multiplied(device)
    return replace(options, quantization=form) if runs else options


class PublishedWeights(Weights):
    """The tensors of quantized files under the names that the model has for them.

    `tensor` decodes a quantized matrix to floats; `rounded` returns its codes.
    """

    def __init__(self, files: WeightFiles, published: Published) -> None:
        self.published = published
        self._files = files
        self._modules = published.modules(files.names())
        self._names = dict.fromkeys(published.logical(name, self._modules) for name in files.names())

    @property
    def complete(self) -> bool:
        return self._files.complete

    @property
    def stored(self) -> int:
        return self._files.stored

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def where(self, name: str) -> str:
        module = self._module(name)
        marks = (f"{module}{mark}" for mark in MARKS[self.published.method])
        return self._files.where(next((one for one in marks if one in self._files), name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor once it is decoded.

        Some formats store the shape as a small tensor, which is read.
        """
        module = self._module(name)
        if module is None:
            return self._files.shape(name)
        if f"{module}_blocks" in self._files:
            experts, outputs, groups, pairs = self._files.shape(f"{module}_blocks")
            return experts, groups * pairs * 2, outputs
        if f"{module}.qweight" in self._files:
            rows, columns = self._files.shape(f"{module}.qweight")
            packed = 32 // self.published.numbers(module).bits
            awq = self.published.method == "awq"
            return (columns * packed, rows) if awq else (columns, rows * packed)
        if f"{module}.weight_shape" in self._files:
            return tuple(self._part(module, ".weight_shape").tolist())
        if f"{module}.weight_packed" in self._files:
            outputs, pairs = self._files.shape(f"{module}.weight_packed")
            return outputs, 2 * pairs
        for kind in ("nf4", "fp4"):
            if f"{module}.weight.quant_state.bitsandbytes__{kind}" in self._files:
                state = quant_state(self._part(module, f".weight.quant_state.bitsandbytes__{kind}"))
                return tuple(state["shape"])
        return self._files.shape(name)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return a tensor in floats; a quantized matrix is decoded.

        Raises ModelError, also if a weight is stored in 8 bits but has no scale.
        """
        module = self._module(name)
        if module is not None:
            made = self._decode(module, device).dense(dtype)
            shape = self.shape(name)
            return made if len(shape) == 2 else made.unflatten(0, (shape[0], -1)).transpose(1, 2)
        found = self._files.raw(name, device)
        if name.endswith(".weight") and (not found.is_floating_point() or found.itemsize == 1):
            raise ModelError(
                f"{self.where(name)}: {name} is {found.dtype}, and {self.published} has no scale of it there"
            )
        return found.to(dtype)

    def rounded(self, name: str, form: Quantization, device: torch.device | str) -> Codes | None:
        """Return the codes of a quantized matrix; see `Weights.rounded`.

        Raises ModelError if `form` cannot hold the codes.
        """
        module = self._module(name)
        if module is None:
            return None
        try:
            return codes_of(self._decode(module, device), form)
        except (ValueError, RuntimeError) as error:
            said = (
                f"{self.where(name)}: {name} is not held as it is in {form} ({error}); a --dtype decodes it"
            )
            raise ModelError(said) from None

    def form(self, name: str, wanted: Quantization | None) -> Quantization | None:
        """Return the form of a matrix: a matrix that is published in floats is int8 where int4 is wanted."""
        return of_lm_head(wanted) if self._module(name) is None else wanted

    def _decode(self, module: str, device: torch.device | str) -> StoredMatrix:
        """Read the quantized matrix of a module. Raises ModelError."""
        return decode(
            module,
            lambda part: self._part(module, part, device),
            lambda part: f"{module}{part}" in self._files,
            self.published,
        )

    def _part(self, module: str, part: str, device: torch.device | str = "cpu") -> Tensor:
        return self._files.raw(f"{module}{part}", device)

    def _module(self, name: str) -> str | None:
        """Return the module of the quantized matrix that has this name, or None for any other tensor."""
        suffix = self.published.suffix
        module = name.removesuffix(suffix)
        return module if name.endswith(suffix) and module in self._modules else None
