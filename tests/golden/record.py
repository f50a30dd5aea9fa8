"""The record of the surface: files beside this one, a fact a line, so that a change is seen in review."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping
from difflib import unified_diff
from pathlib import Path
from typing import Any

from tests.golden import children, commands, endpoints, public, surface, telemetry

FOLDER = Path(__file__).parent / "surface"


def compute() -> dict[str, str]:
    """Every file of the record as the product would have it now."""
    return {
        "commands.txt": typed(),
        "children.txt": written(children.record()),
        "protos.txt": "\n".join(endpoints.protos()) + "\n",
        "http.txt": written(asyncio.run(endpoints.http())),
        "member-metrics.txt": written(endpoints.member_metrics()),
        "python.txt": written(public.python()),
        "telemetry.txt": written(telemetry.telemetry()),
    }


def typed() -> str:
    with tempfile.TemporaryDirectory() as folder:
        found = {" ".join(one): commands.record(one, Path(folder)) for one in surface.programs()}
    return written(found)


def written(facts: Mapping[str, Any]) -> str:
    """Nested facts as lines; the innermost mappings and lists of values are one line each."""
    return "\n".join(lines(facts)) + "\n"


def lines(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict) and "default" not in value:  # all about one flag is one line
            yield f"{indent}{name}:"
            yield from lines(value, indent + "  ")
        elif isinstance(value, list) and len(value) > 4:
            yield f"{indent}{name}:"
            yield from (f"{indent}  {one}" for one in value)
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{indent}{name}: {text}"


def read() -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.txt"))}


def write(record: Mapping[str, str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in record.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def changes(record: Mapping[str, str], only: str | None = None) -> list[str]:
    """What was recorded against what is, as a diff; empty where they are the same. only: this file."""
    before = {name: text for name, text in read().items() if only in (None, name)}
    return [
        line
        for name in sorted(before.keys() | record.keys())
        for line in unified_diff(
            before.get(name, "").splitlines(), record.get(name, "").splitlines(), name, name, lineterm="", n=0
        )
    ]
