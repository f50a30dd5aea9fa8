"""SpecSoT: one long answer, planned, written in parallel, verified by trees.

`SpecSoT` is imported from `specsot_app` when it is first used.

The import limits how long the threads of GNU's OpenMP, with which PyTorch computes, spin between two parallel
sections, unless the environment says how they wait. OpenMP reads the variable when torch is imported, so that
`specsot` must be imported before torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from specsot._version import __version__

if TYPE_CHECKING:
    from specsot_app.api import SpecSoT
    from specsot_app.api import SpecSoT as SpecSoTModel

# Turns of a loop. A forward pass has dozens of short parallel sections. Threads that sleep between them, as
# with the passive policy, double its time; threads that spin for long take cores from the next process.
SPIN_COUNT = "10000"

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

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
