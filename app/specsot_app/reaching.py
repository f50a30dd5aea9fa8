"""How a master elsewhere is reached: whose certificate it must show, and what it is shown.

Tokens never stand on a command line, where everybody on the machine could read them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specsot.transport.security import Tls, first_token


@dataclass(frozen=True, slots=True)
class Reach:
    """tls: whom to trust. token: what to show; it is nobody else's business."""

    tls: Tls = field(default_factory=Tls)
    token: str | None = field(default=None, repr=False)


def reach_of(
    tls_ca: Path | None, token_file: Path | None, environment: Mapping[str, str] = os.environ
) -> Reach:
    """As a command was told. A file wins over the environment. Raises InvalidRequest."""
    token = first_token(token_file) if token_file else environment.get("SPECSOT_TOKEN", "").strip()
    return Reach(Tls(tls_ca), token or None)
