"""Draft heads that ship with SpecSoT, found by the name of the base model.

`models/NAME/eagle3` is a head for every base whose file, folder or Hub name contains NAME, whatever its case
and punctuation, and whose sizes are those of the model that the head was trained for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from specsot.checkpoint.config import ModelConfig, read_config
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.resolving import address_of_model
from specsot.errors import ModelError

# Folders in `models` that hold a head of this kind. `demo` is not one: its name says nothing of a model.
NAMES: Final = ("qwen2.5-coder-1.5b", "smollm2")
HEAD: Final = "eagle3"  # The folder of a head in the folder of its model.


def head_named(name: str, folders: Sequence[Path], known_names: Sequence[str] = NAMES) -> Path | None:
    """Return the folder of the bundled head called `name`, such as "qwen2.5-coder-1.5b"; None if there is
    none.

    name: Name to look for, compared without case and punctuation.
    folders: Folders that may hold bundled models; the first that has the head wins.
    known_names: Names of the models that have a head.
    """
    known = next((known for known in known_names if _plain(known) == _plain(name)), None)
    return None if known is None else _folder(known, folders)


def head_for(base: Path, folders: Sequence[Path], known_names: Sequence[str] = NAMES) -> Path | None:
    """Return the folder of the bundled head for a base model; None if none fits by name and sizes.

    If several names fit, the first of `known_names` whose head fits the sizes is taken.

    base: The base model's directory or GGUF file.
    folders: Folders that may hold bundled models; the first that has a head wins.
    known_names: Names of the models that have a head.
    Raises ModelError if the base model's config cannot be read.
    """
    address = _plain(address_of_model(base))
    heads = [_folder(known, folders) for known in known_names if _plain(known) in address]
    if not heads:
        return None
    config = read_config(base)
    return next((head for head in heads if head is not None and _fits(head, config)), None)


def _folder(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the head's folder in the first of the folders that has it; None if none has it.

    A head counts only if it has a config.json.

    name: Name of the base model.
    folders: Folders that may hold bundled models, searched in order.
    """
    candidates = (folder / name / HEAD for folder in folders)
    return next((candidate for candidate in candidates if (candidate / "config.json").is_file()), None)


def _fits(head: Path, base: ModelConfig) -> bool:
    """Return whether the head was trained for a base of these sizes; False if the head's config cannot be
    read.

    The head's `target_hidden_size` is compared, or `hidden_size` if it has none.

    head: The head's folder.
    base: The base model's sizes, of which hidden size and vocabulary are compared.
    """
    try:
        fields: dict[str, Any] = read_json(head / "config.json")
    except ModelError:
        return False
    hidden = fields.get("target_hidden_size", fields.get("hidden_size"))
    return (hidden, fields.get("vocab_size")) == (base.hidden, base.vocab)


def _plain(name: str) -> str:
    """Return the lower-case letters and digits of a name: "Qwen2.5-Coder-1.5B" -> "qwen25coder15b".

    name: Name or address of a model.
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())
