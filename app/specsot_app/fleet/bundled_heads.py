"""Draft heads that ship with SpecSoT, found by the name of the base model.

`models/NAME/eagle3` is a head for every base whose file, folder or Hub name contains NAME, whatever its case
and punctuation, and whose sizes are those of the model that the head was trained for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specsot.errors import ModelError
from specsot.model.config import ModelConfig, read_config
from specsot.model.fields import read_json
from specsot.model.resolving import address_of_model

HEAD = "eagle3"  # The folder of a head in the folder of its model.


def head_named(name: str, places: tuple[Path, ...]) -> Path | None:
    """The folder of the bundled head called `name`, such as "qwen2.5-coder-1.5b"; None if there is none.

    places: folders that may hold bundled models, the first one first.
    """
    wanted = _plain(name)
    return next((head for known, head in _heads(places) if _plain(known) == wanted), None)


def head_for(base: Path, places: tuple[Path, ...]) -> Path | None:
    """The folder of the bundled head for a base model's directory; None if none fits. Raises ModelError."""
    address = _plain(address_of_model(base))
    named = [(known, head) for known, head in _heads(places) if _plain(known) in address]
    if not named:
        return None
    config = read_config(base)
    return next((head for _, head in named if _fits(head, config)), None)


def _heads(places: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Names and folders of all bundled heads."""
    for place in places:
        for config in sorted(place.glob(f"*/{HEAD}/config.json")):
            yield config.parents[1].name, config.parent


def _fits(head: Path, base: ModelConfig) -> bool:
    """Whether the head was trained for a base of these sizes."""
    try:
        fields: dict[str, Any] = read_json(head / "config.json")
    except ModelError:
        return False
    hidden = fields.get("target_hidden_size", fields.get("hidden_size"))
    return (hidden, fields.get("vocab_size")) == (base.hidden, base.vocab)


def _plain(name: str) -> str:
    """Lower-case letters and digits: "Qwen2.5-Coder-1.5B" -> "qwen25coder15b"."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
