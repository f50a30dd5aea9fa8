"""Finds the model directory that --model or --draft-model means. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from specsot.model.config import require_model_directory
from specsot.model.gguf.finding import POINTER, find_gguf


def resolve_model(named: str | Path) -> Path:
    """The directory with the files of the model that was named. Raises ModelError, one line.

    Everything else takes what this returns. What is resolved already is returned as it is.
    """
    place = Path(named).expanduser()
    file = None if (place / POINTER).is_file() else find_gguf(place)
    if file is None:
        return require_model_directory(place)
    from specsot.model.gguf.directory import directory_of  # numpy, and the tokenizers library

    return directory_of(file)
