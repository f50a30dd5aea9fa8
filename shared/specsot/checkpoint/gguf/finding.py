"""Which GGUF file is meant by a path."""

from __future__ import annotations

import re
from pathlib import Path

from specsot.errors import ModelError

POINTER = "gguf.json"  # in a directory made of a GGUF file: where each tensor is
PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
WEIGHTS = ("*.safetensors", "*.bin")


def find_gguf(place: Path) -> Path | None:
    """The GGUF file that is meant by a file, or by a folder with no other weights. Raises ModelError for a
    folder with several.
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
    split = PART.fullmatch(file.name)
    if split is None:
        return [file]
    count = max(int(split[2]), 1)
    return [file.with_name(f"{split[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]


def stem_of(first: Path) -> str:
    split = PART.fullmatch(first.name)
    return split[1] if split else first.stem
