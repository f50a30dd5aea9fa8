"""What loading a model needs: a directory, its JSON files, PyTorch; one clear line for what is wrong.

Refuses to know what the fields mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from specsot.errors import ModelError

Json = Mapping[str, Any]

LAYOUT = "SpecSoT reads Hugging Face directories (config.json, tokenizer.json, *.safetensors)"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # as in meta-llama/Llama-3.1-8B-Instruct
SHOWN = 5  # names of a directory that an error repeats


def require_model_directory(directory: Path) -> Path:
    """The directory, when it has a config.json. ModelError says what is there instead, and what to do."""
    if directory.is_file():
        raise ModelError(f"{directory}: {_kind(directory)}, not a model directory; {LAYOUT}")
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such model directory{_hub_hint(directory)}")
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory}: no config.json in it, so this is no model directory; {_held(directory)}"
        )
    return directory


def require_torch() -> None:
    """ModelError where PyTorch or safetensors is missing; imports neither."""
    missing = [name for name in ("torch", "safetensors") if find_spec(name) is None]
    if missing:
        raise ModelError(f"{' and '.join(missing)} not installed: pip install 'specsot[model]'")


def _kind(file: Path) -> str:
    return "a GGUF file" if file.suffix == ".gguf" else "a file"


def _hub_hint(directory: Path) -> str:
    named = str(directory)
    if not HUB_NAME.fullmatch(named):
        return ""
    download = f"hf download {named} --local-dir models/{directory.name}"
    return f"; if this is a name on the Hugging Face Hub: {download}"


def _held(directory: Path) -> str:
    """What it holds, so that a wrong folder is recognised."""
    names = sorted(path.name for path in directory.iterdir())
    if not names:
        return "it is empty"
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    gguf = any(name.endswith(".gguf") for name in names)
    return f"it holds {shown}" + (f" (a GGUF file is not read; {LAYOUT})" if gguf else "")


def read_json(source: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError when it is not one."""
    try:
        value = json.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{source}: no such file") from None
    except OSError as error:
        raise ModelError(f"{source}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source}: not a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """Checked access to one JSON object; null counts as absent, `default` None as required."""

    source: Path
    values: Json

    def number(self, name: str, default: float | None = None) -> float:
        """A number > 0."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise ModelError(f"{self.source}: {name} must be a number > 0, got {value!r}")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        """An integer > 0."""
        value = self.number(name, default)
        if value != int(value):
            raise ModelError(f"{self.source}: {name} must be an integer, got {value!r}")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"{self.source}: {name} must be true or false, got {value!r}")
        return value
