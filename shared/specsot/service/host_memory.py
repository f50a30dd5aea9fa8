"""Tells how much memory of the machine, or of this process's container, is free."""

from __future__ import annotations

from pathlib import Path

# Where Linux reports the machine's memory, and the limit of this process's cgroup.
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Return the machine's free memory in bytes, or what is left of the container's limit if that is less.

    Return None if neither is known.

    meminfo: File in which Linux reports the machine's memory.
    cgroup: Folder in which Linux reports the limit of this process's cgroup.
    """
    known = [free for free in (_free_on_machine(meminfo), _free_in_container(cgroup)) if free is not None]
    return min(known, default=None)


def _free_on_machine(meminfo: Path) -> int | None:
    """Return the available bytes of the machine, or None if they are unknown.

    They are unknown if the file cannot be read, or has no valid line "MemAvailable".

    meminfo: File in which Linux reports the machine's memory.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _free_in_container(cgroup: Path) -> int | None:
    """Return the bytes that are left of a cgroup 2 limit, or None if there is no limit.

    Inactive file pages count as free, because the kernel drops them before it enforces the limit. 0 is
    returned if the limit is exceeded. None is also returned if a file of the folder is missing or malformed.

    cgroup: Folder of the cgroup.
    """
    try:
        # Without a limit the file says "max", which raises ValueError.
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split(" ", 1) for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(limit - used + int(statistics.get("inactive_file", "0")), 0)
    except (OSError, ValueError):
        return None
