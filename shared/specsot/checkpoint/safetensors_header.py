"""Reads the header of a safetensors file, without the library and without any weights."""

from __future__ import annotations

import json
from pathlib import Path

from specsot.errors import ModelError

# Bytes. Longest header of a safetensors file. Precedent: safetensors' own limit.
HEADER_LIMIT = 100 << 20
# The index of a model whose safetensors weights are several files.
INDEX = "model.safetensors.index.json"
# The weight file of a model without an index.
SINGLE = "model.safetensors"


def read_spans(path: Path) -> dict[str, tuple[int, int]]:
    """Return `spans_of` a safetensors file.

    path: The file. Raises OSError if it cannot be read, ModelError if its header is broken.
    """
    with path.open("rb") as file:
        return spans_of(path, file.read(header_size(path, file.read(8), path.stat().st_size)))


def header_size(path: Path, prefix: bytes, size: int) -> int:
    """Return the bytes of a safetensors file's JSON header, which follows an 8-byte length.

    path: The file, for messages.
    prefix: The first 8 bytes of the file.
    size: Size of the file in bytes.

    Raises ModelError if the length is not plausible.

    The length is not plausible if it exceeds the file or HEADER_LIMIT, or if `prefix` has fewer than 8 bytes.
    """
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, HEADER_LIMIT):
        raise ModelError(f"{path}: not a whole safetensors file")
    return length


def spans_of(path: Path, header: bytes) -> dict[str, tuple[int, int]]:
    """Return (begin, end) of each tensor, in bytes from the end of the header. Raises ModelError if the
    header is broken.

    path: The file, for error messages.
    header: The JSON header of a safetensors file.

    The end is that of the byte after the last one. The entry "__metadata__" is left out; a header without
    tensors gives an empty dict. The header is broken if it is no JSON object, if a tensor has no two offsets,
    or if a begin is negative; ends are not checked.
    """
    try:
        spans = {
            tensor: (int(begin), int(end))
            for tensor, entry in json.loads(header).items()
            if tensor != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        spans = {"": (-1, -1)}
    if any(begin < 0 for begin, _ in spans.values()):
        raise ModelError(f"{path}: not a readable safetensors header")
    return spans
