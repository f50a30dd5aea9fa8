"""Which of the base's states an EAGLE-3 head reads: tap i is the input of layer i, tap L the last output.

Refuses to know tensors. One field of published configs has two meanings: in some it names the layers whose
input is taken, in others those whose output is. The latter begin with 1 by habit, the former never do.
"""

from __future__ import annotations

from typing import Any

from specsot.errors import HeadMismatch, InvalidRequest
from specsot_drafter.heads.checkpoint import Checkpoint

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
