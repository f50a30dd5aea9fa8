"""EAGLE for models in memory: `Eagle`, `EagleConfig`, and the tree functions, re-exported from
`specsot_bench`.

The tree functions need nothing but NumPy; the rest is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specsot_bench import tree_functions
from specsot_bench.tree_functions import *  # noqa: F403

if TYPE_CHECKING:
    from specsot_bench.eagle import Eagle, EagleBenchmark, EagleConfig, EagleStats, Piece, SequenceStats

__all__ = [
    "Eagle",
    "EagleBenchmark",
    "EagleConfig",
    "EagleStats",
    "Piece",
    "SequenceStats",
    *tree_functions.__all__,
]


def __getattr__(name: str) -> Any:
    """Return a name of `specsot_bench.eagle`, which is imported now. Raises AttributeError for any other
    name.

    name: one of `__all__`.

    Raises ImportError if the package specsot_bench is not installed.
    """
    if name in __all__:
        import specsot_bench.eagle as top

        return getattr(top, name)
    raise AttributeError(f"module 'specsot.eagle' has no attribute {name!r}")
