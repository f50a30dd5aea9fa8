"""Loads the weights of single layers, and of what surrounds them, into modules of Transformers.

Checkpoints name and shape tensors otherwise than the modules do. Transformers' own table of conversions
translates them; this file chooses the tensors of one part and hands them over.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from specsot.checkpoint.config import ModelConfig
from specsot.errors import InvalidRequest
from specsot.members import Quantization
from specsot_model.layers import Block
from specsot_model.linear import Linear, Table, look_up
from specsot_model.transformers_layers.rotary import pin_rotary
from specsot_model.transformers_layers.skeleton import Skeleton, skeleton_of
from specsot_model.weights import Fetch


class Product(nn.Module):
    """A product of this project in the place of `nn.Linear`, such as one in 8 bits."""

    def __init__(self, linear: Linear, bias: Tensor | None = None) -> None:
        """Take the product.

        linear: The product [rows, in] -> [rows, out].
        bias: [out], added to the result; None if `linear` adds it, or if there is none.
        """
        super().__init__()
        self._linear = linear
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, [..., out].

        x: [..., in].
        """
        out = self._linear(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])
        return out if self._bias is None else out + self._bias


class Lookup(nn.Module):
    """A table of this project in the place of `nn.Embedding`."""

    def __init__(self, table: Table) -> None:
        """Take the table.

        table: The embedding [vocab, hidden].
        """
        super().__init__()
        self._table = table

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings, [..., hidden].

        tokens: LongTensor [...], token ids.
        """
        return look_up(self._table, tokens.reshape(-1)).unflatten(0, tokens.shape)


class TransformersBlock(Block):
    """A decoder layer that is a module of Transformers.

    config: The model's config.
    device: Device of the layer.
    layer: The module, with its weights.
    """

    def __init__(self, fetch: Fetch, index: int, config: ModelConfig) -> None:
        """Load the layer.

        fetch: Reads tensors from the model's files; its dtype and device are those of the layer.
        index: Index of the layer in the whole model.
        config: The model's config.

        Raises ModelError if a tensor is missing or has another shape, and InvalidRequest if the layer cannot
        be quantized as `fetch` asks.
        """
        self.config = config
        self.device = torch.device(fetch.device)
        skeleton = skeleton_of(config, fetch.dtype)
        self.layer = _load_layer(skeleton, fetch, index, config)
        if fetch.quantization:
            round_products(self.layer, fetch.quantization, config)


def load_shell(
    skeleton: Skeleton, fetch: Fetch, config: ModelConfig, embedding: Table | None, head: Linear | None
) -> nn.Module:
    """Return a model with everything but its layers, whose list is empty.

    All tensors outside of the layers are loaded, except the embedding and the lm_head.

    skeleton: The model without weights.
    fetch: Reads tensors from the model's files.
    config: The model's config.
    embedding: The embedding, for a range that has the first layer; None: the module stays without weights.
    head: The lm_head, for a range that has the last layer; None: the module stays without weights.

    Raises ModelError if a tensor is missing or has another shape.
    """
    shell = skeleton.shell()
    tables = {f"{config.names.embedding}.weight", f"{config.names.head}.weight"}
    _fill_buffers(shell, shell, fetch.device)
    pin_rotary(shell, config.max_positions)
    _load(skeleton, shell, fetch, [name for name in shell.state_dict() if name not in tables], "")
    if embedding is not None:
        place, old = config.names.embedding, shell.get_submodule(config.names.embedding)
        if type(old) is nn.Embedding:
            shell.set_submodule(place, Lookup(embedding))
        elif isinstance(embedding, Tensor):
            old.weight = nn.Parameter(embedding, requires_grad=False)
        else:
            raise InvalidRequest(
                f"the embedding of model_type {config.model_type!r} cannot be quantized", "quantization"
            )
    if head is not None:
        bias = getattr(shell.get_submodule(config.names.head), "bias", None)
        shell.set_submodule(config.names.head, Product(head, bias))
    return shell


def round_products(layer: nn.Module, form: Quantization, config: ModelConfig) -> None:
    """Replace each product of a layer by one in a quantized form.

    layer: The layer, with its weights.
    form: The quantized form.
    config: The model's config, for messages.

    Raises InvalidRequest if the layer has matrices that are no products, such as experts in one tensor.
    """
    products = {name: part for name, part in layer.named_modules() if type(part) is nn.Linear}
    rounded = {id(part.weight) for part in products.values()}
    others = [
        name for name, weight in layer.named_parameters() if weight.ndim > 1 and id(weight) not in rounded
    ]
    if others:
        raise InvalidRequest(
            f"--quantization does not work with model_type {config.model_type!r}, which runs through"
            f" Transformers and has matrices that are no products, such as {others[0]}",
            "quantization",
        )
    for name, part in products.items():
        bias = None if part.bias is None else part.bias.detach()
        layer.set_submodule(name, Product(Linear(part.weight.detach(), bias, form)))


def _load_layer(skeleton: Skeleton, fetch: Fetch, index: int, config: ModelConfig) -> nn.Module:
    """Return a layer with its weights.

    skeleton: The model without weights; the same after the call.
    fetch: Reads tensors from the model's files. On the device "meta", the shapes of the layer's tensors are
        asked for by the modules' names, and the layer stays without numbers.
    index: Index of the layer.
    config: The model's config.
    """
    prefix = f"{skeleton.path}.{index}."
    empty = skeleton.layers[index]
    names = [f"{prefix}{name}" for name in empty.state_dict()]
    if torch.device(fetch.device).type == "meta":
        expected = skeleton.model.state_dict()
        tables = f"{config.names.embedding}.weight", f"{config.names.head}.weight"
        ends = [one for one in expected if not one.startswith(f"{skeleton.path}.") and one not in tables]
        for name in names + ends * (index == config.layers - 1):
            fetch(name, tuple(expected[name].shape))
        return empty
    layer = deepcopy(empty)
    skeleton.layers[index] = layer
    try:
        _fill_buffers(skeleton.model, layer, fetch.device)
        pin_rotary(layer, config.max_positions)
        _load(skeleton, skeleton.model, fetch, names, prefix)
    finally:
        skeleton.layers[index] = empty
    return layer.requires_grad_(False)


def _load(skeleton: Skeleton, model: Any, fetch: Fetch, names: Sequence[str], prefix: str) -> None:
    """Load tensors into a model.

    skeleton: The whole model without weights, which knows the conversions.
    model: The `PreTrainedModel` that receives the tensors: that of the skeleton, or a shell.
    fetch: Reads tensors from the model's files.
    names: Names of the tensors in the model.
    prefix: Common beginning of the names, if they are those of a layer; empty for what is outside of layers.

    Raises ModelError if a tensor is missing or has another shape.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    wanted = set(names)
    exact = model._get_dtype_plan(fetch.dtype)  # noqa: SLF001
    sources = _sources_of(skeleton, tuple(fetch.files.names()))
    found = {
        source: fetch.files.tensor(source, _dtype_of(target, exact, fetch.dtype), fetch.device)
        for target, source in sources[prefix]
        if target in wanted or prefix
    }
    options = LoadStateDictConfig(
        device_map={"": torch.device(fetch.device)},
        dtype=fetch.dtype,
        dtype_plan=exact,
        weight_mapping=get_model_conversion_mapping(model),
    )
    if found:
        convert_and_load_state_dict_in_model(model, found, options)
    held = model.state_dict(keep_vars=True)
    for name in names:
        # What was not converted is asked for by its own name: that raises if it is missing or does not fit.
        if held[name].is_meta:
            tensor = fetch(name, tuple(held[name].shape))
            place, _, last = name.rpartition(".")
            is_buffer = not isinstance(held[name], nn.Parameter)
            part = model.get_submodule(place)
            setattr(part, last, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))


def _dtype_of(name: str, exact: Iterable[str], dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a tensor is read: fp32 if its model keeps it in fp32.

    name: Name of the tensor in the model.
    exact: Parts of the names of modules that are kept in fp32.
    dtype: Type of all other tensors.
    """
    return torch.float32 if any(part.replace("*", "") in name for part in exact) else dtype


@lru_cache(maxsize=4)
def _sources_of(skeleton: Skeleton, names: tuple[str, ...]) -> dict[str, list[tuple[str, str]]]:
    """Return which tensors of a checkpoint belong to which part of a model.

    The keys are the prefixes of layers, such as "model.layers.3.", and "" for all tensors outside of layers.
    The values are pairs (name in the model, name in the checkpoint). Tensors that become several in the model
    are listed once, under the first of them.

    skeleton: The model without weights.
    names: Names of all tensors of the checkpoint.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(skeleton.model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    expected = skeleton.model.state_dict()
    found = defaultdict[str, list[tuple[str, str]]](list)
    start = f"{skeleton.path}."
    for name in names:
        prefix = skeleton.model.base_model_prefix
        target, _ = rename_source_key(name, renamings, converters, prefix, expected)
        target = target if target in expected or name not in expected else name
        if target.startswith(start):
            index = target.removeprefix(start).partition(".")[0]
            found[f"{start}{index}."].append((target, name))
        elif target in expected:
            found[""].append((target, name))
    return found


def _fill_buffers(model: Any, part: nn.Module, device: torch.device | str) -> None:
    """Compute the buffers of a part that no checkpoint holds, such as rotary frequencies, on a device.

    model: The model of Transformers, which knows how its modules are initialized.
    part: The part whose buffers lie on the device "meta".
    device: Device of the buffers.

    Raises InvalidRequest if Transformers does not initialize a buffer.
    """
    for name, module in part.named_modules():
        kept = module.state_dict()
        missing = {
            key: buffer
            for key, buffer in module.named_buffers(recurse=False)
            if key not in kept and buffer is not None and buffer.is_meta
        }
        if not missing:
            continue
        for key, buffer in missing.items():
            value = math.nan if buffer.is_floating_point() else -1
            setattr(module, key, torch.full_like(buffer, value, device=device))
        model._init_weights(module)  # noqa: SLF001
        for key in missing:
            buffer = getattr(module, key)
            if buffer.is_floating_point() and buffer.isnan().any():
                raise InvalidRequest(
                    f"Transformers does not initialize the buffer {name}.{key} of this family"
                )
