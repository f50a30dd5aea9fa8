"""Draft heads of this version, found by the name of the base model: in a folder of models, or fetched.

`models/NAME/eagle3` is a head for every base whose file, folder or Hub name contains NAME, whatever its case
and punctuation, and whose sizes are those of the model that the head was trained for. Heads that are in no
folder of models are fetched once from the release (`specsot.checkpoint.released_heads`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import structlog

from specsot.checkpoint.config import ModelConfig, read_config
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.released_heads import fetch_head, plain_name, released_heads
from specsot.checkpoint.resolving import address_of_model
from specsot.errors import ModelError

log = structlog.get_logger()

HEAD: Final = "eagle3"  # The folder of a head in the folder of its model.


def head_named(name: str, folders: Sequence[Path], known_names: Collection[str] | None = None) -> Path | None:
    """Return the folder of the bundled head called `name`, such as "qwen2.5-coder-1.5b"; None if there is
    none.

    name: Name to look for, compared without case and punctuation.
    folders: Folders that may hold bundled models; the first that has the head wins.
    known_names: Names of the models that have a head. None: those of this version.
    """
    names = released_heads().heads if known_names is None else known_names
    known = next((known for known in names if plain_name(known) == plain_name(name)), None)
    return None if known is None else _folder(known, folders)


def head_for(base: Path, folders: Sequence[Path], known_names: Collection[str] | None = None) -> Path | None:
    """Return the folder of the bundled head for a base model; None if none fits by name and sizes.

    If several names fit, the first of `known_names` whose head fits the sizes is taken.

    base: The base model's directory or GGUF file.
    folders: Folders that may hold bundled models; the first that has a head wins.
    known_names: Names of the models that have a head. None: those of this version.
    Raises ModelError if the base model's config cannot be read.
    """
    address = plain_name(address_of_model(base))
    names = released_heads().heads if known_names is None else known_names
    heads = [_folder(known, folders) for known in names if plain_name(known) in address]
    if not heads:
        return None
    config = read_config(base)
    return next((head for head in heads if head is not None and _fits(head, config)), None)


def fetched_head_for(base: Path) -> Path | None:
    """Return the folder of the released head for a base model, which is fetched if the cache lacks it. None
    if no released head fits by name and sizes, or if it cannot be fetched, which is logged once.

    base: The base model's directory or GGUF file.
    Raises ModelError if the base model's config cannot be read.
    """
    address = plain_name(address_of_model(base))
    named = [head for name, head in released_heads().heads.items() if plain_name(name) in address]
    if not named:
        return None
    config = read_config(base)
    sizes = config.hidden, config.vocab
    head = next((head for head in named if (head.hidden_size, head.vocab_size) == sizes), None)
    return None if head is None else _fetched_or_none(head.name)


@cache
def _fetched_or_none(name: str) -> Path | None:
    """Return the folder of a released head; None if it cannot be fetched, which is logged.

    name: Name of the head.
    """
    try:
        return fetch_head(released_heads().heads[name])
    except ModelError as error:
        log.warning("no draft head", head=name, why=str(error))
        return None


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
