"""What was measured of a model's heads, in kv_heads.json beside its weights: what each KV head attends to.

Refuses to know how it was measured, and torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specsot.errors import InvalidRequest, ModelError
from specsot.model.config import ModelConfig
from specsot.model.fields import read_json
from specsot.params import MAX_TOKENS, HeadWindows

HEADS_FILE = "kv_heads.json"


def read_heads(directory: Path, config: ModelConfig) -> HeadWindows | None:
    """None where nothing was measured. Raises ModelError, also for another model's heads."""
    path = directory / HEADS_FILE
    if not path.is_file():
        return None
    try:
        layers = tuple(tuple(map(_head_window, heads)) for heads in read_json(path)["layers"])
        found = HeadWindows(layers)
    except (KeyError, TypeError, AttributeError, InvalidRequest) as error:
        raise ModelError(f"{path}: {type(error).__name__}: {error}") from None
    there, wanted = (len(layers), len(layers[0])), (config.layers, config.kv_heads)
    if there != wanted:
        raise ModelError(f"{path}: {there[0]} layers of {there[1]} KV heads, the model has {wanted}")
    return found


def write_heads(
    path: Path, layers: Sequence[Sequence[Mapping[str, Any]]], measured: Mapping[str, Any]
) -> None:
    """layers: of every KV head `sinks` and `recent` (None: all), and whatever else people should know."""
    lines = ",\n".join(f"    {json.dumps(list(heads))}" for heads in layers)
    path.write_text(f'{{\n  "measured": {json.dumps(dict(measured))},\n  "layers": [\n{lines}\n  ]\n}}\n')


def _head_window(head: Mapping[str, Any]) -> tuple[int, int]:
    recent = head["recent"]
    return head["sinks"], MAX_TOKENS if recent is None else recent
