"""Builds a model of Transformers without weights, and runs any of its layers inside its own forward.

The forward of a whole model does more than its layers: it scales embeddings, makes rotary tables, chooses
masks by layer, and caps logits. Every family does it differently. Therefore the layers in the model's list
are replaced by slots, and the model's own forward runs every time. A slot either runs its layer or passes a
hidden state on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from specsot.checkpoint.config import ModelConfig
from specsot.errors import ModelError, one_line
from specsot_model.transformers_layers.interface import MEASURES, RUNS, register

# Fields of config.json that say how weights are stored; this room reads decoded weights.
STORAGE = ("quantization_config", "compression_config", "torch_dtype", "dtype")
# Kinds of layers, as configs call them, that read earlier rows otherwise than by attention.
STATES = frozenset({"conv", "linear_attention", "mamba", "mamba2", "recurrent"})
# Called with the index of a layer, its input, and the other arguments of the call, positional and by name.
# Returns what the layer returns.
Visit = Callable[[int, Tensor, Sequence[Any], dict[str, Any]], Any]


class Slot(nn.Module):
    """Stands for a layer in its model's list, and leaves what happens to `visit`."""

    def __init__(self, index: int, layer: nn.Module, visit: Visit) -> None:
        """Take the place of a layer.

        index: Index of the layer in the model.
        layer: The layer. It becomes no submodule; its attributes can be read through the slot, because some
            models ask their layers for their kind.
        visit: Runs, or passes, the layer.
        """
        super().__init__()
        self.__dict__["layer"] = layer
        self._index = index
        self._visit = visit

    def forward(self, *args: Any, **given: Any) -> Any:
        """Return what `visit` returns for this layer.

        args: The hidden state first, unless it is named `hidden_states`.
        given: The layer's arguments by name.
        """
        hidden = args[0] if args else given.pop("hidden_states")
        return self._visit(self._index, hidden, args[1:], given)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of this module or, if it has none of this name, of the layer.

        name: Name of the attribute.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)


class Skeleton:
    """A model of Transformers on the device "meta": all modules, no weights.

    model: The whole model, a `PreTrainedModel`.
    path: Name of the list of layers in the model, such as "model.layers".
    layers: The list.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, attention: str) -> None:
        """Build the model.

        config: A config with `transformers`.
        dtype: Type of the weights.
        attention: RUNS or MEASURES.

        Raises ModelError if Transformers has no code for the family, if its code does not call registered
        attention functions, or if the model has not exactly one list of layers.
        """
        self.model: Any = _build(config, dtype, attention)
        self.path, self.layers = _find_layers(self.model, config)
        _check_ends(self.model, config)

    def shell(self) -> Any:
        """Return a copy of the model with an empty list of layers. The copy shares nothing with the model."""
        # deepcopy takes what `memo` has for an object instead of copying the object.
        memo: dict[int, Any] = {id(self.layers): nn.ModuleList()}
        return deepcopy(self.model, memo)


@lru_cache(maxsize=2)
def skeleton_of(config: ModelConfig, dtype: torch.dtype) -> Skeleton:
    """Return the skeleton of a model whose layers are to run. It is built once, and must not be changed.

    config: A config with `transformers`.
    dtype: Type of the weights.

    Raises ModelError as `Skeleton` does.
    """
    return Skeleton(config, dtype, RUNS)


def measured_skeleton(config: ModelConfig) -> Skeleton:
    """Return a new skeleton whose layers tell their shapes when they are called.

    config: A config with `transformers`.

    Raises ModelError as `Skeleton` does.
    """
    return Skeleton(config, torch.float32, MEASURES)


def fill_slots(model: nn.Module, path: str, layers: Sequence[nn.Module], visit: Visit) -> nn.Module:
    """Replace the layers of a model by slots, and return the module whose forward calls them.

    model: A model, or a shell of it.
    path: Name of the list of layers, as in `Skeleton.path`.
    layers: The model's layers, which the slots stand for.
    visit: Runs, or passes, a layer.
    """
    trunk_name, _, name = path.rpartition(".")
    trunk = model.get_submodule(trunk_name)
    setattr(trunk, name, nn.ModuleList(Slot(index, layer, visit) for index, layer in enumerate(layers)))
    return trunk


def _build(config: ModelConfig, dtype: torch.dtype, attention: str) -> nn.Module:
    """Return Transformers' causal model of a config on the device "meta", in evaluation mode.

    config: A config with `transformers`.
    dtype: Type of the weights.
    attention: Name of a registered attention function.

    Raises ModelError if there is no such model, or if it cannot run registered attention functions.
    """
    register()
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    assert config.transformers is not None, "only configs with `transformers` are built here"
    kind = config.model_type
    if kind not in CONFIG_MAPPING:
        raise ModelError(
            f"model_type {kind!r} is known neither here nor to Transformers; remote code is never run"
        )
    values = json.loads(config.transformers)
    for name in STORAGE:
        values.pop(name, None)
    try:
        parsed = CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # Every family checks its fields in its own way.
        raise ModelError(f"config.json does not fit model_type {kind!r}: {one_line(error)}") from None
    if type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"model_type {kind!r} is no causal language model in Transformers")
    owner = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]
    if owner._is_stateful:  # noqa: SLF001
        raise ModelError(
            f"layers of model_type {kind!r} keep a recurrent state, and only attention is supported"
        )
    if not owner._supports_attention_backend:  # noqa: SLF001
        raise ModelError(f"Transformers' code of model_type {kind!r} does not take other attention functions")
    states = STATES.intersection(getattr(parsed, "layer_types", None) or ())
    if states:
        kinds = ", ".join(sorted(states))
        raise ModelError(f"model_type {kind!r} has layers of kinds {kinds}, which keep a recurrent state")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(parsed, dtype=dtype, attn_implementation=attention)
    return model.eval()


def _find_layers(model: nn.Module, config: ModelConfig) -> tuple[str, nn.ModuleList]:
    """Return the name of the list of a model's layers, and the list.

    model: The whole model.
    config: The model's config, for the number and the names of layers.

    Raises ModelError unless the list of that name has so many layers.
    """
    lists = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and not any(piece.isdigit() for piece in name.split("."))
    }
    expected = config.names.layer.removesuffix(".{}")
    if expected not in lists or len(lists[expected]) != config.layers:
        sizes = ", ".join(f"{name} ({len(part)})" for name, part in lists.items()) or "none"
        raise ModelError(
            f"model_type {config.model_type!r} must have {config.layers} layers in the list {expected}, and"
            f" has {sizes}"
        )
    return expected, lists[expected]


def _check_ends(model: Any, config: ModelConfig) -> None:
    """Raise ModelError if the embedding or the lm_head of a model is not called as `ModelConfig.names` says.

    model: The whole model, a `PreTrainedModel`.
    config: The model's config.
    """
    ends = {
        config.names.embedding: model.get_input_embeddings(),
        config.names.head: model.get_output_embeddings(),
    }
    for expected, part in ends.items():
        found = next((name for name, each in model.named_modules() if each is part), None)
        if part is None or found != expected:
            raise ModelError(
                f"model_type {config.model_type!r} must have a module {expected}; its own is called {found}"
            )
