"""Pins rotary embeddings that would change with the length of a batch."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

# Kinds of rotary embedding that Transformers recomputes from the largest position of a batch.
SWITCHING: Final = ("dynamic", "longrope")
# Stands for a pinned kind; Transformers leaves the frequencies of kinds that it does not know alone.
PINNED: Final = "pinned"


def pin_rotary(model: nn.Module, max_positions: int) -> None:
    """Choose the frequencies of every rotary module once, for all sequences.

    A batch holds sequences of several lengths, and stored keys keep the frequencies with which they were
    written. Hence longrope gets its long factors if the context is longer than the original one, and its
    short factors otherwise. Dynamic NTK scaling is off within the context, where sequences end.

    model: A model whose rotary buffers are computed, or one on the device "meta".
    max_positions: Length of the model's context, in tokens.
    """
    modules: list[Any] = list(model.modules())
    for module in modules:
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _pin(module, kinds, None, max_positions)
        elif isinstance(kinds, dict):
            module.rope_type = {
                layer_type: _pin(module, kind, layer_type, max_positions)
                for layer_type, kind in kinds.items()
            }


def _pin(module: Any, kind: str, layer_type: str | None, max_positions: int) -> str:
    """Set the frequencies of a rotary module for good, and return its new kind.

    module: The rotary module.
    kind: Its kind of rotary embedding, which is returned if the kind does not switch.
    layer_type: The layers for which the module has these frequencies; None: all layers.
    max_positions: Length of the model's context, in tokens.
    """
    if kind not in SWITCHING:
        return kind
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    frequencies = getattr(module, name)
    if kind == "longrope" and not frequencies.is_meta:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        settings = module.config.rope_parameters
        settings = settings if layer_type is None else settings[layer_type]
        original = settings["original_max_position_embeddings"]
        if max_positions > original:
            options = {} if layer_type is None else {"layer_type": layer_type}
            long, _ = ROPE_INIT_FUNCTIONS[kind](
                module.config, frequencies.device, seq_len=original + 1, **options
            )
            frequencies.copy_(long)
    return PINNED
