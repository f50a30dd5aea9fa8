"""Hashes a model directory to a short name, by which two machines recognize that they hold the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from specsot.checkpoint.borrowed import borrowed_of
from specsot.checkpoint.fields import explain_os_errors, read_json
from specsot.checkpoint.gguf.directory import read_places
from specsot.checkpoint.gguf.finding import POINTER
from specsot.checkpoint.hub import snapshot_of
from specsot.checkpoint.safetensors_header import header_size, spans_of
from specsot.errors import ModelError

# Bytes. How much is read at either end of a weight file's data. Untuned.
EDGE = 64 * 1024
# Bytes. How much is read of each tensor, so that a layer that was trained further changes the name. Untuned.
SAMPLE = 64
# Fields of config.json that do not concern the weights.
IGNORED = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "architectures"}
)


def fingerprint(directory: Path) -> str:
    """Return 16 hex digits that identify a model.

    They are a hash of config.json, without the fields in IGNORED, and of samples of the weights:

    * of each weight file its name, its size, and the first and last EDGE bytes of its data; of safetensors
      files also the header and the first SAMPLE bytes of each tensor;
    * of a GGUF file the type, shape, place and first SAMPLE bytes of each tensor, but not the file's name.

    A repository on the hub is identified by its commit, because no member has all of its files. A borrowed
    model has the fingerprint of its lenders.

    directory: the model directory, as `resolve_model` returns it.

    Raises a ModelError that names what is missing or broken.

    Two directories with the same config and weights have the same fingerprint, whatever their paths are. The
    tokenizer does not count.
    """
    if borrowed := borrowed_of(directory):
        return borrowed.fingerprint
    if snapshot := snapshot_of(directory):
        return snapshot.commit[:16]
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such model directory")
    config = {k: v for k, v in read_json(directory / "config.json").items() if k not in IGNORED}
    pointer = directory / POINTER
    weights = _samples(pointer) if pointer.is_file() else map(_describe, _weight_files(directory))
    parts = [json.dumps(config, sort_keys=True).encode(), *weights]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]


def _samples(pointer: Path) -> Iterator[bytes]:
    """Yield a description and the first bytes of each tensor in GGUF files.

    pointer: the pointer file, which says where each tensor is. Raises ModelError if a GGUF file cannot be
        read.

    The tensors are in the order of the pointer file. At most SAMPLE bytes of each are read. Raises ModelError
    also if the pointer file is broken.
    """
    opened: dict[str, BinaryIO] = {}
    with ExitStack() as files:
        for name, place in read_places(pointer).items():
            description = place.kind, place.shape, place.begin, place.order
            with explain_os_errors(place.file):
                if place.file not in opened:
                    opened[place.file] = files.enter_context(open(place.file, "rb"))
                opened[place.file].seek(place.begin)
                yield f"{name}:{description}".encode() + opened[place.file].read(min(place.bytes, SAMPLE))


def _weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a directory or, without any, its .bin files, by name.

    directory: the model directory. Raises ModelError if it has neither.

    The paths are in alphabetical order.
    """
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    if not files:
        raise ModelError(f"{directory}: no weight files (*.safetensors)")
    return files


def _describe(path: Path) -> bytes:
    """Return name, size, and a digest of the samples of one weight file, as bytes.

    path: the weight file. Raises ModelError if it cannot be read.

    Raises ModelError also for a safetensors file with a broken header. Files of other types have samples of
    their first and last EDGE bytes only.
    """
    with explain_os_errors(path), path.open("rb") as file:
        size = path.stat().st_size
        digest = hashlib.sha256()
        for part in _header_and_samples(path, file, size) if path.suffix == ".safetensors" else ():
            digest.update(part)
        digest.update(file.read(EDGE))
        file.seek(max(size - EDGE, 0))
        digest.update(file.read(EDGE))
    return f"{path.name}:{size}:{digest.hexdigest()}".encode()


def _header_and_samples(path: Path, file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield a safetensors header and the first bytes of each tensor; leave the file where data begin.

    path: the file, for error messages.
    file: the open file, at its beginning.
    size: size of the file in bytes.

    Raises ModelError if the header is broken.

    The header is yielded first, without its length; then the first SAMPLE bytes of each tensor, or fewer at
    the end of the file, in the order of their offsets.
    """
    header = file.read(header_size(path, file.read(8), size))
    data = file.tell()
    yield header
    for begin, _ in sorted(spans_of(path, header).values()):
        file.seek(data + begin)
        yield file.read(SAMPLE)
    file.seek(data)
