"""EAGLE for models in memory: `Eagle`, `EagleConfig`, and the tree functions.

Knows only where they are: the functions need nothing but NumPy; the rest is imported when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specsot import kernels
from specsot.kernels import *  # noqa: F403

if TYPE_CHECKING:
    from specsot_app.eagle import Eagle, EagleBenchmark, EagleConfig, EagleStats, Piece, SequenceStats

__all__ = [
    "Eagle",
    "EagleBenchmark",
    "EagleConfig",
    "EagleStats",
    "Piece",
    "SequenceStats",
    *kernels.__all__,
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import specsot_app.eagle as top

        return getattr(top, name)
    raise AttributeError(f"module 'specsot.eagle' has no attribute {name!r}")
