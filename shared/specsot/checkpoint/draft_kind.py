"""Tells a small language model from a draft head by the names of its tensors, without torch."""

from __future__ import annotations

from pathlib import Path

from specsot.checkpoint.fields import read_json
from specsot.checkpoint.gguf.finding import POINTER
from specsot.checkpoint.safetensors_header import INDEX, SINGLE, read_spans
from specsot.errors import ModelError

# The ends of the names of tensors that only draft heads have, in all published layouts.
OF_HEADS = ("fc.weight", "hidden_norm.weight")


def is_language_model(directory: Path) -> bool:
    """Tell whether a draft model's directory holds a whole language model, and no draft head.

    That is so for every GGUF file, and for safetensors files with an embedding, decoder layers, and none of
    the tensors that combine a head's features. False also if the names of the tensors are not known, as for
    weights that are not fetched yet, or for a broken file; loading the draft model then says what is wrong.

    directory: Folder of the draft model.
    """
    if (directory / POINTER).is_file():
        return True
    names = _tensor_names(directory)
    embeds = any(name.endswith(("embed_tokens.weight", "embed_in.weight")) for name in names)
    has_layers = any(".layers.0." in name for name in names)
    return embeds and has_layers and not any(name.endswith(OF_HEADS) for name in names)


def _tensor_names(directory: Path) -> list[str]:
    """Return the names of all tensors of a directory's safetensors files; empty if they cannot be read.

    directory: Folder of the model.
    """
    try:
        if (directory / INDEX).is_file():
            return list(read_json(directory / INDEX).get("weight_map", {}))
        return list(read_spans(directory / SINGLE))
    except (ModelError, OSError):
        return []
