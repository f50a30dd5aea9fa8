"""Reads named tensors from a model directory's weight files on demand, or holds them in memory."""

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
from specsot.errors import ModelError
from specsot.members import Quantization
from specsot_model.decoding import Codes
from specsot_model.gguf_tensors import GgufTensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLE_INDEX = "pytorch_model.bin.index.json"
PICKLE = "pytorch_model.bin"
# Bytes read of a file before it is mapped anew, so that what was read leaves memory; not measured.
MAPPED = 64 << 20


class Weights(ABC):
    """Tensors by name. Every failure is a ModelError of one line."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Every tensor's name."""

    @abstractmethod
    def where(self, name: str) -> str:
        """Where a tensor is, for people."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """A tensor in this dtype, on this device. Raises ModelError where it cannot be read."""

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def under(self, part: str) -> list[str]:
        """Names of a part's tensors, such as a layer's; a large model has tens of thousands in all."""
        first = bisect_left(self._sorted, f"{part}.")
        return self._sorted[first : bisect_left(self._sorted, f"{part}/", first)]  # "/" comes after "."

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.names())

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """A tensor that must have this shape; see `check`."""
        self.check(name, shape)
        return self.tensor(name, dtype, device)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """ModelError names both shapes where a tensor has another one."""
        found = self.shape(name)
        if found != shape:
            raise ModelError(
                f"{self.where(name)}: {name} has shape {list(found)}, the config asks for {list(shape)}"
            )

    def rounded(self, name: str, form: Quantization, device: torch.device | str) -> Codes | None:
        """A matrix that others rounded, in this form, as they did; None: they left it whole."""
        return None

    def form(self, name: str, wanted: Quantization | None) -> Quantization | None:
        """What a matrix is held in where this is wanted of all."""
        return wanted


class HeldWeights(Weights):
    """Tensors that are in memory already; one that needs no conversion is not copied."""

    def __init__(self, held: Mapping[str, Tensor], owner: str) -> None:
        """owner: whose they are, for people."""
        self._held = {text_name(name): tensor for name, tensor in held.items()}
        self._owner = owner

    def names(self) -> tuple[str, ...]:
        return tuple(self._held)

    def where(self, name: str) -> str:
        return self._owner

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._find(name).shape)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        found = self._find(name)
        if found.is_meta:
            raise ModelError(f"{self._owner}: {name} is on no device (it was never loaded, or offloaded)")
        return found.detach().to(device=device, dtype=dtype)

    def _find(self, name: str) -> Tensor:
        if name not in self._held:
            raise ModelError(f"{self._owner}: no tensor {name}")
        return self._held[name]


class WeightFiles(Weights):
    """Tensors by name from `directory`: one safetensors file, or several by their index. What the hub or
    another member has and is not here is fetched once a tensor of it is wanted.

    allow_pickle_bin: also read pytorch_model.bin where there is no safetensors file (restricted
    unpickling, tensors only). Every failure is a ModelError of one line.
    """

    def __init__(self, directory: Path, allow_pickle_bin: bool = False, mapped: int = MAPPED) -> None:
        """mapped: bytes read of a file before it is mapped anew."""
        self._directory = directory
        self._mapped = mapped
        self._borrowed = borrowed_of(directory)
        self._opened: dict[str, Any] = {}
        self._held: dict[
            str, frozenset[str]
        ] = {}  # names in each file that was opened: handles list them anew
        self._read = 0  # bytes since a file was mapped
        listed = _find(directory, allow_pickle_bin)
        # A single file lists its own tensors.
        files = dict.fromkeys(self._open(listed).keys(), listed) if isinstance(listed, str) else listed
        self._stored_names = {text_name(name): name for name in files}
        self._files = {name: files[stored] for name, stored in self._stored_names.items()}

    @property
    def complete(self) -> bool:
        """Every file is here."""
        return self._borrowed is None and all(
            (self._directory / file).exists() for file in set(self._files.values())
        )

    @property
    def stored(self) -> int:
        """Bytes of the files, which must all be here."""
        return sum((self._directory / file).stat().st_size for file in set(self._files.values()))

    def names(self) -> tuple[str, ...]:
        """Every tensor's name."""
        return tuple(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def where(self, name: str) -> str:
        return str(self._directory / self._files[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        source = self._source(name)
        if isinstance(source, dict):
            return tuple(source[self._stored_names[name]].shape)
        return tuple(source.get_slice(self._stored_names[name]).get_shape())

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return self.raw(name, "cpu").to(device=device, dtype=dtype)

    def raw(self, name: str, device: torch.device | str) -> Tensor:
        """A tensor in the dtype in which it is stored. Raises ModelError where it cannot be read."""
        source = self._source(name)
        stored = self._stored_names[name]
        self._borrow(name, source)
        try:
            found = source[stored] if isinstance(source, dict) else source.get_tensor(stored)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{self.where(name)}: {name}: {_line(error)}") from None
        if not isinstance(source, dict):
            self._let_go(self._files[name], found.nbytes)
        return found.to(device)

    def fetch(self, names: Iterable[str]) -> None:
        """Have these tensors' bytes here."""
        for name in names:
            self._borrow(name, self._source(name))

    def _borrow(self, name: str, source: Any) -> None:
        """Have its bytes, where they are still another member's."""
        if self._borrowed and isinstance(source, GgufTensors):
            place = source.place(name)
            self._borrowed.need(Path(place.file).name, place.begin, place.begin + place.bytes)
        elif self._borrowed:
            self._borrowed.need_tensor(self._files[name], self._stored_names[name])

    def _let_go(self, file: str, size: int) -> None:
        """A mapping keeps all that was read of it in memory, beside what is made of that."""
        self._read += size
        if self._read >= self._mapped:
            self._read = 0
            del self._opened[file]

    def _source(self, name: str) -> Any:
        if name not in self._files:
            raise ModelError(f"{self._directory}: no tensor {name} in the weight files")
        source = self._open(self._files[name])
        if self._stored_names[name] not in self._held[self._files[name]]:
            raise ModelError(f"{self.where(name)}: tensor {name} is missing")
        return source

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            if self._borrowed:
                self._borrowed.need_header(file)
            self._opened[file] = opened = _open(fetched(self._directory / file))
            self._held.setdefault(file, frozenset(opened.keys()))
        return self._opened[file]


@dataclass(frozen=True, slots=True)
class Fetch:
    """`fetch(name, shape)`: tensors of `files` in one dtype on one device, each of the shape it must have.

    ModelError names both shapes where it has another, or the tensor that is missing.
    quantization: what products make of their weights once they have them.
    """

    files: Weights
    dtype: torch.dtype
    device: torch.device | str
    quantization: Quantization | None = None

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.files.expect(name, shape, self.dtype, self.device)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor | Codes:
        """The same of a product's matrix; where others rounded it, its codes as they are."""
        found = self.files.rounded(name, self.quantization, self.device) if self.quantization else None
        if found is None:
            return self(name, shape)
        self.files.check(name, shape)
        return found

    def form(self, name: str) -> Quantization | None:
        return self.files.form(name, self.quantization)

    def __contains__(self, name: str) -> bool:
        return name in self.files


def has_files(directory: Path, allow_pickle_bin: bool = False) -> bool:
    """Whether all weight files that `WeightFiles` would read are here."""
    kinds = [(INDEX, SINGLE), (PICKLE_INDEX, PICKLE)] if allow_pickle_bin else [(INDEX, SINGLE)]
    for index, single in kinds:
        if (directory / index).exists():
            listed = read_json(directory / index).get("weight_map")
            return isinstance(listed, dict) and all(
                (directory / str(one)).exists() for one in set(listed.values())
            )
        if (directory / single).exists():
            return True
    return (directory / POINTER).is_file()


def _find(directory: Path, allow_pickle_bin: bool) -> dict[str, str] | str:
    """File of each tensor, by the index; or the name of the one file that holds all."""
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
    files = read_json(source).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(f"{source}: weight_map must map tensor names to file names")
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise ModelError(f"{source}: {file!r} is not a file name")
        if not (source.parent / file).is_file() and not (snapshot_of(source) or borrowed_of(source.parent)):
            raise ModelError(f"{source.parent / file}: no such file, but {source.name} names it")
    return files


def _open(path: Path) -> Any:
    try:
        if path.name == POINTER:
            return GgufTensors(path)
        if path.suffix == ".bin":
            mapped = is_zipfile(path)  # older files are a plain stream
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        return safe_open(path, framework="pt")
    except Exception as error:  # torch and safetensors raise many kinds for a broken file
        raise ModelError(f"{path}: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
