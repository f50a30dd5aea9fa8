"""Hashes a model directory to a short name, so that two machines can tell they hold the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from specsot.checkpoint.borrowed import borrowed_of, header_size, spans_of
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.gguf.directory import read_places
from specsot.checkpoint.gguf.finding import POINTER
from specsot.checkpoint.hub import snapshot_of
from specsot.errors import ModelError

EDGE = 64 * 1024  # bytes read at either end of a weight file's data; not measured
SAMPLE = 64  # bytes read of each tensor, so that a layer trained further is noticed; not measured
IGNORED = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "architectures"}
)


def fingerprint(directory: Path) -> str:
    """16 hex digits over config.json (without what says nothing of the weights) and, for each weight
    file, its name, size, first and last 64 KiB of data; of safetensors also header and each tensor's begin.
    Of a GGUF file where and what each tensor is, and its begin; not the file's name.
    Of a repository on the hub those of its commit: nobody has all files. Of a borrowed model its lenders'.

    ModelError names what is missing or broken.
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
    """Of each tensor in GGUF files what it is, and its first bytes."""
    opened: dict[str, BinaryIO] = {}
    with ExitStack() as files:
        for name, place in read_places(pointer).items():
            told = place.kind, place.shape, place.begin, place.order
            try:
                if place.file not in opened:
                    opened[place.file] = files.enter_context(open(place.file, "rb"))
                opened[place.file].seek(place.begin)
                yield f"{name}:{told}".encode() + opened[place.file].read(min(place.bytes, SAMPLE))
            except OSError as error:
                raise ModelError(f"{place.file}: {error.strerror}") from None


def _weight_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    if not files:
        raise ModelError(f"{directory}: no weight files (*.safetensors)")
    return files


def _describe(path: Path) -> bytes:
    """Name, size, and a digest of what is read of one file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.sha256()
            for part in _header_and_samples(path, file, size) if path.suffix == ".safetensors" else ():
                digest.update(part)
            digest.update(file.read(EDGE))
            file.seek(max(size - EDGE, 0))
            digest.update(file.read(EDGE))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    return f"{path.name}:{size}:{digest.hexdigest()}".encode()


def _header_and_samples(path: Path, file: BinaryIO, size: int) -> Iterator[bytes]:
    """A safetensors header, then the begin of each tensor; leaves the file where the data begin."""
    header = file.read(header_size(path, file.read(8), size))
    data = file.tell()
    yield header
    for begin, _ in sorted(spans_of(path, header).values()):
        file.seek(data + begin)
        yield file.read(SAMPLE)
    file.seek(data)
