"""Reads a model's tensors from files in which some matrices are published quantized."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specsot.checkpoint.quantization_config import MARKS, Published
from specsot.errors import ModelError
from specsot.members import Quantization
from specsot_model.decoding import Codes, StoredMatrix, codes_of, decode, quant_state
from specsot_model.stored_form import lm_head_quantization, published_of
from specsot_model.weights import WeightFiles, Weights


def open_weights(
    directory: Path, allow_pickle_bin: bool = False, quantization: Quantization | None = None
) -> WeightFiles | PublishedWeights:
    """Return the opened weight files of a base model, whether they are quantized (`PublishedWeights`) or not.

    Raises ModelError if the files cannot be read, and InvalidRequest if they are quantized already in another
    form than `quantization`.

    directory: Folder of the model.
    allow_pickle_bin: Whether pickled weight files (`*.bin`) may be read.
    quantization: Form in which its matrices are to be stored; None: any form.
    """
    files = WeightFiles(directory, allow_pickle_bin)
    published = published_of(directory, quantization)
    return files if published is None else PublishedWeights(files, published)


class PublishedWeights(Weights):
    """The tensors of quantized files under the names that the model has for them.

    `tensor` decodes a quantized matrix to floats; `rounded` returns its codes.

    files: The weight files.
    published: How they are quantized.
    """

    def __init__(self, files: WeightFiles, published: Published) -> None:
        """Find which matrices the files hold quantized, by their tensors' names.

        files: The weight files.
        published: How they are quantized.
        """
        self.published = published
        self._files = files
        self._modules = published.modules(files.names())
        self._names = dict.fromkeys(published.logical(name, self._modules) for name in files.names())

    @property
    def complete(self) -> bool:
        """Tell whether every weight file is present in the directory."""
        return self._files.complete

    @property
    def stored(self) -> int:
        """Return the bytes of all weight files. Raises FileNotFoundError if one of them is not present."""
        return self._files.stored

    def names(self) -> tuple[str, ...]:
        """Return the names that the model has for its tensors."""
        return tuple(self._names)

    def __contains__(self, name: str) -> bool:
        """Tell whether the files have a tensor of the model, quantized or not.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return name in self._names

    def where(self, name: str) -> str:
        """Return the path of the file that holds a tensor or, of a quantized matrix, one of its parts.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        module = self._module(name)
        candidates = (f"{module}{mark}" for mark in MARKS[self.published.method])
        return self._files.where(
            next((candidate for candidate in candidates if candidate in self._files), name)
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor once it is decoded.

        Some formats store the shape as a small tensor, which is read. ModelError is raised if there is no
        such tensor. All experts of MXFP4 give [experts, in, out].

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
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

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        dtype: Type of the result.
        device: Device of the result.

        Raises ModelError if the tensor cannot be read, and if a weight is stored in 8 bits but has no scale.
        """
        module = self._module(name)
        if module is not None:
            matrix = self._decode(module, device).dense(dtype)
            shape = self.shape(name)
            return matrix if len(shape) == 2 else matrix.unflatten(0, (shape[0], -1)).transpose(1, 2)
        tensor = self._files.raw(name, device)
        if name.endswith(".weight") and (not tensor.is_floating_point() or tensor.itemsize == 1):
            raise ModelError(
                f"{self.where(name)}: {name} is {tensor.dtype},"
                f" but the {self.published} files have no scale for it"
            )
        return tensor.to(dtype)

    def rounded(self, name: str, form: Quantization, device: torch.device | str) -> Codes | None:
        """Return the codes of a quantized matrix, or None if the matrix is published in floats.

        ModelError is also raised if a tensor of the matrix is missing.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        form: The form: "int8", "int4" or "fp8".
        device: Device of the result.

        Raises ModelError if `form` cannot hold the codes.
        """
        module = self._module(name)
        if module is None:
            return None
        try:
            return codes_of(self._decode(module, device), form)
        except (ValueError, RuntimeError) as error:
            message = (
                f"{self.where(name)}: {form} cannot store the codes of {name} ({error});"
                " set --dtype, which decodes them"
            )
            raise ModelError(message) from None

    def form(self, name: str, model_form: Quantization | None) -> Quantization | None:
        """Return the form in which a matrix is stored: where int4 is wanted, a matrix that is published in
        floats is int8.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        model_form: The form of the model's matrices; None: floats.
        """
        return lm_head_quantization(model_form) if self._module(name) is None else model_form

    def _decode(self, module: str, device: torch.device | str) -> StoredMatrix:
        """Read the quantized matrix of a module. Raises ModelError if its tensors are missing or do not fit.

        module: Name of the module, or of the tensor that holds all experts.
        device: Device of the result.
        """
        return decode(
            module,
            lambda part: self._part(module, part, device),
            lambda part: f"{module}{part}" in self._files,
            self.published,
        )

    def _part(self, module: str, suffix: str, device: torch.device | str = "cpu") -> Tensor:
        """Return one stored tensor of a quantized matrix. Raises ModelError if it is missing.

        module: Name of the module.
        suffix: What follows the module's name in the tensor's name, such as ".qweight".
        device: Device of the result.
        """
        return self._files.raw(f"{module}{suffix}", device)

    def _module(self, name: str) -> str | None:
        """Return the module of the quantized matrix that has this name, or None for any other tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        suffix = self.published.suffix
        module = name.removesuffix(suffix)
        return module if name.endswith(suffix) and module in self._modules else None
