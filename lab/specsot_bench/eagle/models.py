"""Loads a target and its draft model, from directories or from models in memory, and checks that they fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from specsot.checkpoint.config import ModelConfig, make_config
from specsot.core.vocabulary import unnamed_ids
from specsot.errors import HeadMismatch, InvalidRequest, ModelError
from specsot.members import AS_PUBLISHED, Overrides, Range
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.checkpoint import Checkpoint
from specsot_drafter.heads.loading import fit_head
from specsot_model.decoder import Decoder
from specsot_model.linear import resolve_dtype
from specsot_model.weights import HeldWeights


def unnamed_ids_of(directory: Path, width: int) -> tuple[int, ...]:
    """Return the ids below `width` that `directory`/tokenizer.json does not know, ascending.

    Works for any kind of tokenizer. Returns an empty tuple if the file does not exist. Raises ModelError if
    the file cannot be read.

    directory: the model's directory.
    width: number of the model's logits.

    Added tokens count as known.
    """
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        return ()
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        return unnamed_ids(tokenizer.get_vocab(with_added_tokens=True).values(), width)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{tokenizer_file}: not a readable tokenizer ({error})") from error


@dataclass(frozen=True, slots=True)
class TargetAndDraft:
    """A target with all its layers, and its draft.

    target: The target.
    draft: The draft head; None decodes without drafts.
    unnamed: Token ids of the target that its tokenizer does not know, and that are never written. Only a
        directory has a tokenizer, so that a target loaded elsewhere has none of these ids.
    """

    target: Decoder
    draft: DraftHead | None
    unnamed: tuple[int, ...] = ()

    @property
    def plain(self) -> TargetAndDraft:
        """Return the same target without its draft."""
        return replace(self, draft=None)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How directories are loaded.

    dtype: Data type of the weights; None is "auto".
    device: Torch device; None is the CPU.
    allow_pickle_bin: True: pytorch_model.bin is read, too, for its tensors alone.
    overrides: Settings that replace those of the head's config.
    """

    dtype: str | None = None
    device: str | None = None
    allow_pickle_bin: bool = False
    overrides: Overrides = AS_PUBLISHED


def load_models(draft: Any, target: Any, load_options: LoadOptions) -> TargetAndDraft:
    """Return target and draft, loaded or taken from memory.

    Only a target that is a directory has token ids that are never written. InvalidRequest is also raised if
    `dtype` or `device` is given for a target in memory.

    draft: An EAGLE head: its directory, or a loaded head; None: no head.
    target: A directory, a `Decoder` or a Transformers model.
    load_options: Options with which directories are loaded.
    Raises ModelError and HeadMismatch for models that cannot be used, InvalidRequest for objects that are no
    models.
    """
    loaded = _target(target, load_options)
    unnamed = unnamed_ids_of(Path(target), loaded.config.vocab) if isinstance(target, str | Path) else ()
    return TargetAndDraft(loaded, _draft(draft, loaded, load_options), unnamed)


def _target(target: Any, load_options: LoadOptions) -> Decoder:
    """Return the target as a decoder with all layers.

    A `Decoder` without all layers of its model raises InvalidRequest.

    target: A directory, a `Decoder` or a Transformers model.
    load_options: Options for a directory; dtype and device must be None for anything else.
    Raises ModelError for a model that cannot be used, InvalidRequest for an object that is no model.
    """
    if isinstance(target, str | Path):
        return _read_target(Path(target), load_options)
    for name in ("dtype", "device"):
        if getattr(load_options, name) is not None:
            raise InvalidRequest(f"{name} needs a directory; a loaded target has its own", name)
    if isinstance(target, Decoder):
        if len(target.layers) != target.config.layers:
            raise InvalidRequest(
                f"target must have all {target.config.layers} layers, this one has {target.layers}", "target"
            )
        return target
    if hasattr(target, "state_dict") and hasattr(target, "config"):
        return decoder_from_transformers(target)
    raise InvalidRequest(
        f"target must be a directory, a Decoder or a Transformers model, got {type(target).__name__}",
        "target",
    )


def _read_target(directory: Path, load_options: LoadOptions) -> Decoder:
    """Return the target, loaded from a directory.

    directory: Directory in the Hugging Face layout.
    load_options: Options of the loading; without a dtype it is "auto", without a device the CPU.
    Raises ModelError if the model cannot be loaded.
    """
    device = load_options.device or "cpu"
    dtype = resolve_dtype(load_options.dtype or "auto", device)
    return Decoder.load(directory, None, dtype, device, load_options.allow_pickle_bin)


def _draft(draft: Any, target: Decoder, load_options: LoadOptions) -> DraftHead | None:
    """Return the draft head, or None without one.

    A head of this package must have the target's dtype and device. Raises HeadMismatch if the head does not
    fit, ModelError if it cannot be read, InvalidRequest for any other object.

    draft: A directory, a head of this package, or a module of another library.
    target: The loaded target, which the head must fit.
    load_options: Options with which a directory is loaded.
    """
    if draft is None:
        return None
    if hasattr(draft, "tap_slices"):
        return _fitting(draft, target)
    return fit_head(
        _checkpoint(draft, load_options), target.edges, target.dtype, target.device, load_options.overrides
    )


def _checkpoint(draft: Any, load_options: LoadOptions) -> Checkpoint:
    """Return a published head's checkpoint: of its directory, or of the module into which another library
    loaded it.

    A module must have `state_dict` and `config`. Raises ModelError if the directory has no readable head.

    draft: The directory or module.
    load_options: Options with which a directory is loaded; they decide whether pytorch_model.bin is read,
        too.
    Raises InvalidRequest for anything else.
    """
    if isinstance(draft, str | Path):
        return Checkpoint.open(Path(draft), load_options.allow_pickle_bin)
    class_name = type(draft).__name__
    if hasattr(draft, "state_dict") and hasattr(draft, "config"):
        return Checkpoint.held(draft.state_dict(), draft.config.to_dict(), class_name)
    raise InvalidRequest(f"draft must be an EAGLE head: its directory, or loaded; got {class_name}", "draft")


def _fitting(head: DraftHead, target: Decoder) -> DraftHead:
    """Return a head that was loaded elsewhere, if it fits the target.

    The width of the layers that the head reads is compared as well.

    head: The loaded head.
    target: The loaded target.
    Raises HeadMismatch for another dtype or device, or if the head reads layers that the target lacks.
    """
    # A tensor's device includes the GPU's number, which a configured device may lack.
    table = target.edges.embedding()
    if (head.device, head.dtype) != (table.device, table.dtype):
        raise HeadMismatch(
            f"the head is {head.dtype} on {head.device}, the target {table.dtype} on {table.device}"
        )
    config = target.config
    for tap, weight in head.tap_slices().items():
        if tap > config.layers or weight.shape[1] != config.hidden:
            raise HeadMismatch(
                f"the head taps layer {tap} with {list(weight.shape)}, "
                f"the target has {config.layers} layers and states of [{config.hidden}]"
            )
    return head


@torch.inference_mode()
def decoder_from_transformers(model: Any) -> Decoder:
    """Return all layers of a causal language model of a supported family, in its dtype, on its device.

    Embeddings, norms and single projections share the model's memory; fused projections (and on CPUs all
    packed ones) are copies.

    A model that is spread over several devices raises as well.

    model: A model of Transformers.
    Raises ModelError for a model that is not supported.
    """
    config = config_of(model)
    weights = HeldWeights(_on_one_device(_published(model), model), _name(model))
    return Decoder(config, weights, Range(0, config.layers), model.dtype, torch.device(model.device))


def config_of(model: Any) -> ModelConfig:
    """Return the configuration of a model of Transformers, with its end tokens.

    A model without a generation config has the end tokens of its config alone. Raises ModelError for a model
    of an unsupported family.

    model: The loaded model.
    """
    generation = getattr(model, "generation_config", None)
    generation_fields = generation.to_dict() if generation is not None else {}
    return make_config(model.config.to_dict(), generation_fields, Path(_name(model)))


def _published(model: Any) -> Mapping[str, Tensor]:
    """Return a model's tensors under the names under which such models are published; Transformers holds some
    under other names.

    With a version of Transformers that has no such conversion, the names are returned as they are.

    model: A loaded model of Transformers.
    """
    tensors: dict[str, Tensor] = model.state_dict()
    try:
        from transformers.core_model_loading import revert_weight_conversion
    # Older versions of Transformers hold tensors under their published names.
    except ImportError:
        return tensors
    return revert_weight_conversion(model, tensors)


def _on_one_device(tensors: Mapping[str, Tensor], model: Any) -> Mapping[str, Tensor]:
    """Return the tensors. Raises ModelError if they are on several devices.

    The tensors are returned unchanged, and an empty mapping is accepted.

    tensors: Tensors by name.
    model: The model that the error names.
    """
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) > 1:
        raise ModelError(f"{_name(model)} is spread over {', '.join(devices)}; it must be on one device")
    return tensors


def _name(model: Any) -> str:
    """Return the class name of a model.

    model: A loaded model of Transformers.
    """
    return type(model).__name__
