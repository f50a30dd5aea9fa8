"""AITER's and SGLang's names for EAGLE's tree functions, re-exported from `specsot_compat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specsot_compat import aiter
from specsot_compat.aiter import *  # noqa: F403

if TYPE_CHECKING:
    from specsot.eagle import EagleConfig as EAGLEConfig  # noqa: F401

__all__ = aiter.__all__


def __getattr__(name: str) -> Any:
    """Return an attribute of `specsot_compat.aiter` that is imported only when it is first used.

    name: name of the attribute. Raises AttributeError if the module does not have it.
    """
    return getattr(aiter, name)
