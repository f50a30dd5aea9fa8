"""Finds the layer in a checkpoint that predicts a further token (multi-token prediction, MTP).

With the base model's normed output h_p of a position and the token that follows it, the layer computes

    z = eh_proj([enorm(embedding of the token), hnorm(h_p)])
    n = norm(block(z))

The base model's lm_head reads n, which also takes the place of h for the token after that. The block is an
ordinary layer of the base model's family. A checkpoint may have several such layers, one for each further
token; only the first one is found here, and it is used again for every further token. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from specsot.checkpoint.borrowed import borrowed_of
from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.families import text_name
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.gguf.directory import read_places
from specsot.checkpoint.gguf.finding import POINTER
from specsot.checkpoint.hub import offers, shapes_on_hub
from specsot.checkpoint.safetensors_header import INDEX, SINGLE, read_spans
from specsot.errors import ModelError


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of the modules of an MTP layer, without `.weight`.

    enorm: The norm of the token's embedding.
    hnorm: The norm of the base model's output.
    eh_proj: The projection of both, [hidden, 2 * hidden]; the embedding comes first.
    norm: The norm of the block's output.
    block: The prefix of the tensors of the block.
    """

    enorm: str
    hnorm: str
    eh_proj: str
    norm: str
    block: str


# Qwen3-Next and Qwen3.5 to 3.8; also what `specsot train --kind mtp` writes.
QWEN = MtpNames("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0")

# DeepSeek's and GLM's names of the same modules but the block, within the layer.
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


def find_mtp(tensors: Collection[str], config: ModelConfig) -> MtpNames | None:
    """Return the names of a checkpoint's first MTP layer, or None if it has none.

    tensors: Names of all tensors of the checkpoint.
    config: Config of the base model.

    Two layouts are known: that of Qwen (`mtp.*`), and that of DeepSeek and GLM, in which the layer has the
    number after the base model's last one: 47 layers -> "model.layers.47.eh_proj". GGUF files are read as the
    second.
    """
    block = config.names.layer.format(config.layers)
    enorm, hnorm, eh_proj, norm = (f"{block}.{part}" for part in DEEPSEEK)
    deepseek = MtpNames(enorm, hnorm, eh_proj, norm, block)
    return next((names for names in (QWEN, deepseek) if f"{names.enorm}.weight" in tensors), None)


def require_mtp(tensors: Collection[str], config: ModelConfig, directory: Path) -> MtpNames:
    """Return the names of a checkpoint's first MTP layer. Raises ModelError if it has none.

    tensors: Names of all tensors of the checkpoint.
    config: Config of the base model.
    directory: Where the checkpoint is, for the message.
    """
    names = find_mtp(tensors, config)
    if names is None:
        raise ModelError(f"{directory}: no MTP layer for a base of {config.layers} layers is in it")
    return names


def has_mtp(directory: Path, config: ModelConfig) -> bool:
    """Return whether the checkpoint in a directory has an MTP layer. No weights are read or fetched.

    directory: The model directory, as `resolve_model` returns it.
    config: Config of the base model.

    False for weights in pickles. Raises ModelError if a header or an index is broken, or if the hub cannot be
    asked.
    """
    return find_mtp(stored_names(directory), config) is not None


def block_config(config: ModelConfig, names: MtpNames, tensors: Collection[str]) -> ModelConfig:
    """Return the config of a model whose only layer is the MTP layer's block, and whose final norm is the
    layer's. Its tensors have the names that the checkpoint gives them.

    config: Config of the base model.
    names: Names of the MTP layer.
    tensors: Names of all tensors of the MTP layer's checkpoint.

    The block attends to all positions, also if other layers of the base model have a window or are gated
    delta layers. It has experts if its checkpoint has a router for it.
    """
    routing = config.routing
    if routing is not None:
        sparse = any(name.startswith(f"{names.block}.{config.names.router}.") for name in tensors)
        routing = replace(routing, dense=frozenset() if sparse else frozenset({0}))
    return replace(
        config,
        layers=1,
        names=replace(config.names, layer=names.block, norm=names.norm),
        routing=routing,
        delta=None,
        window=None,
        windowed=frozenset(),
        unrotated=frozenset(),
        sliding_rope=None,
    )


def stored_names(directory: Path) -> frozenset[str]:
    """Return the names of all tensors in a directory's safetensors or GGUF files, as a model of text alone
    has them. Return no names for other files.

    directory: The model directory, as `resolve_model` returns it.

    Raises ModelError if a header or an index is broken, or if the hub cannot be asked.
    """
    return frozenset(map(text_name, _names_in_files(directory)))


def _names_in_files(directory: Path) -> Iterable[str]:
    """Return the names of all tensors as the files have them; see `stored_names`.

    directory: The model directory.
    """
    if (directory / POINTER).is_file():
        return read_places(directory / POINTER)
    if (directory / INDEX).is_file():
        return read_json(directory / INDEX).get("weight_map", {})
    single = directory / SINGLE
    if single.is_file():
        if borrowed := borrowed_of(directory):
            borrowed.need_header(SINGLE)
        return read_spans(single)
    only_pickles = any(directory.glob("*.bin"))
    return shapes_on_hub(single) if not only_pickles and offers(single) else ()
