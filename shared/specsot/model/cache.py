"""The folder of what SpecSoT keeps between runs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`specsot` in XDG_CACHE_HOME, or in ~/.cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specsot"
