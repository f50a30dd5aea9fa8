"""Finds the model directory that --model or --draft-model means. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from specsot.model.config import require_model_directory


def resolve_model(named: str | Path) -> Path:
    """The directory with the files of the model that was named. Raises ModelError, one line.

    Everything else takes what this returns. What is resolved already is returned as it is.
    """
    return require_model_directory(Path(named).expanduser())
