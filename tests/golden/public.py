"""What Python programs import: names, signatures, defaults, fields, and what options make of values.

Knows the public modules by the documents alone.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.golden.surface import aliases, answer_classes, ask_of, ask_options, fleet_options, plain, translate

REPOSITORY = Path(__file__).resolve().parents[2]
# Below "specsot", or the rest of another package's name (`_kernels`); split, so that no script that moves
# modules takes them for references.
LISTED = ("", "aiter", "eagle", "_kernels")  # whole, by __all__
NAMED = {  # what docs/python.md and the docstrings of `SpecSoT` and `Eagle` name
    "_kernels.contract": ("DraftResults", "TreeArrays", "TreeMaskMode", "Verified"),
    "drafting": ("DraftOptions",),
    "members": ("Overrides",),
    "params": ("Ask", "HeadWindows", "Limits", "Message", "Pruning", "Sampling", "Window"),
}
WHOLE = ("errors", "events")  # every class
ASKED = {  # a value for every option of a question
    "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "repetition_penalty": 1.5,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {3: 1.5},
    "max_new_tokens": 100, "max_branch_tokens": 50,
    "max_skeleton_tokens": 70, "max_parallel": 3, "sinks": 8, "recent": 100, "keep_ratio": 0.5,
    "prune_every": 32, "skip_layers": 1, "model": "m", "mode": "sot", "drafter": "none",
    "stop": "end", "tools": ["search"], "finish_within_s": 10.0, "polish": False,
    "constraint": False, "seed": 7, "ignore_eos": True, "logprobs": 3, "head_aware": True, "min_tokens": 2,
    "stop_token_ids": [5], "include_stop_str_in_output": True, "skip_special_tokens": False,
    "prompt_logprobs": 3,
    "json_object": True, "json_schema": {"type": "object"}, "regex": "a+", "choice": ["a", "b"],
}  # fmt: skip
OF_ALL = {"mode": "direct"}  # in which all of them can be
SEEDS = {  # and for other systems' names
    "base_model_path": "m", "eagle_model_path": "m", "ea_model_path": "m", "use_eagle3": True,
    "device_map": {"": 1}, "dtype": "torch.bfloat16", "torch_dtype": "float16", "gpu_ids": "0,1",
    "world_size": 2, "tensor_parallel_size": 2,
    "layer_splits": "14,28", "task_prompt": "q", "enable_parallel": False,
    "use_semantic_constraint": False, "use_scheduling": True,
    "num_samples": 3, "comm_mode": "ring", "draft_tokens": 3,
    "prompt": "q", "distributed": True, "use_bim_mode": True,
}  # fmt: skip


def python() -> dict[str, Any]:
    """By import path."""
    names: dict[str, Any] = {}
    for path in LISTED:
        module = imported(path)
        names |= {f"{module.__name__}.{name}": told(getattr(module, name)) for name in sorted(module.__all__)}
    for path, some in NAMED.items():
        module = imported(path)
        names |= {f"{module.__name__}.{name}": told(getattr(module, name)) for name in some}
    for path in WHOLE:
        module = imported(path)
        classes = (
            name
            for name, one in vars(module).items()
            if inspect.isclass(one) and one.__module__ == module.__name__
        )
        names |= {f"{module.__name__}.{name}": told(getattr(module, name)) for name in sorted(classes)}
    decoder = imported("_model.decoder").Decoder  # that documents name, as a kind of target
    names["specsot_model.decoder.Decoder"] = {"load": str([*inspect.signature(decoder.load).parameters][:4])}
    return {
        "names": names,
        "answers": {one.__name__: told(one) for one in answer_classes()},
        "from_pretrained": fleet_options(),
        "generate": {name: made(name) for name in sorted(ask_options())},
        "other systems' names": {name: str(translate({name: SEEDS[name]})) for name in sorted(aliases())},
        "installs": installs(),
    }


def imported(path: str) -> Any:
    """path: below `specsot`, or the end of another package's name: `_kernels` is `specsot_kernels`."""
    return import_module("specsot" + (path if path.startswith("_") or not path else f".{path}"))


def told(one: Any) -> Any:
    """A signature; of a class its bases, fields and methods too; else the value."""
    if inspect.isclass(one):
        return {"is": [base.__name__ for base in one.__mro__[1:-1]], **dict(members_of(one))}
    return signature(one) if callable(one) else repr(one)


def members_of(one: type) -> Iterator[tuple[str, Any]]:
    if issubclass(one, enum.Enum):
        yield from ((member.name, member.value) for member in one)
    elif dataclasses.is_dataclass(one) or (one.__init__ is not object.__init__ and one.__name__ != "SpecSoT"):
        yield "()", signature(one)
    for name, member in sorted(inspect.getmembers_static(one)):
        if name.startswith("_") or issubclass(one, enum.Enum | BaseException):
            continue
        if isinstance(member, property):
            yield name, "property"
        elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
            yield name, signature(getattr(one, name))


def signature(one: Any) -> str:
    """Names, kinds and defaults; what the types are called is not said."""
    try:
        known = inspect.signature(one)
    except ValueError:
        return "(...)"
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in known.parameters.values()]
    return str(known.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def made(name: str) -> str:
    """What one option makes of a question, beyond the usual."""
    usual, asked = (dataclasses.asdict(ask_of(given)) for given in (OF_ALL, OF_ALL | {name: ASKED[name]}))
    return str({field: baseline_of(value) for field, value in asked.items() if value != usual[field]})


def baseline_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): baseline_of(one) for key, one in value.items() if one is not None}
    return plain(value)


def installs() -> dict[str, Any]:
    """Commands that come with it, and what can be asked for besides."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"commands": sorted(project["scripts"]), "extras": sorted(project["optional-dependencies"])}
