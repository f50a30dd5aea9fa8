"""Reads named tensors from a model directory's weight files on demand, or takes them from memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specsot.checkpoint.borrowed import borrowed_of
from specsot.checkpoint.families import text_name
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.gguf.finding import POINTER
from specsot.checkpoint.hub import fetched, offers, snapshot_of
from specsot.errors import ModelError, one_line
from specsot.members import Quantization
from specsot_model.decoding import Codes
from specsot_model.gguf_tensors import GgufTensors, StoredRows
from specsot_model.linear import Packed
from specsot_model.packed_files import PackedFiles, packed_files_of
from specsot_model.stored_form import uses_packed_kernels

# Names of weight files, and of the indices that list several of them.
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLE_INDEX = "pytorch_model.bin.index.json"
PICKLE = "pytorch_model.bin"
# Bytes. After so many bytes were read, the file is mapped anew, so that pages that were read leave memory.
# Untuned.
REMAP_BYTES = 64 << 20


class Weights(ABC):
    """A source of tensors by name. Every failure is a ModelError of one line."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors of this source."""

    @abstractmethod
    def where(self, name: str) -> str:
        """Return where a tensor comes from, such as a file, for messages.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading the tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return a tensor, converted to a dtype and copied to a device.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        dtype: Type of the result.
        device: Device of the result.

        Raises ModelError if the tensor cannot be read.
        """

    def __contains__(self, name: str) -> bool:
        """Tell whether this source has a tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return name in self.names()

    def under(self, module: str) -> list[str]:
        """Return the names of all tensors of a module, such as a layer: those that begin with "module.",
        sorted.

        The list is empty if there are none. The names are searched by bisection, because a large model has
        tens of thousands.

        module: Name of the module, such as "model.layers.3", without a dot at the end.
        """
        first = bisect_left(self._sorted_names, f"{module}.")
        # "/" is the character after ".", so this finds the end of the names that begin with "module.".
        return self._sorted_names[first : bisect_left(self._sorted_names, f"{module}/", first)]

    @cached_property
    def _sorted_names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self.names())

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Return a tensor that must have a certain shape.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        shape: The shape that the config asks for.
        dtype: Type of the result.
        device: Device of the result.

        Raises ModelError if the tensor has another shape, or cannot be read.
        """
        self.check(name, shape)
        return self.tensor(name, dtype, device)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise a ModelError that names both shapes if a tensor has another shape than the config asks for.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        shape: The shape that the config asks for.
        """
        stored_shape = self.shape(name)
        if stored_shape != shape:
            raise ModelError(
                f"{self.where(name)}: {name} has shape {list(stored_shape)},"
                f" the config asks for {list(shape)}"
            )

    def rounded(self, name: str, form: Quantization, device: torch.device | str) -> Codes | None:
        """Return a matrix that is published quantized, as its own codes in a form of this project.

        Return None if the matrix is published in floats; that is so for all matrices of this class.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        form: The form: "int8", "int4" or "fp8".
        device: Device of the result.

        Raises ModelError if the form cannot hold the codes.
        """
        return None

    def rows(self, name: str, numbers: Tensor) -> Tensor:
        """Return some rows of a matrix on the CPU, in the type in which the files have them, or in fp32.

        name: Name of the tensor in the model, such as "lm_head.weight".
        numbers: LongTensor [rows] on the CPU, the rows' numbers.

        Raises ModelError if the tensor cannot be read.
        """
        return self.tensor(name, torch.float32, "cpu")[numbers]

    def blocks(self, name: str) -> StoredRows | None:
        """Return a matrix as the blocks of a GGUF file, without decoding it.

        Return None if the matrix is stored otherwise; that is so for all matrices of this class.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".

        Raises ModelError if the file cannot be read.
        """
        return None

    def packed_files(self, form: Quantization) -> PackedFiles | None:
        """Return the files in which packed weights of these tensors are kept; None if they are not kept, as
        for this class.

        form: Form of the model's matrices, "int8" or "int4".
        """
        return None

    def form(self, name: str, model_form: Quantization | None) -> Quantization | None:
        """Return the form in which a matrix is stored; None means floats.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        model_form: The form that the model's matrices are to have. This class returns it for every matrix.
        """
        return model_form

    def ggml_type(self, name: str) -> int | None:
        """Return ggml's number of a tensor's type in a GGUF file; None if the tensor is in no such file.

        This class returns None for every tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return None


class HeldWeights(Weights):
    """Tensors that are in memory already. A tensor that needs no conversion is not copied."""

    def __init__(self, tensors: Mapping[str, Tensor], owner: str) -> None:
        """Take the tensors as they are.

        tensors: The tensors by name.
        owner: Name of their source, for messages.
        """
        self._tensors = {text_name(name): tensor for name, tensor in tensors.items()}
        self._owner = owner

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._tensors)

    def where(self, name: str) -> str:
        """Return the name of the source, which is the same for every tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return self._owner

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ModelError if there is no such tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return tuple(self._tensor_of(name).shape)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return a tensor, converted to a dtype and copied to a device; without conversion it is not copied.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        dtype: Type of the result.
        device: Device of the result.

        Raises ModelError if there is no such tensor, or if its numbers were never loaded.
        """
        tensor = self._tensor_of(name)
        if tensor.is_meta:
            raise ModelError(f"{self._owner}: {name} is on no device (it was never loaded, or offloaded)")
        return tensor.detach().to(device=device, dtype=dtype)

    def _tensor_of(self, name: str) -> Tensor:
        """Return a tensor as it is in memory. Raises ModelError if there is no such tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        if name not in self._tensors:
            raise ModelError(f"{self._owner}: no tensor {name}")
        return self._tensors[name]


class WeightFiles(Weights):
    """Tensors from a model directory: one safetensors file, several with an index, or a GGUF file.

    A file that is missing, but that the Hugging Face hub or another member of the fleet has, is fetched when
    one of its tensors is needed. Every failure is a ModelError of one line.
    """

    def __init__(
        self, directory: Path, allow_pickle_bin: bool = False, remap_bytes: int = REMAP_BYTES
    ) -> None:
        """Find the weight files, and read which tensors they have.

        Nothing but headers is read. ModelError is raised if the directory does not exist, has no weight files
        that may be read, or has a malformed index, or if a single file is broken.

        directory: Folder of the model.
        allow_pickle_bin: Read pytorch_model.bin if there is no safetensors file, by restricted unpickling of
            tensors only.
        remap_bytes: Bytes that are read of all files before the file that was read last is mapped anew.
        """
        self._directory = directory
        self._remap_bytes = remap_bytes
        self._borrowed = borrowed_of(directory)
        self._opened: dict[str, Any] = {}
        # By file that was opened: the names of its tensors, because handles list them anew on every call.
        self._held: dict[str, frozenset[str]] = {}
        # Bytes that were read since a file was last mapped.
        self._read = 0
        # By form of the matrices: the files in which packed weights are kept, or None.
        self._packed_files: dict[Quantization, PackedFiles | None] = {}
        listed = _find_files(directory, allow_pickle_bin)
        # A single file lists its own tensors.
        files = dict.fromkeys(self._open_file(listed).keys(), listed) if isinstance(listed, str) else listed
        self._stored_names = {text_name(name): name for name in files}
        self._files = {name: files[stored] for name, stored in self._stored_names.items()}

    @property
    def complete(self) -> bool:
        """Tell whether every weight file is present in the directory."""
        return self._borrowed is None and all(
            (self._directory / file).exists() for file in set(self._files.values())
        )

    @property
    def stored(self) -> int:
        """Return the bytes of all weight files. Raises FileNotFoundError if one of them is not present."""
        return sum((self._directory / file).stat().st_size for file in set(self._files.values()))

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._files)

    def __contains__(self, name: str) -> bool:
        """Tell whether the files have a tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return name in self._files

    def where(self, name: str) -> str:
        """Return the path of the file that holds a tensor. Raises KeyError if there is no such tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return str(self._directory / self._files[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading the tensor. Raises ModelError if there is no such tensor.

        ModelError is also raised if the file is broken or lacks the tensor that the index promises.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        source = self._source(name)
        stored = self._stored_names[name]
        if isinstance(source, dict):
            return tuple(source[stored].shape)
        if isinstance(source, GgufTensors):
            return source.place(stored).shape
        return tuple(source.get_slice(stored).get_shape())

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return a tensor, converted to a dtype and copied to a device. Raises ModelError if it cannot be
        read.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        dtype: Type of the result.
        device: Device of the result.
        """
        return self.raw(name, "cpu").to(device=device, dtype=dtype)

    def raw(self, name: str, device: torch.device | str) -> Tensor:
        """Return a tensor in the dtype in which it is stored. Raises ModelError if it cannot be read.

        If only another member of the fleet has the bytes, they are fetched first. ModelError is also raised
        if there is no such tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        device: Device of the result.
        """
        source = self._source(name)
        stored = self._stored_names[name]
        self._borrow(name, source)
        try:
            tensor = source[stored] if isinstance(source, dict) else source.get_tensor(stored)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{self.where(name)}: {name}: {one_line(error)}") from None
        if not isinstance(source, dict):
            self._count_read(self._files[name], tensor.nbytes)
        return tensor.to(device)

    def rows(self, name: str, numbers: Tensor) -> Tensor:
        """Return some rows of a matrix; of a GGUF file, only these are decoded. Raises ModelError if the
        tensor cannot be read.

        name: Name of the tensor in the model, such as "lm_head.weight".
        numbers: LongTensor [rows] on the CPU, the rows' numbers.
        """
        stored = self.blocks(name)
        return self.raw(name, "cpu")[numbers] if stored is None else stored.decode(numbers)

    def blocks(self, name: str) -> StoredRows | None:
        """Return a matrix as the blocks of a GGUF file, mapped; None if the files are no GGUF file.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".

        Raises ModelError if there is no such tensor, or the file cannot be read.
        """
        source = self._source(name)
        if not isinstance(source, GgufTensors):
            return None
        self._borrow(name, source)
        return source.blocks(self._stored_names[name])

    def ggml_type(self, name: str) -> int | None:
        """Return ggml's number of a tensor's type; None if the files are no GGUF file.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".

        Raises ModelError if there is no such tensor.
        """
        source = self._source(name)
        return source.place(self._stored_names[name]).kind if isinstance(source, GgufTensors) else None

    def packed_files(self, form: Quantization) -> PackedFiles | None:
        """Return the files in which packed weights of a GGUF file are kept; None if they are not kept.

        form: Form of the model's matrices, "int8" or "int4".
        """
        if form not in self._packed_files:
            is_gguf = self._borrowed is None and (self._directory / POINTER).is_file()
            self._packed_files[form] = packed_files_of(self._directory, form) if is_gguf else None
        return self._packed_files[form]

    def fetch(self, names: Iterable[str]) -> None:
        """Make sure that the bytes of some tensors are present; fetch them from another member of the fleet
        if not.

        names: Names of the tensors. Raises ModelError if one of them does not exist.
        """
        for name in names:
            self._borrow(name, self._source(name))

    def _borrow(self, name: str, source: Any) -> None:
        """Fetch a tensor's bytes if only another member of the fleet has them; else do nothing.

        For a GGUF file only the tensor's own bytes are asked for.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        source: The opened file that holds the tensor.
        """
        if self._borrowed and isinstance(source, GgufTensors):
            place = source.place(name)
            self._borrowed.need(Path(place.file).name, place.begin, place.begin + place.bytes)
        elif self._borrowed:
            self._borrowed.need_tensor(self._files[name], self._stored_names[name])

    def _count_read(self, file: str, size: int) -> None:
        """Count bytes that were read, and close the file after `remap_bytes` bytes.

        A mapping keeps what was read in memory, next to the tensors.

        file: Name of the file that was read.
        size: Number of bytes that were read.
        """
        self._read += size
        if self._read >= self._remap_bytes:
            self._read = 0
            del self._opened[file]

    def _source(self, name: str) -> Any:
        """Return the opened file that holds a tensor. Raises ModelError if there is none.

        ModelError is also raised if the index names a file that does not have the tensor, or the file is
        broken.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        if name not in self._files:
            raise ModelError(f"{self._directory}: no tensor {name} in the weight files")
        source = self._open_file(self._files[name])
        if self._stored_names[name] not in self._held[self._files[name]]:
            raise ModelError(f"{self.where(name)}: tensor {name} is missing")
        return source

    def _open_file(self, file: str) -> Any:
        """Return a weight file, opened if it is not open yet; fetch it first if it is missing.

        If another member of the fleet has the file, only its header is fetched here.

        file: Name of the file within the directory.

        Raises ModelError if the file is broken.
        """
        if file not in self._opened:
            if self._borrowed:
                self._borrowed.need_header(file)
            self._opened[file] = opened = _open_file(fetched(self._directory / file))
            self._held.setdefault(file, frozenset(opened.keys()))
        return self._opened[file]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Loads tensors by `fetch(name, shape)`, all in one dtype on one device.

    Raises a ModelError that names both shapes if a tensor has another shape, or the tensor if it is missing.

    files: Source of the tensors.
    dtype: Type of the tensors.
    device: Device of the tensors.
    quantization: Form that products convert their weights to; None keeps the dtype.
    short_lm_head: Whether the lm_head is int4 on a CPU where other matrices are; else it is int8 there, which
        changes less of the text.
    """

    files: Weights
    dtype: torch.dtype
    device: torch.device | str
    quantization: Quantization | None = None
    short_lm_head: bool = False

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of this shape. Raises ModelError if it is missing or has another shape.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        shape: The shape that the config asks for.
        """
        return self.files.expect(name, shape, self.dtype, self.device)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor | Codes | StoredRows:
        """Return the matrix of a product: its codes if it is published quantized in this form, the blocks of
        a GGUF file if they are to be packed for int8, and else its floats.

        Floats are returned whenever `quantization` is None.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        shape: (out, in), the shape that the config asks for.

        Raises ModelError if the matrix is missing or has another shape.
        """
        blocks = self.blocks(name, shape, self.form(name))
        if blocks is not None:
            return blocks
        codes = self.files.rounded(name, self.quantization, self.device) if self.quantization else None
        if codes is None:
            return self(name, shape)
        self.files.check(name, shape)
        return codes

    def blocks(self, name: str, shape: tuple[int, ...], form: Quantization | None) -> StoredRows | None:
        """Return a matrix as the blocks of a GGUF file, if it is to be packed in int8; else None.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        shape: (out, in), the shape that the config asks for.
        form: Form in which the matrix is stored once it is loaded.

        Raises ModelError if the matrix is missing or has another shape.
        """
        if form != "int8" or not self._packs:
            return None
        self.files.check(name, shape)
        return self.files.blocks(name)

    @property
    def _packs(self) -> bool:
        """Tell whether matrices are packed for the CPU kernels, from fp32 numbers."""
        return uses_packed_kernels(self.quantization, self.device) and self.dtype == torch.float32

    def find_packed(self, name: str, shape: tuple[int, int], form: Quantization | None) -> Packed | None:
        """Return a packed weight that an earlier process kept; None if there is none.

        name: Name of the weight; see `keep_packed`.
        shape: (out, in) of the weight.
        form: Form in which the weight is stored; None: floats, which are not kept.
        """
        kept = self._packed_files if form else None
        return kept.find(name, shape) if kept else None

    def keep_packed(self, name: str, packed: Packed) -> Packed:
        """Keep a packed weight for later processes, and return it, mapped if it could be kept.

        name: Name of the weight: that of its first tensor.
        packed: The weight, which `find_packed` did not find.
        """
        kept = self._packed_files
        return kept.keep(name, packed) if kept else packed

    @property
    def _packed_files(self) -> PackedFiles | None:
        """Return the files in which packed weights are kept; None if weights are not packed or not kept."""
        return self.files.packed_files(self.quantization) if self.quantization and self._packs else None

    def form(self, name: str) -> Quantization | None:
        """Return the form in which a matrix is stored once it is loaded; None means floats.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return self.files.form(name, self.quantization)

    def __contains__(self, name: str) -> bool:
        """Tell whether the files have a tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return name in self.files


def has_files(directory: Path, allow_pickle_bin: bool = False) -> bool:
    """Tell whether all weight files that `WeightFiles` would read are present in the directory.

    True if all files that an index names, a single weight file or a GGUF pointer file exist. safetensors
    files are looked for first, and an index before a single file. False if there are none, if a file that the
    index names is missing, or if the index does not map tensors to files. ModelError is raised if an index is
    no JSON object.

    directory: Folder of the model.
    allow_pickle_bin: Whether pickled weight files (`*.bin`) count.
    """
    kinds = [(INDEX, SINGLE), (PICKLE_INDEX, PICKLE)] if allow_pickle_bin else [(INDEX, SINGLE)]
    for index, single in kinds:
        if (directory / index).exists():
            file_of = read_json(directory / index).get("weight_map")
            return isinstance(file_of, dict) and all(
                (directory / str(file)).exists() for file in set(file_of.values())
            )
        if (directory / single).exists():
            return True
    return (directory / POINTER).is_file()


def _find_files(directory: Path, allow_pickle_bin: bool) -> dict[str, str] | str:
    """Return the file of each tensor as the index says, or the name of the single file that holds all.

    A GGUF file comes first: the result is then POINTER. After it, safetensors before pickled files, and an
    index before a single file; files in the directory come before those that can only be fetched. ModelError
    is also raised if the directory does not exist; the message for a directory that has pickled files only
    names the options that allow them.

    directory: Folder of the model. A single file that is missing counts if the Hugging Face hub offers it.
        ModelError is raised if the hub cannot be asked.
    allow_pickle_bin: Whether pickled weight files (`*.bin`) may be read.

    Raises ModelError if the directory has no weight files that may be read.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such model directory")
    if (directory / POINTER).is_file():
        return POINTER
    kinds = [(INDEX, SINGLE), (PICKLE_INDEX, PICKLE)] if allow_pickle_bin else [(INDEX, SINGLE)]
    for index, single in kinds:
        if (directory / index).exists():
            return _read_index(directory / index)
        if (directory / single).exists():
            return single
    for _, single in kinds:
        if offers(directory / single):
            return single
    if (directory / PICKLE).exists() or (directory / PICKLE_INDEX).exists() or offers(directory / PICKLE):
        raise ModelError(
            f"{directory}: only {PICKLE}, which is read when asked for: "
            "--model-format bin (a base), --draft-format bin (a head)"
        )
    raise ModelError(f"{directory}: no {SINGLE} and no {INDEX}")


def _read_index(source: Path) -> dict[str, str]:
    """Return the file name of each tensor, by tensor name, from an index.

    A malformed index is one without a `weight_map` from strings to strings, or with a file name that has a
    folder in it.

    source: Path of the index file.

    Raises ModelError if the index is malformed, or names a file that is missing and cannot be fetched.
    """
    files = read_json(source).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(f"{source}: weight_map must map tensor names to file names")
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise ModelError(f"{source}: {file!r} is not a file name")
        if not (source.parent / file).is_file() and not (snapshot_of(source) or borrowed_of(source.parent)):
            raise ModelError(f"{source.parent / file}: no such file, but {source.name} names it")
    return files


def _open_file(path: Path) -> Any:
    """Return an opened weight file: `GgufTensors` for a GGUF pointer, a dict of mapped tensors for a .bin
    file, and otherwise a safetensors handle.

    ModelError with one line that names the file is raised if it is missing or broken. A .bin file is
    unpickled with tensors only.

    path: Path of the file.
    """
    try:
        if path.name == POINTER:
            return GgufTensors(path)
        if path.suffix == ".bin":
            # Only the zip format can be mapped; older files are a plain stream.
            mapped = is_zipfile(path)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        return safe_open(path, framework="pt")
    except Exception as error:
        # torch and safetensors raise many kinds of errors for a broken file.
        raise ModelError(f"{path}: {one_line(error)}") from None
