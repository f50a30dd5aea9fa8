"""From the base's states to a head's features: which layers are tapped, what the taps apply, what is left to
do.

Tap i is the input of layer i, tap L the last output. fc is linear, so fc(concat[l, m, h]) = W1 l + W2 m +
W3 h is summed up where the taps are. A norm before fc is not: then the states themselves travel side by
side, and fc is applied where the head is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specsot.errors import HeadMismatch, InvalidRequest
from specsot.model.linear import Linear
from specsot_drafter.heads.checkpoint import Checkpoint

Normalise = Callable[[Tensor], Tensor]


class Fusion(Protocol):
    """taps, width: as `DraftHead` tells them."""

    taps: tuple[int, ...]
    width: int

    def slices(self) -> dict[int, Tensor]:
        """For each tap the matrix [width, base width] that its state is multiplied with."""
        ...

    def features(self, fused: Tensor) -> Tensor:
        """[rows, width], the sum over the taps, to [rows, hidden]."""
        ...


class SummedTaps:
    """fc where the taps are; its bias, if it has one, here."""

    def __init__(self, taps: tuple[int, ...], weight: Tensor, bias: Tensor | None) -> None:
        """weight: [hidden, taps * base width]."""
        self.taps, self.width = taps, weight.shape[0]
        self._parts, self._bias = weight.chunk(len(taps), dim=1), bias

    def slices(self) -> dict[int, Tensor]:
        return {tap: part.contiguous() for tap, part in zip(self.taps, self._parts)}

    def features(self, fused: Tensor) -> Tensor:
        return fused if self._bias is None else fused + self._bias


class ConcatenatedTaps:
    """The states side by side; norms and fc here."""

    def __init__(
        self, taps: tuple[int, ...], norms: Sequence[Normalise], fc: Linear, dtype: torch.dtype
    ) -> None:
        """norms: one over all states together, or one for each of them. dtype: of the slices."""
        self.taps, self.width = taps, fc.shape[1]
        self._norms, self._fc, self._dtype = norms, fc, dtype

    def slices(self) -> dict[int, Tensor]:
        return identity_slices(self.taps, self.width // len(self.taps), self._dtype)

    def features(self, fused: Tensor) -> Tensor:
        parts = fused.chunk(len(self._norms), dim=1)
        return self._fc(torch.cat([norm(part) for norm, part in zip(self._norms, parts)], dim=1))


class FinalHidden:
    """The base's last state alone, as its lm_head sees it: after its last norm."""

    def __init__(self, layers: int, hidden: int, norm: Normalise, dtype: torch.dtype) -> None:
        self.taps, self.width = (layers,), hidden
        self._norm, self._dtype = norm, dtype

    def slices(self) -> dict[int, Tensor]:
        return identity_slices(self.taps, self.width, self._dtype)

    def features(self, fused: Tensor) -> Tensor:
        return self._norm(fused)


def identity_slices(taps: tuple[int, ...], width: int, dtype: torch.dtype) -> dict[int, Tensor]:
    """For each tap [taps * width, width] of an identity: its state lands in columns of its own."""
    parts = torch.eye(len(taps) * width, dtype=dtype).split(width, dim=1)
    return {tap: part.contiguous() for tap, part in zip(taps, parts)}


TAPS_FIELD = "eagle_aux_hidden_state_layer_ids"
MIN_LAYERS = 7  # below, the taps 2, L // 2, L - 3 are not three different layers


def choose_taps(head: Checkpoint, layers: int, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """Ascending taps for a base of so many layers: those wanted, else the config's, else the reference's.

    Raises InvalidRequest for wanted ones that cannot be, HeadMismatch for the others.
    """
    if wanted is not None:
        if complaint := _complaint(wanted, layers):
            raise InvalidRequest(f"aux_layers {complaint}", field="aux_layers")
        return wanted
    named: Any = head.settings.get(TAPS_FIELD)
    if named is None:
        return _default_taps(head, layers)
    if not isinstance(named, list) or not all(type(tap) is int for tap in named):
        raise HeadMismatch(f"{head.source}: {TAPS_FIELD} must be layer numbers, got {named!r}")
    taps = tuple(tap + (min(named) == 1) for tap in sorted(named))
    if complaint := _complaint(taps, layers):
        raise HeadMismatch(f"{head.source}: {TAPS_FIELD} {named}: {complaint}")
    return taps


def _default_taps(head: Checkpoint, layers: int) -> tuple[int, ...]:
    if layers < MIN_LAYERS:
        raise HeadMismatch(
            f"{head.directory}: EAGLE-3 taps three layers, the base has only {layers} layers; "
            "name them with --aux-layers"
        )
    return (2, layers // 2, layers - 3)


def _complaint(taps: tuple[int, ...], layers: int) -> str | None:
    if not taps or list(taps) != sorted(set(taps)):
        return f"must be different layers in ascending order, got {list(taps)}"
    if taps[0] < 0 or taps[-1] > layers:
        return f"must be in 0..{layers}, as the base has {layers} layers, got {list(taps)}"
    return None
