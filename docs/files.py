"""Writes the list of files in docs/architecture.md anew: a line for each, from its own first line."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "architecture.md"
ROOMS = (
    "lab/specsot_lab",
    "lab/specsot_compat",
    "lab/specsot_bench",
    "app/specsot_app",
    "services/master/specsot_master",
    "services/worker/specsot_worker",
    "services/drafter/specsot_drafter",
    "shared/specsot_model",
    "shared/specsot_kernels",
    "shared/specsot",
)
HEADING = "## Files\n\n"


def files() -> list[Path]:
    """Every module we wrote, room by room; packages without words of their own are left out."""
    found = [path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"), key=folder_first)]
    return [path for path in found if "v1" not in path.parts and first_line(path)]


def folder_first(path: Path) -> tuple[Path, str]:
    return path.parent, path.name


def first_line(path: Path) -> str:
    """The first paragraph of a module's docstring; empty for a package that only re-exports."""
    words = re.match(r'"""(.*?)(?:\n\n|""")', path.read_text(), re.DOTALL)
    return " ".join(words[1].split()).replace("|", "\\|") if words else ""


def listing() -> str:
    """One table for each folder."""
    tables: list[str] = []
    for folder, paths in groupby(files(), key=lambda path: path.parent):
        rows = [f"| `{path.name}` | {first_line(path)} |" for path in paths]
        tables.append("\n".join([f"**{folder.relative_to(REPOSITORY)}**", "", "| | |", "|---|---|", *rows]))
    return "\n\n".join(tables) + "\n"


def written() -> str:
    """The page as it should be."""
    return PAGE.read_text().partition(HEADING)[0] + HEADING + listing()


if __name__ == "__main__":
    PAGE.write_text(written())
