"""SpecSoT: one long answer, planned, written in parallel, verified by trees.

`SpecSoT` is imported from `specsot_app` when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specsot._version import __version__

if TYPE_CHECKING:
    from specsot_app.api import SpecSoT
    from specsot_app.api import SpecSoT as SpecSoTModel

__all__ = ["SpecSoT", "SpecSoTModel", "__version__"]


def __getattr__(name: str) -> Any:
    """Return the class `SpecSoT`, which is imported now. Raises AttributeError for any other name.

    name: "SpecSoT" or "SpecSoTModel".

    Both names give the same class. `__version__` is an ordinary attribute, for which this is not called.
    """
    # The second name is that of the system from which this one was developed.
    if name in ("SpecSoT", "SpecSoTModel"):
        from specsot_app.api import SpecSoT

        return SpecSoT
    raise AttributeError(f"module 'specsot' has no attribute {name!r}")
