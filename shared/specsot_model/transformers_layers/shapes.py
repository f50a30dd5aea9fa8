"""Measures what each layer of a family needs and stores, before any weight is loaded.

The model's own forward runs once on the device "meta", where tensors have shapes and no numbers. Our
attention function records the shapes of each layer's keys and values, and the layer's mask tells what a row
sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from specsot.checkpoint.config import ModelConfig
from specsot.errors import ModelError, one_line
from specsot_model.transformers_layers.interface import AttentionArguments, Sees, attending
from specsot_model.transformers_layers.rotary import pin_rotary
from specsot_model.transformers_layers.skeleton import fill_slots, measured_skeleton

# Arguments of a layer that follow from the positions of its rows, or say nothing about them.
ALLOWED: Final = frozenset(
    {
        "attention_mask",
        "attention_scaling",
        "cache_position",
        "causal_mask",
        "output_attentions",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "use_cache",
    }
)
# Rows of the batch that is measured; any number serves.
ROWS: Final = 3


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the attention of one layer stores, and what its rows see.

    heads: Number of query heads.
    kv_heads: Number of KV heads.
    key_dim: Numbers of a query or key of one head.
    value_dim: Numbers of a value of one head.
    window: How many positions a row sees, its own included; None: all positions.
    returns_tuple: True if the layer returns a tuple, whose first entry is the hidden state.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    returns_tuple: bool = False

    @property
    def dim(self) -> int:
        """Numbers that pages store of a key or a value of one head: the shorter one is padded with zeros."""
        return max(self.key_dim, self.value_dim)

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.heads // self.kv_heads


@lru_cache(maxsize=8)
def layer_shapes(config: ModelConfig) -> tuple[LayerShape, ...]:
    """Return the shape of each layer of a model.

    config: A config with `transformers`.

    Raises ModelError as `Skeleton` does, and if a layer needs more than its hidden state and positions: if it
    takes further tensors, calls attention not exactly once (a recurrent state, or KV of another layer), runs
    out of order, or sees positions in another pattern than all before, or a window.
    """
    skeleton = measured_skeleton(config)
    pin_rotary(skeleton.model, config.max_positions)
    layers = list(skeleton.layers)
    survey = _Survey(config, layers)
    trunk = fill_slots(skeleton.model, skeleton.path, layers, survey.visit)
    _check_embeddings(trunk, config)
    positions = torch.arange(ROWS, device="meta")[None]
    mask = torch.ones(1, ROWS, dtype=torch.bool, device="meta")
    entry = torch.empty(1, ROWS, config.hidden, device="meta")
    with attending(survey), torch.inference_mode():
        try:
            trunk(inputs_embeds=entry, position_ids=positions, attention_mask=mask, use_cache=False)
        except ModelError:
            raise
        except Exception as error:  # What a family's forward raises is not known.
            survey.refuse(f"its forward fails on hidden states alone ({one_line(error)})")
    if len(survey.shapes) != config.layers:
        survey.refuse(f"its forward runs {len(survey.shapes)} of {config.layers} layers")
    return tuple(survey.shapes)


class _Survey:
    """Visits every layer of a model on the device "meta", and records its shape.

    layer: Not used; `shapes` tells which layer runs.
    shapes: Shapes of the layers that were visited, in order.
    """

    layer = 0

    def __init__(self, config: ModelConfig, layers: Sequence[nn.Module]) -> None:
        """Prepare to visit the layers.

        config: The model's config.
        layers: The model's layers.
        """
        self.shapes = list[LayerShape]()
        self._config = config
        self._layers = layers
        self._calls = list[LayerShape]()
        self._output: Tensor | None = None

    def refuse(self, reason: str) -> None:
        """Raise ModelError with a reason.

        reason: Why the family cannot run over layer ranges, as a clause.
        """
        raise ModelError(
            f"model_type {self._config.model_type!r} cannot run over layer ranges in Transformers: {reason}"
        )

    def visit(self, index: int, hidden: Tensor, args: Sequence[Any], given: dict[str, Any]) -> Any:
        """Run a layer, record its shape, and return its output.

        index: Index of the layer.
        hidden: [1, ROWS, hidden], the layer's input.
        args: Further arguments by place.
        given: Further arguments by name.

        Raises ModelError if the layer needs more than its hidden state and positions.
        """
        if index != len(self.shapes):
            self.refuse(f"layer {index} runs after {len(self.shapes)} layers")
        if tuple(hidden.shape) != (1, ROWS, self._config.hidden):
            self.refuse(f"layer {index} gets a hidden state of shape {list(hidden.shape)}")
        if self._output is not None and hidden is not self._output:
            self.refuse(f"its forward computes between layers {index - 1} and {index}")
        layer = self._layers[index]
        self._check_arguments(index, layer, hidden, args, given)
        self._calls.clear()
        kind = type(layer).__name__
        try:
            output = layer(hidden, *args, **given)
        except ModelError:
            raise
        except Exception as error:
            # Some experts ask for numbers, which "meta" does not have. Attention has been called by then.
            if not self._calls:
                self.refuse(f"layer {index} ({kind}) fails before it calls attention ({one_line(error)})")
            output = torch.empty_like(hidden)
        if len(self._calls) != 1:
            reason = "a recurrent state, or KV of another layer" if not self._calls else "several attentions"
            self.refuse(f"layer {index} ({kind}) calls attention {len(self._calls)} times ({reason})")
        is_tuple = isinstance(output, tuple)
        self._output = output[0] if is_tuple else output
        (shape,) = self._calls
        self.shapes.append(
            LayerShape(shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim, shape.window, is_tuple)
        )
        return output

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: AttentionArguments
    ) -> Tensor:
        """Record the shapes of a layer's attention, and return an output of the right shape.

        query: [1, heads, ROWS, key_dim].
        key: [1, kv_heads, ROWS, key_dim].
        value: [1, kv_heads, ROWS, value_dim].
        mask: What `interface` made as the layer's mask; None: the layer sees all positions before it.
        options: Not used.
        """
        heads, rows, key_dim = query.shape[1:]
        if key.shape[2] != rows or value.shape[2] != rows:
            self.refuse(f"layer {len(self.shapes)} attends to {key.shape[2]} keys for {rows} rows")
        window = None if mask is None else self._window(mask)
        self._calls.append(LayerShape(heads, key.shape[1], key_dim, value.shape[-1], window))
        return query.new_empty(1, rows, heads, value.shape[-1])

    def _window(self, mask: Any) -> int | None:
        """Return the window of a mask; None if a row sees all positions, or no sequence exceeds the window.

        mask: What the layer passes as its attention mask.

        Raises ModelError for any other pattern.
        """
        sees: Sees | None = getattr(mask, "sees", None)
        if sees is None:
            self.refuse(f"layer {len(self.shapes)} computes a mask of its own")
        assert sees is not None
        last = self._config.max_positions - 1
        try:
            windows = [_window_of(sees, position) for position in (last, last - last // 3)]
        except Exception as error:  # A family's own function may raise anything.
            return self.refuse(f"the mask of layer {len(self.shapes)} cannot be read ({one_line(error)})")
        window, earlier = windows
        if window is None or earlier != min(window, last - last // 3 + 1):
            return self.refuse(f"layer {len(self.shapes)} hides positions in a pattern that is no window")
        return None if window > last else window

    def _check_arguments(
        self, index: int, layer: nn.Module, hidden: Tensor, args: Sequence[Any], given: dict[str, Any]
    ) -> None:
        """Raise ModelError if a layer takes a tensor, or a collection of values, that is not ALLOWED.

        index: Index of the layer.
        layer: The layer, for the names of its arguments.
        hidden: The layer's input.
        args: Further arguments by place.
        given: Further arguments by name.
        """
        placed = inspect.signature(layer.forward).bind_partial(hidden, *args).arguments
        others = {**dict(list(placed.items())[1:]), **given}
        needed = [
            name
            for name, value in others.items()
            if name not in ALLOWED and not isinstance(value, None | bool | int | float | str)
        ]
        if needed:
            self.refuse(f"layer {index} needs {', '.join(needed)} besides its hidden state")


def _window_of(sees: Sees, position: int) -> int | None:
    """Return how many positions a row sees, its own included; None if these are not the last ones.

    sees: The mask's function.
    position: Position of the row.
    """
    zero = torch.zeros((), dtype=torch.long)
    keys = torch.arange(position + 1)
    seen = torch.as_tensor(sees(zero, zero, torch.tensor(position), keys)).expand(position + 1)
    count = int(seen.sum())
    return count if count and bool(seen[-count:].all()) else None


def _check_embeddings(trunk: nn.Module, config: ModelConfig) -> None:
    """Raise ModelError if a model embeds more than its tokens, such as positions.

    trunk: The module whose forward calls the layers, with slots in their place.
    config: The model's config.
    """
    embeddings = [name for name, part in trunk.named_modules() if isinstance(part, nn.Embedding)]
    if len(embeddings) != 1:
        raise ModelError(
            f"model_type {config.model_type!r} has embeddings besides its tokens': {', '.join(embeddings)}"
        )
