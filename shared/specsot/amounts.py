"""Amounts of memory as people write them.

Refuses to know whose memory it is.
"""

from __future__ import annotations


def memory_in_words(size: float) -> str:
    """Bytes as "1.5 GiB"."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 100 or units[0] == "B" else f"{value:.1f} {units[0]}"
