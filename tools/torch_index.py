"""Prints pip's options for a torch without CUDA, on a machine that has no NVIDIA driver; otherwise nothing.

`make install` and `make develop` pass them on. PyPI's torch for Linux brings gigabytes of CUDA libraries.
The index of the builds for CPUs is only named if it can be reached: pip asks it for every package, and
takes eight seconds for each if it cannot be reached.
"""

from __future__ import annotations

import os
import shutil
import sys
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

# Package index with builds of torch for CPUs.
INDEX: Final = "https://download.pytorch.org/whl/cpu"
TIMEOUT: Final = 3.0  # Seconds. How long the index may take to answer. Untuned.
# Variables with which a user chooses pip's index; then none is added.
INDEX_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX")
# Paths below the root that exist if a driver is loaded; dev/dxg is a GPU under WSL2.
DRIVER = ("proc/driver/nvidia", "dev/nvidia0", "dev/dxg")
# Name of the driver's library.
LIBRARY = "libcuda.so.1"
# Folders that may have the library, below the root.
LIBRARIES = (
    "usr/lib",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/wsl/lib",
)


def pip_options(
    environment: Mapping[str, str], platform: str, has_driver: bool, reaches: Callable[[str], bool]
) -> str:
    """Return options for pip, in one line; empty where a GPU may be used, where an index was chosen, and
    where the index cannot be reached.

    environment: Variables of this process by name.
    platform: Name of the operating system, as in sys.platform.
    has_driver: True if an NVIDIA driver is installed.
    reaches: Returns whether an address answers; only called if that matters.

    An index counts as chosen if one of INDEX_VARIABLES is set and not empty.
    """
    chosen = any(environment.get(name) for name in INDEX_VARIABLES)
    if has_driver or chosen or platform != "linux" or not reaches(INDEX):
        return ""
    return f"--extra-index-url {INDEX}"


def has_nvidia_driver(root: Path, find_program: Callable[[str], str | None] = shutil.which) -> bool:
    """Return whether an NVIDIA driver is installed.

    root: Root folder of the file system.
    find_program: Returns the path of a program by its name, or None.
    """
    library = any((root / folder / LIBRARY).exists() for folder in LIBRARIES)
    return library or any((root / path).exists() for path in DRIVER) or find_program("nvidia-smi") is not None


def answers(address: str) -> bool:
    """Return whether a server has the index. False if the address is unknown, out of reach, or does not
    answer within TIMEOUT seconds.

    address: Address of the index, which begins with "https://".

    The result is also False if the server answers with an error status.
    """
    try:
        with urllib.request.urlopen(f"{address}/torch/", timeout=TIMEOUT):
            return True
    # The host may be unknown or out of reach, or may not answer, or the page may be missing.
    except OSError:
        return False


if __name__ == "__main__":
    print(pip_options(os.environ, sys.platform, has_nvidia_driver(Path("/")), answers))
