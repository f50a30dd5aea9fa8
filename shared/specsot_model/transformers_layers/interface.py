"""Our attention function and mask function, as Transformers' modules call them, and the version they fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from specsot.errors import ModelError

# Names under which Transformers finds our functions. Layers of a range run under RUNS, for which Transformers
# makes no masks. Layers that are measured run under MEASURES, whose masks tell what each layer sees.
RUNS: Final = "specsot"
MEASURES: Final = "specsot-measures"
# The release of Transformers whose modules are run. The extra "families" in pyproject.toml installs the same.
RELEASE: Final = "5.23"
# Options of an attention call that change nothing here: training, bookkeeping, what queries and keys contain
# already, and the window, which is measured with the masks.
IGNORED: Final = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "dropout",
        "is_causal",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "sliding_window",
        "use_cache",
    }
)
# Given a query position and key positions, both LongTensors, returns which keys the query sees.
Sees = Callable[..., Tensor]


class Attention(Protocol):
    """Does the attention of the layer that runs, whenever the layer's module calls for it.

    layer: Index of the layer that runs, within its range.
    """

    layer: int

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: AttentionArguments
    ) -> Tensor:
        """Return the output of every query head, [1, rows, heads, value_dim].

        query: [1, heads, rows, key_dim], normed and rotated, not scaled.
        key: [1, kv_heads, rows, key_dim], normed and rotated.
        value: [1, kv_heads, rows, value_dim].
        mask: What the layer passes as its attention mask.
        options: Further options of the call.
        """
        ...


class AttentionArguments:
    """What an attention call of Transformers says besides queries, keys, values and mask.

    scaling: Factor of the queries.
    softcap: Scores become softcap * tanh(score / softcap); None: they are not capped.
    sinks: [heads], a score per query head that has no value; None: there is none.
    """

    __slots__ = ("scaling", "sinks", "softcap")

    def __init__(self, key_dim: int, given: dict[str, Any]) -> None:
        """Read the options. Raises ModelError for one that is not supported.

        key_dim: Numbers of a key, whose inverse root scales queries unless `scaling` is given.
        given: The keyword arguments of the call.
        """
        scaling = given.pop("scaling", None)
        self.scaling: float = key_dim**-0.5 if scaling is None else scaling
        self.softcap: float | None = given.pop("softcap", None)
        self.sinks: Tensor | None = given.pop("s_aux", None)
        unknown = sorted(name for name in given.keys() - IGNORED if given[name] is not None)
        if unknown:
            raise ModelError(f"the attention of this family has options that are not supported: {unknown}")


_attention: ContextVar[Attention] = ContextVar("attention of the running layers")


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Let `attention` do the attention of all layers that run within the context, in this thread.

    attention: Called by the layers' attention modules.
    """
    token = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(token)


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Return (output, None): what Transformers' attention modules expect of an attention function.

    The output is [1, rows, heads, value_dim]; there are no attention weights.

    module: The attention module; not used.
    query: [1, heads, rows, key_dim], normed and rotated, not scaled.
    key: [1, kv_heads, rows, key_dim], normed and rotated.
    value: [1, kv_heads, rows, value_dim].
    attention_mask: What the layer passes as its mask.
    given: Further options; see `AttentionArguments`.
    """
    options = AttentionArguments(query.shape[-1], given)
    return _attention.get().attend(query, key, value, attention_mask, options), None


class MaskStandIn(Tensor):
    """Stands for an attention mask that no layer may compute with.

    sees: Given batch, head, query position and key positions, returns which keys the query sees.
    """

    sees: Sees

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise ModelError for every operation, because its result would hide other positions than a mask."""
        raise ModelError("layers of this family compute with their attention mask, as sparse attention does")


def _describe_mask(**given: Any) -> Tensor:
    """Return a stand-in for a mask, with the function by which the mask would be computed.

    given: The arguments with which Transformers asks for a mask; only `mask_function` is used.
    """
    mask = torch.empty(1, device="meta").as_subclass(MaskStandIn)
    mask.sees = given["mask_function"]
    return mask


@cache
def register() -> None:
    """Register our functions with Transformers, once in a process.

    Raises ModelError if Transformers is missing, or of another release than RELEASE.
    """
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        installed = "none"
    if not installed.startswith(f"{RELEASE}."):
        raise ModelError(
            f"this family runs through Transformers {RELEASE}, and {installed} is installed:"
            " pip install 'specsot[families]'"
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (RUNS, MEASURES):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(MEASURES, _describe_mask)
