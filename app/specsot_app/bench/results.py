"""What a measurement leaves behind: JSON that says what was measured, where, how, and row by row what came.

Every row has a name of its own; names of figures carry their units.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from specsot._version import __version__

Row = Mapping[str, object]


def write_results(file: Path, bench: str, settings: Row, rows: Sequence[Row]) -> None:
    """One object; its parents are made. Paths in it become texts."""
    figures = {
        "bench": bench,
        "version": __version__,
        "machine": describe_machine(),
        "settings": settings,
        "rows": rows,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(figures, indent=2, default=str) + "\n")


def named(rows: Sequence[Row], *keys: str) -> list[Row]:
    """Rows called after what they are of: texts as they are, numbers with what they count."""
    return [
        {"name": ", ".join(_said(key, row[key]) for key in keys if key in row)} | dict(row) for row in rows
    ]


def _said(key: str, value: object) -> str:
    return value if isinstance(value, str) else f"{key} {value}"


def describe_machine() -> dict[str, object]:
    """Where the clients ran; a fleet of processes ran there too."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
