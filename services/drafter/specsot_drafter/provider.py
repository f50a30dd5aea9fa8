"""What a drafter's part works with: whoever makes an engine for every epoch.

Refuses to know whether there are weights behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from specsot.members import Configuration, Registration
from specsot_drafter.engine import DraftEngine


class EngineProvider(Protocol):
    @property
    def name(self) -> str: ...

    def tap_slices(self) -> Mapping[int, Any]:
        """By layer, the slice of the head's fc for what taps its input."""
        ...

    def registration(self) -> Registration: ...

    def make_engine(self, configuration: Configuration) -> DraftEngine: ...
