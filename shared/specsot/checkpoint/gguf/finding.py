"""Finds the GGUF file that a path means, and the parts of a split file."""

from __future__ import annotations

import re
from pathlib import Path

from specsot.errors import ModelError

# File in a model directory that was made of a GGUF file; it says where each tensor is.
POINTER = "gguf.json"
# The name of one part of a split file.
PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
# Other weights. If a folder has such files, its GGUF files are ignored.
WEIGHTS = ("*.safetensors", "*.bin")


def find_gguf(place: Path) -> Path | None:
    """Return the GGUF file that a path means, or None if the path means none.

    A path to a file means that file; a folder without other weights means its only GGUF file. If that file is
    split, its first part is returned. Image projectors (mmproj) are ignored. None if the path does not exist,
    or if the folder has other weights or no GGUF file.

    place: path of a file or a folder. It need not exist.

    Raises ModelError if a folder has several GGUF files.

    A path to any file is returned as it is, whatever the file's name is.
    """
    if place.is_file():
        return place
    if not place.is_dir() or any(any(place.glob(kind)) for kind in WEIGHTS):
        return None
    found = sorted({parts_of(one)[0] for one in place.glob("*.gguf") if not one.name.startswith("mmproj")})
    if len(found) > 1:
        raise ModelError(f"{place}: several GGUF files; name one of {', '.join(one.name for one in found)}")
    return found[0] if found else None


def parts_of(file: Path) -> list[Path]:
    """Return all parts of a split GGUF file, or the file itself if it is not split.

    file: path of the file, or of any of its parts.

    # "m-00002-of-00002.gguf" -> ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]

    The parts need not exist. A count of 00000 is read as 1.
    """
    split = PART.fullmatch(file.name)
    if split is None:
        return [file]
    count = max(int(split[2]), 1)
    return [file.with_name(f"{split[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]


def stem_of(first: Path) -> str:
    """Return a GGUF file's name without suffix and part number.

    first: path of the file, or of its first part.

    "m-00001-of-00002.gguf" and "m.gguf" both give "m".
    """
    split = PART.fullmatch(first.name)
    return split[1] if split else first.stem
