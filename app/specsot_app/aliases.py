"""The spellings of the systems SpecSoT grew from, in one table, and what they mean here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specsot.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for `name`; `meaning` turns its value into ours. name None: accepted, says nothing new."""

    name: str | None
    meaning: Callable[[Any], Any] = lambda value: value


def device_of(device_map: Any) -> str:
    """One device of Transformers' device_map: a name, or a mapping with one value."""
    if isinstance(device_map, Mapping):
        places = {str(place) for place in device_map.values()}
        if len(places) != 1:
            raise InvalidRequest(f"device_map names {len(places)} devices; name one", field="device_map")
        return device_of(next(iter(places)))
    if device_map == "auto":
        return "auto"
    return f"cuda:{device_map}" if str(device_map).isdigit() else str(device_map)


def devices_of(gpus: Any) -> str:
    """gpu_ids "0,1" or [0, 1]: GPUs of this machine, one a stage."""
    listed = gpus.split(",") if isinstance(gpus, str) else gpus
    return ",".join(f"127.0.0.1#{str(gpu).strip()}" for gpu in listed)


def mode_of(parallel: Any) -> str:
    """enable_parallel: the model may plan; off: it answers directly."""
    return "auto" if parallel else "direct"


def splits_of(splits: Any) -> str:
    """layer_splits "14,28" or [14, 28] are where stages begin; the last one ends with the model."""
    cuts = [str(cut).strip() for cut in (splits.split(",") if isinstance(splits, str) else splits)]
    return ",".join(f"{first}:{last}" for first, last in zip(["0", *cuts], [*cuts, ""]))


def dtype_of(dtype: Any) -> str:
    """torch.bfloat16 or "bfloat16" or "bf16"."""
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)


ALIASES: Mapping[str, Alias] = {
    "base_model_path": Alias("model"),
    "eagle_model_path": Alias("draft_model"),
    "ea_model_path": Alias("draft_model"),
    "use_eagle3": Alias(None),  # the head's own config says what it is
    "device_map": Alias("device", device_of),
    "dtype": Alias("dtype", dtype_of),
    "torch_dtype": Alias("dtype", dtype_of),
    "gpu_ids": Alias("devices", devices_of),
    "world_size": Alias("stages"),
    "layer_splits": Alias("layers", splits_of),
    "task_prompt": Alias("prompt"),
    "enable_parallel": Alias("mode", mode_of),
    "use_semantic_constraint": Alias("constraint"),
    "use_scheduling": Alias(None),  # branches are always scheduled
    "num_samples": Alias("samples"),  # of a data set, the first ones
    "comm_mode": Alias(None),  # within one process all ways are one; `specsot serve` has it
}


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Our spelling of every option. Raises InvalidRequest when two names of one say different things."""
    ours: dict[str, Any] = {}
    for name, value in options.items():
        alias = ALIASES.get(name, Alias(name))
        if alias.name is None or value is None:
            continue
        meant = alias.meaning(value)
        if ours.setdefault(alias.name, meant) != meant:
            raise InvalidRequest(f"{name} is another name of {alias.name}, which is given too", field=name)
    return ours
